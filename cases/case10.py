"""This project's own case: which releases of the engines train? A map of verdicts, settings by releases.

Each cell is a run of a small model by one release of an engine, which the gate compares with plain PyTorch. The case
runs the installed releases; `./run.sh releases` installs and runs others. The figure shows every release that has a
record. A failed cell is marked where no public report is known that says the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cases import _release_words as release_words
from cases._release_reports import REPORTS
from cases._release_words import UNTESTED
from cases._releases import ENGINES, OPTION, SETTING_ROWS, columns_of, order, ordered
from harness.core import method
from harness.core.job import Budget, Job, Workload
from harness.core.record import Record
from methods.engines.release import Release
from papers.figures import plot
from papers.figures.case import Case
from papers.figures.point import FigureRow, row_of
from papers.figures.profile import CaseProfile

NUM_LAYERS = 4
WORKLOAD = Workload(
    num_layers=NUM_LAYERS, hidden_size=64, num_heads=4, seq_len=64, batch_size=8, vocab_size=512
)
# Few steps, because the rate rises from 0: of more steps the first ones, where faults show, would be a smaller part.
STEP_COUNTS: dict[str, Any] = {"steps": 4, "warmup": 1, "repeats": 1}
# For each kind of cell its color, which differs from the others in grey, too, the color of its word, and its hatching.
CELL_LOOKS = {
    release_words.PASSES: ("#DCEBDD", "#3F5F42", None),
    release_words.FAILS: ("#8E1B1B", "white", None),
    release_words.CRASH: ("#D9A441", "black", None),
    release_words.UNAVAILABLE: ("white", plot.EDGE, "////"),
}
OTHER_LOOK = ("#B9B9C9", "black", None)  # timeout, untested, ...
SHORT_KINDS = {release_words.UNAVAILABLE: "n/a"}
CELL_INCHES, ROW_INCHES, LEFT_INCHES, RIGHT_INCHES = 0.225, 0.19, 2.0, 0.1
TOP_INCHES, GAP_INCHES, BOTTOM_INCHES = 0.45, 0.75, 1.05  # a gap has releases and the next panel's title
FEWEST_COLUMNS = 26  # the small print needs as much
FONT_SIZE, CHARACTER_INCHES = 4.6, 0.036  # of a word in a cell


class ReleaseMap(Case):
    metric = "loss_difference"
    methods = tuple(dict.fromkeys(row.method for row in SETTING_ROWS.values()))
    in_all = False

    def profiles(self, case_profile: CaseProfile) -> Sequence[CaseProfile]:
        """Return a profile for each workload of the map. Its sizes do not depend on the asked profile; only its device
        does."""
        loads = dict.fromkeys(workload_of(name) for name in SETTING_ROWS)
        return [_profile(case_profile, load) for load in loads]

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        """Return the jobs of the installed releases, which install nothing."""
        installed = ((name, ENGINES[row.engine].installed) for name, row in SETTING_ROWS.items())
        return [
            job_of(case_profile, name, release) for name, release in installed if release in columns_of(name)
        ]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return a row for each cell with a record. `series` is the name of its row, `group` its release, and `reason`
        the text of the gate, also of a cell that passes, or how the run ended."""
        cells: dict[tuple[str, str], list[Record]] = {}
        for cell, record in _records_of_cells(records, case_profile):
            cells.setdefault(cell, []).append(record)
        names = list(SETTING_ROWS)
        in_order = sorted(cells, key=lambda cell: (names.index(cell[0]), order(cell[1])))
        return [_cell_row(name, release, cells[name, release]) for name, release in in_order]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        return _draw_release_map(rows, note)


def workload_of(name: str) -> Workload:
    return replace(WORKLOAD, **SETTING_ROWS[name].workload)


def job_of(case_profile: CaseProfile, name: str, release: str | None = None) -> Job:
    """Return the job of a cell: a row, by its name, and a release; None: the installed one."""
    row = SETTING_ROWS[name]
    is_other = release not in (None, ENGINES[row.engine].installed)
    options = {**row.options, **({OPTION: release} if is_other else {})}
    return _profile(case_profile, workload_of(name)).job(row.method, NUM_LAYERS, **options)


def _profile(case_profile: CaseProfile, load: Workload) -> CaseProfile:
    device = "cuda" if case_profile.device == "cuda" else "cpu"
    return replace(case_profile, workload=load.at_depth(1), budget=Budget(), device=device, **STEP_COUNTS)


def _records_of_cells(
    records: Sequence[Record], case_profile: CaseProfile
) -> Iterator[tuple[tuple[str, str], Record]]:
    """Yield each record of a cell after the cell: the name of its row, and its release."""
    rows = [(name, _without_release(job_of(case_profile, name))) for name in SETTING_ROWS]
    for record in records:
        with contextlib.suppress(ValueError):
            # the method no longer has one of the record's options; no version
            job = _without_release(record.job)
            for name in (name for name, job_of_row in rows if job_of_row == job):
                engine = ENGINES[SETTING_ROWS[name].engine]
                version = (
                    record.job.options.get(OPTION) or record.software.get(engine.package) or engine.installed
                )
                # torch's build is behind a +
                release = Release(engine.package, str(version).partition("+")[0])
                yield (name, release.version), record


