"""Chooses the cells of case 10's map that a call of `./run.sh releases` runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cases._release_reports import REPORTS
from cases._releases import ENGINES, ROWS, columns_of, order
from methods.engines.release import Release


@dataclass(frozen=True)
class Choice:
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
        first = max(order(self.since), order(ROWS[name].since))
        return first <= order(release) and (not self.until or order(release) <= order(self.until))


def chosen(choice: Choice) -> list[tuple[str, str]]:
    """Return the cells that a call asks for, each as the name of its row and its release. Raises ValueError for an
    unknown engine, row or version, and for releases where several engines are asked for."""
    engine, names = choice.engine, choice.names
    for wanted, known, what in (
        ([engine] if engine else [], ENGINES, "an engine"),
        (names, ROWS, "a setting"),
    ):
        if unknown := [name for name in wanted if name not in known]:
            raise ValueError(f"expected {what} of {', '.join(known)}, got {unknown[0]!r}")
    rows = [
        name for name, row in ROWS.items() if engine in (None, row.engine) and (not names or name in names)
    ]
    engines = list(dict.fromkeys(ROWS[name].engine for name in rows))
    if not rows:
        raise ValueError(f"expected a setting of {engine}, got {', '.join(names)}; leave --only out")
    if (choice.since or choice.until or choice.releases) and len(engines) > 1:
        raise ValueError(
            f"expected releases of one engine, got {', '.join(engines)}; try --only {engines[0]}"
        )
    for version in filter(None, (*choice.releases, choice.since, choice.until)):
        Release(ENGINES[engines[0]].package, version)  # raises ValueError if it is none
    cells = [(name, release) for name in rows for release in (choice.releases or columns_of(name))]
    quick = _beside_reports(choice.has_gpu)
    return [cell for cell in cells if choice.includes(*cell) and (not choice.is_quick or cell in quick)]


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
