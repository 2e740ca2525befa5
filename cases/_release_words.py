"""The words of case 10: what a cell says, and the public reports that say the same."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from cases._release_reports import REPORTS, PublicReport, reports_about
from cases._releases import ENGINES, SETTING_ROWS, UNSEEN, columns_of, ordered
from harness.gate.probe import is_left_out
from papers.figures.case_files import EDITED
from papers.figures.point import FigureRow

PASSES, FAILS, UNTESTED = "passes", "fails", "untested"
CRASH, UNAVAILABLE, NOT_RUN = "crash", "unavailable", "not run"
NONE_KNOWN = "no public report known"
WORD_COLUMNS = 110  # most characters of a cell's word
# What ends the part of a reason that a cell's word shows.
WORD_ENDS = {
    FAILS: re.compile(r" \("),
    CRASH: re.compile(r"; its log |\. (?=[A-Z])"),
    UNAVAILABLE: re.compile(r" \(at "),
}
NUMBER_PAIR = re.compile(r"(\d[\d.e+-]*) instead of (\d[\d.e+-]*)")
PAGE_HEADINGS = ("setting", "verdict", "releases", "public report")
NO_PROBE = "a pass is of the run alone: no probe was trained"


def cell_kind(row: FigureRow) -> str:
    """Return a cell's verdict in one word, or how its run ended."""
    if row.status != "ok":
        return row.status
    if row.valid:
        return PASSES
    is_untested = row.reason.startswith(UNTESTED) or row.reason == EDITED
    return UNTESTED if is_untested else FAILS


def cell_word(row: FigureRow) -> str:
    """Return a cell's verdict in a few words."""
    if cell_kind(row) == PASSES:
        return PASSES
    engine = ENGINES[SETTING_ROWS[row.series].engine]
    # all releases say the same
    reason = " ".join(row.reason.split()).removeprefix(f"{engine.package} {row.group} ")
    reason = NUMBER_PAIR.sub(_rounded, reason)
    if cell_kind(row) in WORD_ENDS:
        reason = WORD_ENDS[cell_kind(row)].split(reason)[0]
    return textwrap.shorten(
        f"{cell_kind(row)}: {reason.removeprefix(f'{UNTESTED}: ')}", WORD_COLUMNS, placeholder=" ..."
    )


def _rounded(pair: re.Match[str]) -> str:
    """Return two numbers as text with four digits, or as they are if these are the same."""
    rounded = [f"{float(number):.4g}" for number in pair.groups()]
    return pair[0] if rounded[0] == rounded[1] else " instead of ".join(rounded)


def is_unreported(row: FigureRow) -> bool:
    """True if the cell's training is wrong, neither by design nor as a public report says."""
    return (
        cell_kind(row) == FAILS
        and not SETTING_ROWS[row.series].design_of(row.group)
        and not _reports_of_cell(row)
    )


def reports_text(row: FigureRow) -> str:
    """Return what stands beside a cell: links to the reports that say the same; the reports that this run does not
    show; that it trains otherwise by design; or that no report is known."""
    links = ", ".join(report.links for report in _reports_of_cell(row))
    if cell_kind(row) == PASSES:
        return f"{links}: not seen here" if links else ""
    if is_unreported(row):
        return f"**{NONE_KNOWN}**"
    design = SETTING_ROWS[row.series].design_of(row.group) if cell_kind(row) == FAILS else ""
    return "; ".join(filter(None, [f"by design: {design}" if design else "", links]))


def _reports_of_cell(row: FigureRow) -> list[PublicReport]:
    """Return the reports about a cell: of errors if it crashed, of wrong trainings if it failed, all if it passed."""
    reports = reports_about(row.series, row.group)
    kinds = {PASSES: (False, True), FAILS: (False,), CRASH: (True,)}.get(cell_kind(row), ())
    return [report for report in reports if report.is_error in kinds]


def page_rows(rows: Sequence[FigureRow]) -> Iterator[list[str]]:
    """Yield the lines of the page's table: one for each word of a setting and the reports beside it, with the releases
    that have this word, oldest first."""
    recorded_names = {row.series for row in rows}
    for name in (name for name in SETTING_ROWS if name in recorded_names):
        cells = {row.group: (cell_word(row), reports_text(row)) for row in rows if row.series == name}
        columns = ordered([*columns_of(name), *cells])
        texts = [cells.get(release, (NOT_RUN, "")) for release in columns]
        for text in sorted(set(texts), key=lambda text: (text[0] == NOT_RUN, texts.index(text))):
            releases = [
                release for release, cell_text in zip(columns, texts, strict=True) if cell_text == text
            ]
            yield [f"`{name}`", text[0].replace("|", "\\|"), release_spans(releases, columns), text[1]]


def release_spans(releases: Sequence[str], columns: Sequence[str]) -> str:
    """Return releases as text; of three and more neighbors among the columns only the first and the last."""
    runs: list[list[str]] = []
    for release in releases:
        index = columns.index(release)
        if runs and columns.index(runs[-1][-1]) == index - 1:
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(", ".join(run) if len(run) < 3 else f"{run[0]} to {run[-1]}" for run in runs)


def page_notes(rows: Sequence[FigureRow]) -> Iterator[str]:
    """Yield the notes below the table: what the runs do not show, and the public reports with the rows about them or
    the reason why there is none."""
    yield from notes_on_missing_probe(rows)
    names = [name for name in SETTING_ROWS if any(row.series == name for row in rows)]
    for key, text in UNSEEN.items():
        if lacking := [f"`{name}`" for name in names if key in SETTING_ROWS[name].unseen]:
            yield f"cannot show {text}: {', '.join(lacking)}"
    for report in REPORTS:
        where = ", ".join(f"`{name}`" for name in report.rows) or f"no row: {report.why_no_row}"
        where += ", on a GPU only" * report.needs_gpu
        yield f"{report.links}{_releases_text(report)}: {report.says} ({where})"


def notes_on_missing_probe(rows: Sequence[FigureRow]) -> list[str]:
    """Return a note if cells passed without the gate's probe."""
    return [NO_PROBE] if any(cell_kind(row) == PASSES and is_left_out(row.reason) for row in rows) else []


def _releases_text(report: PublicReport) -> str:
    if report.since and report.since == report.until:
        return f", release {report.since}"
    span = [f"from {report.since}"] * bool(report.since) + [f"to {report.until}"] * bool(report.until)
    return f", releases {' '.join(span)}" if span else ""