def _without_release(job: Job) -> Job:
    """Return the job by the installed release, with every option of its method."""
    options = {name: value for name, value in job.options.items() if name != OPTION}
    return replace(job, options=dataclasses.asdict(method.create(job.method, options)))  # type: ignore[call-overload]


def _cell_row(name: str, release: str, records: Sequence[Record]) -> FigureRow:
    """Return the row of a cell: that of its newest result or, without one, of its newest record."""
    newest = next((record for record in reversed(records) if record.is_result), records[-1])
    row, gate = row_of(ReleaseMap.metric, [newest]), newest.gate
    prefix = f"{UNTESTED}: " if gate.verdict == UNTESTED else ""
    reason = f"{prefix}{gate.text}" if newest.status == "ok" else newest.reason
    return replace(row, series=name, group=release, reason=reason)


def _draw_release_map(rows: Sequence[FigureRow], note: str) -> plot.Figure:
    panels = {name: _rows_of_engine(name, rows) for name in ENGINES}
    panels = {name: cells for name, cells in panels.items() if cells}
    settings = {name: _settings_of(cells) for name, cells in panels.items()}
    columns = {name: ordered(cell.group for cell in cells) for name, cells in panels.items()}
    width = LEFT_INCHES + RIGHT_INCHES + CELL_INCHES * max(FEWEST_COLUMNS, *map(len, columns.values()))
    heights = [ROW_INCHES * len(names) for names in settings.values()]
    height = TOP_INCHES + sum(heights) + GAP_INCHES * (len(panels) - 1) + BOTTOM_INCHES
    with plot.empty(width, height) as drawing:
        top = height - TOP_INCHES
        for name, cells in panels.items():
            panel_height, panel_width = ROW_INCHES * len(settings[name]), CELL_INCHES * len(columns[name])
            bottom = (top - panel_height) / height
            axes = drawing.add_axes((LEFT_INCHES / width, bottom, panel_width / width, panel_height / height))
            plot.title(axes, name)
            _draw_engine_panel(axes, cells, settings[name], columns[name])
            top -= panel_height + GAP_INCHES
        _draw_legend(drawing, rows)
        plot.small_print(drawing, _small_print(rows, note))
    return drawing


def _rows_of_engine(name: str, rows: Sequence[FigureRow]) -> list[FigureRow]:
    return [row for row in rows if row.series in SETTING_ROWS and SETTING_ROWS[row.series].engine == name]


def _settings_of(rows: Sequence[FigureRow]) -> list[str]:
    """Return the names of these rows' settings, in the order of SETTING_ROWS."""
    names = {row.series for row in rows}
    return [name for name in SETTING_ROWS if name in names]


def _draw_engine_panel(
    axes: plot.Axes, rows: Sequence[FigureRow], settings: Sequence[str], columns: Sequence[str]
) -> None:
    """Draw the cells of an engine. Neighbors of equal words share one word, which then may be longer."""
    cells = {(row.series, row.group): row for row in rows}
    for height, setting in enumerate(settings):
        row_cells = [cells.get((setting, release)) for release in columns]
        for (kind, text, is_unreported), run in itertools.groupby(
            enumerate(row_cells), lambda numbered: _look_of(numbered[1])
        ):
            indices = [index for index, _ in run]
            face, ink, hatch = CELL_LOOKS.get(kind, OTHER_LOOK)
            if kind == release_words.NOT_RUN:
                continue
            look: Any = {"edgecolor": plot.EDGE if hatch else "white", "linewidth": 0.4, "hatch": hatch}
            for index in indices:
                axes.add_patch(_box(index, height, 1, facecolor=face, **look))
            if is_unreported:
                axes.add_patch(
                    _box(indices[0], height, len(indices), facecolor="none", edgecolor="black", linewidth=1.4)
                )
            shown_text = _fitting_text(text, kind, len(indices))
            # no line between two cells crosses the word
            box = {"facecolor": face, "edgecolor": "none", "pad": 0.2}
            look = {"ha": "center", "va": "center", "fontsize": FONT_SIZE, "color": ink, "bbox": box}
            axes.text(indices[0] + len(indices) / 2, height + 0.5, shown_text, **look)
    axes.set(xlim=(0, len(columns)), ylim=(len(settings), 0))
    axes.set_xticks([index + 0.5 for index in range(len(columns))], columns, rotation=90, fontsize=5)
    axes.set_yticks([index + 0.5 for index in range(len(settings))], settings, fontsize=5.8)
    axes.tick_params(length=0)


def _look_of(row: FigureRow | None) -> tuple[str, str, bool]:
    """Return a cell's kind, its word, and if it fails without a public report."""
    if row is None:
        return release_words.NOT_RUN, "", False
    return release_words.cell_kind(row), release_words.cell_word(row), release_words.is_unreported(row)


