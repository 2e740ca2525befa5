"""Draws the figure of case 10: a panel for each engine, a row for each setting, a column for each release, a word in
each cell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cases import _release_words as release_words
from cases._releases import ENGINES, ROWS, ordered
from papers.figures import plot
from papers.figures.point import FigureRow

# For each kind of cell its color, which differs from the others in grey, too, the color of its word, and its hatching.
LOOKS = {
    release_words.PASSES: ("#DCEBDD", "#3F5F42", None),
    release_words.FAILS: ("#8E1B1B", "white", None),
    release_words.CRASH: ("#D9A441", "black", None),
    release_words.UNAVAILABLE: ("white", plot.EDGE, "////"),
}
OTHER = ("#B9B9C9", "black", None)  # timeout, untested, ...
SHORT = {release_words.UNAVAILABLE: "n/a"}
CELL_INCHES, ROW_INCHES, LEFT_INCHES, RIGHT_INCHES = 0.225, 0.19, 2.0, 0.1
TOP_INCHES, GAP_INCHES, BOTTOM_INCHES = 0.45, 0.75, 1.05  # a gap has releases and the next panel's title
FEWEST_COLUMNS = 26  # the small print needs as much
FONT_SIZE, CHARACTER_INCHES = 4.6, 0.036  # of a word in a cell


def figure(rows: Sequence[FigureRow], note: str) -> plot.Figure:
    panels = {name: _of_engine(name, rows) for name in ENGINES}
    panels = {name: cells for name, cells in panels.items() if cells}
    settings = {name: _settings(cells) for name, cells in panels.items()}
    columns = {name: ordered(cell.group for cell in cells) for name, cells in panels.items()}
    width = LEFT_INCHES + RIGHT_INCHES + CELL_INCHES * max(FEWEST_COLUMNS, *map(len, columns.values()))
    heights = [ROW_INCHES * len(names) for names in settings.values()]
    height = TOP_INCHES + sum(heights) + GAP_INCHES * (len(panels) - 1) + BOTTOM_INCHES
    with plot.empty(width, height) as drawing:
        top = height - TOP_INCHES
        for name, cells in panels.items():
            tall, wide = ROW_INCHES * len(settings[name]), CELL_INCHES * len(columns[name])
            place = (LEFT_INCHES / width, (top - tall) / height, wide / width, tall / height)
            axes = drawing.add_axes(place)
            plot.title(axes, name)
            _panel(axes, cells, settings[name], columns[name])
            top -= tall + GAP_INCHES
        _legend(drawing, rows)
        plot.small_print(drawing, _small_print(rows, note))
    return drawing


def _of_engine(name: str, rows: Sequence[FigureRow]) -> list[FigureRow]:
    return [row for row in rows if row.series in ROWS and ROWS[row.series].engine == name]


def _settings(rows: Sequence[FigureRow]) -> list[str]:
    """Return the names of these rows' settings, in the order of ROWS."""
    names = {row.series for row in rows}
    return [name for name in ROWS if name in names]


def _panel(
    axes: plot.Axes, rows: Sequence[FigureRow], settings: Sequence[str], columns: Sequence[str]
) -> None:
    """Draw the cells of an engine. Neighbors of equal words share one word, which then may be longer."""
    cells = {(row.series, row.group): row for row in rows}
    for height, setting in enumerate(settings):
        row_cells = [cells.get((setting, release)) for release in columns]
        for (kind, text, is_unreported), run in itertools.groupby(
            enumerate(row_cells), lambda numbered: _look_of(numbered[1])
        ):
            at = [index for index, _ in run]
            face, ink, hatch = LOOKS.get(kind, OTHER)
            if kind == release_words.NOT_RUN:
                continue
            look: Any = {"edgecolor": plot.EDGE if hatch else "white", "linewidth": 0.4, "hatch": hatch}
            for index in at:
                axes.add_patch(_box(index, height, 1, facecolor=face, **look))
            if is_unreported:
                axes.add_patch(
                    _box(at[0], height, len(at), facecolor="none", edgecolor="black", linewidth=1.4)
                )
            shown_text = _fitting(text, kind, len(at))
            # no line between two cells crosses the word
            box = {"facecolor": face, "edgecolor": "none", "pad": 0.2}
            look = {"ha": "center", "va": "center", "fontsize": FONT_SIZE, "color": ink, "bbox": box}
            axes.text(at[0] + len(at) / 2, height + 0.5, shown_text, **look)
    axes.set(xlim=(0, len(columns)), ylim=(len(settings), 0))
    axes.set_xticks([index + 0.5 for index in range(len(columns))], columns, rotation=90, fontsize=5)
    axes.set_yticks([index + 0.5 for index in range(len(settings))], settings, fontsize=5.8)
    axes.tick_params(length=0)


def _look_of(row: FigureRow | None) -> tuple[str, str, bool]:
    """Return a cell's kind, its word, and if it fails without a public report."""
    if row is None:
        return release_words.NOT_RUN, "", False
    return release_words.kind(row), release_words.word(row), release_words.is_unreported(row)


def _box(x: float, y: float, width: float, **look: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, 1, **look)


def _fitting(text: str, kind: str, num_cells: int) -> str:
    """Return the text if it fits into so many cells; else the kind, or a short word for it."""
    most = int(num_cells * CELL_INCHES / CHARACTER_INCHES)
    for label in (text, kind, SHORT.get(kind, "")):
        if label and len(label) <= most:
            return label
    return f"{kind[:4]}."


def _labeled(kind: str) -> str:
    return f"{kind} ({SHORT[kind]})" if kind in SHORT else kind


def _legend(drawing: plot.Figure, rows: Sequence[FigureRow]) -> None:
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(release_words.kind(row) for row in rows)
    entries = []
    for kind in kinds:
        face, _, hatch = LOOKS.get(kind, OTHER)
        entries.append(
            Patch(facecolor=face, edgecolor=plot.EDGE, linewidth=0.4, hatch=hatch, label=_labeled(kind))
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
        *release_words.without_probe(rows),
        "in a name: 4: micro-batches; caller: several backward passes before one step, the last one marked;"
        " unmarked: none is; no-clip: no clipping",
    ]
    return plot.wrapped(texts)