def _box(x: float, y: float, width: float, **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, 1, **look)


def _fitting_text(text: str, kind: str, num_cells: int) -> str:
    """Return the text if it fits into so many cells; else the kind, or a short word for it."""
    most_characters = int(num_cells * CELL_INCHES / CHARACTER_INCHES)
    for label in (text, kind, SHORT_KINDS.get(kind, "")):
        if label and len(label) <= most_characters:
            return label
    return f"{kind[:4]}."


def _kind_label(kind: str) -> str:
    return f"{kind} ({SHORT_KINDS[kind]})" if kind in SHORT_KINDS else kind


def _draw_legend(drawing: plot.Figure, rows: Sequence[FigureRow]) -> None:
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(release_words.cell_kind(row) for row in rows)
    entries = []
    for kind in kinds:
        face, _, hatch = CELL_LOOKS.get(kind, OTHER_LOOK)
        entries.append(
            Patch(facecolor=face, edgecolor=plot.EDGE, linewidth=0.4, hatch=hatch, label=_kind_label(kind))
        )
    if any(release_words.is_unreported(row) for row in rows):
        entries.append(
            Patch(facecolor="none", edgecolor="black", linewidth=1.4, label=release_words.NONE_KNOWN)
        )
    entries.append(Patch(facecolor="white", edgecolor=plot.EDGE, linewidth=0.4, label=release_words.NOT_RUN))
    drawing.legend(handles=entries, ncols=len(entries), loc="upper right", bbox_to_anchor=(0.995, 1.0))


def _small_print(rows: Sequence[FigureRow], note: str) -> str:
    texts = [
        f"measured on {rows[0].machine}, {note}; {rows[0].num_layers} layers x {rows[0].hidden_size}: a cell passes"
        " by the gate if its losses, gradient norms, weights and moments are those of plain PyTorch",
        *release_words.notes_on_missing_probe(rows),
        "in a name: 4: micro-batches; caller: several backward passes before one step, the last one marked;"
        " unmarked: none is; no-clip: no clipping",
    ]
    return plot.wrapped(texts)


@dataclass(frozen=True)
class CellChoice:
    """The cells that a call of `./run.sh releases` asks for. An empty field sets no restriction."""

    engine: str | None = None
    names: Sequence[str] = ()  # of rows
    since: str = ""
    until: str = ""
    releases: Sequence[str] = ()  # these alone, also such as the table lacks
    # True: only the cells at which a public report begins or ends to apply, see _beside_reports()
    is_quick: bool = False
    has_gpu: bool = False  # False: is_quick leaves out reports that a CPU cannot show

    def includes(self, name: str, release: str) -> bool:
        """True if the release is one of the row's, and between `since` and `until`."""
        first = max(order(self.since), order(SETTING_ROWS[name].since))
        return first <= order(release) and (not self.until or order(release) <= order(self.until))


def cells_of(choice: CellChoice) -> list[tuple[str, str]]:
    """Return the cells that a call asks for, each as the name of its row and its release. Raises ValueError for an
    unknown engine, row or version, and for releases where several engines are asked for."""
    engine, names = choice.engine, choice.names
    for asked_names, known_names, noun in (
        ([engine] if engine else [], ENGINES, "an engine"),
        (names, SETTING_ROWS, "a setting"),
    ):
        if unknown_names := [name for name in asked_names if name not in known_names]:
            raise ValueError(f"expected {noun} of {', '.join(known_names)}, got {unknown_names[0]!r}")
    rows = [
        name
        for name, row in SETTING_ROWS.items()
        if engine in (None, row.engine) and (not names or name in names)
    ]
    engines = list(dict.fromkeys(SETTING_ROWS[name].engine for name in rows))
    if not rows:
        raise ValueError(f"expected a setting of {engine}, got {', '.join(names)}; leave --only out")
    if (choice.since or choice.until or choice.releases) and len(engines) > 1:
        raise ValueError(
            f"expected releases of one engine, got {', '.join(engines)}; try --only {engines[0]}"
        )
    for version in filter(None, (*choice.releases, choice.since, choice.until)):
        Release(ENGINES[engines[0]].package, version)  # raises ValueError if it is none
    cells = [(name, release) for name in rows for release in (choice.releases or columns_of(name))]
    cells = [cell for cell in cells if choice.includes(*cell)]
    if not choice.is_quick:
        return cells
    quick_cells = _beside_reports(choice.has_gpu)
    return [cell for cell in cells if cell in quick_cells]


def _beside_reports(has_gpu: bool) -> set[tuple[str, str]]:
    """Return cells of each report's first row: the first and the last release that the report is about, the release
    just before the first, and the release just after the last. `has_gpu`: False leaves out reports that a CPU cannot
    show."""
    cells = set()
    for report in REPORTS:
        for name in report.rows[:1] if has_gpu or not report.needs_gpu else ():
            columns = columns_of(name)
            for earlier, later in itertools.pairwise(columns):
                if report.is_about(earlier) != report.is_about(later):
                    cells |= {(name, earlier), (name, later)}
    return cells
