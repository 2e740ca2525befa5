"""Judges a claim by the rows of its case: first by the gate's verdicts on the runs of these rows, then by the rows'
numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.base.console import counted
from papers.claims.claims import PAPER_MACHINE, Claim, Point, Shape
from papers.claims.examine import HOLD, OPEN, Answer, examine, shortened
from papers.figures import profile as scaled
from papers.figures.point import COUNTED, FigureRow, doubts_text

PASS, FAIL, XFAIL, XPASS = "PASS", "FAIL", "XFAIL", "XPASS"
NOT_TESTED, OTHER_MACHINE, SIMULATED = "NOT TESTED", "N/A", "SIMULATED"
BAD = (FAIL, XPASS)
# kind of machine that no case runs on, so that claims about it cannot be tested here
NOT_HERE = "several-gpus"
UNTRAINED = "rests on a run that did not train, says the gate"
NO_RESULT = ("timeout", "unavailable", "interrupted")  # statuses of runs that say nothing about a claim
IsThere = Callable[[Claim, FigureRow], bool]


@dataclass(frozen=True)
class Finding:
    """A verdict on a claim. `seen`: the measured values, as text. `note`: the reason for the verdict or, if the claim
    was not tested, the command that would test it. `rests_on`: the rows that were judged."""

    claim: Claim
    verdict: str
    seen: str = ""
    note: str = ""
    numbers: str = ""  # verdict by the numbers alone: hold, do not hold or NOT DISTINGUISHABLE; empty: none
    profile: str = ""
    rests_on: tuple[FigureRow, ...] = ()
    is_untrained: bool = False  # True: the claim fails because a run that it rests on did not train

    def to_dict(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "id": claim.id,
            "verdict": self.verdict,
            "text": claim.text,
            "source": claim.source,
            "case": claim.case,
            "seen": self.seen,
            "expected": claim.expected.text,
            "note": self.note,
            "numbers": self.numbers,
            "profile": self.profile,
            "rests_on": [
                {"row": label(row), "valid": row.valid, "keys": list(row.keys)} for row in self.rests_on
            ],
        }


def judge(claim: Claim, tables: dict[str, list[FigureRow]], is_there: IsThere) -> Finding:
    """Judge a claim by the first of its case's tables that has all rows which the claim needs. A table is preferred if
    its rows are final and were measured on a machine that the claim is about.

    `tables`: by name of a profile, its table; the best profile comes first. `is_there`: returns True if a row was
    measured on a machine that the claim is about.
    """
    tables = {
        profile: [row for row in rows if row.metric == claim.metric] for profile, rows in tables.items()
    }
    rows_by_profile: dict[str, list[FigureRow]] = {}
    missing = ""
    for profile, rows in tables.items():
        try:
            rows_by_profile[profile] = _choose(claim, rows)
        except LookupError as error:
            # a table without rows lacks every row, so its error would tell nothing
            missing = missing or (str(error) if rows else "")
    judged = [
        _judge(claim, profile, rows)
        for profile, rows in rows_by_profile.items()
        if all(is_there(claim, row) for row in rows)
    ]
    if judged:
        decided = (finding for finding in judged if finding.verdict not in (NOT_TESTED, SIMULATED))
        return next(decided, judged[0])
    if rows_by_profile:
        profile, profile_rows = next(iter(rows_by_profile.items()))
        row = next(row for row in profile_rows if not is_there(claim, row))
        nameless = "an unnamed machine" + ("" if row.origin == "run" else "; try --machine NAME")
        note = f"said of {' and '.join(claim.machines)}; measured on {row.machine or nameless}"
        return Finding(claim, OTHER_MACHINE, note=note, profile=profile, rests_on=tuple(profile_rows))
    untrained = _untrained_point(claim, tables, is_there)
    if untrained:
        note = f"{UNTRAINED}: {shortened([_why(row) for row in untrained])}"
        return Finding(claim, FAIL, missing, note, rests_on=tuple(untrained), is_untrained=True)
    if claim.machines == (NOT_HERE,):
        return Finding(claim, OTHER_MACHINE, note=f"said of {NOT_HERE}, on which no case runs")
    return Finding(claim, NOT_TESTED, note=f"{claim.command} ({missing or 'no records'})")


def _untrained_point(claim: Claim, tables: dict[str, list[FigureRow]], is_there: IsThere) -> list[FigureRow]:
    """Find the claim's first point of which no run trained, and for which no further run of the case could change this.
    Return the point's rows; empty if there is no such point."""
    for rows in tables.values():
        for point in claim.expected.named:
            matches = _matching(point, rows)
            if matches and all(
                _is_decided(row) and not row.valid and is_there(claim, row) for row in matches
            ):
                return matches
    return []


def _is_decided(row: FigureRow) -> bool:
    """True if no further run of the case could change the row. A row from imported logs is not decided, because the
    logs are incomplete."""
    return row.status not in NO_RESULT and row.is_judged and row.is_final and row.origin != "imported"


def _judge(claim: Claim, profile: str, rows: list[FigureRow]) -> Finding:
    ended = [f"{label(row)} ended as {row.status}: {row.reason}" for row in rows if row.status in NO_RESULT]
    unjudged = [f"{label(row)} is not compared with the reference yet" for row in rows if not row.is_judged]
    searched = [label(row) for row in rows if not row.is_final]
    if ended or unjudged or searched:
        call = claim.command if ended else scaled.call(claim.case, profile)
        why = (ended or unjudged or [f"search not finished: {shortened(searched)}"])[0]
        return Finding(claim, NOT_TESTED, note=f"{call} ({why})", profile=profile, rests_on=tuple(rows))
    has_numbers = all(row.has_number for row in rows)
    numbers, seen, how = examine(claim.expected, rows) if has_numbers else Answer("", "no number")
    untrained = [row for row in rows if not row.valid or not row.has_number]
    if untrained:  # an expected failure does not excuse a run that did not train
        verdict, note = FAIL, f"{UNTRAINED}: {shortened([_why(row) for row in untrained])}"
    elif any(row.is_simulated for row in rows):
        verdict, note = SIMULATED, f"computed or timed by a simulation, not measured; {how}"
    elif doubts := doubts_text({label(row): row for row in rows}):
        verdict, note = (
            OPEN,
            f"doubtful: {doubts}; try {scaled.call(claim.case, profile)} --repeats 3 when idle",
        )
    elif numbers == OPEN:
        verdict, note = OPEN, f"{how}; more runs of the case may tell them apart"
    elif claim.xfail:
        verdict, note = (XPASS if numbers == HOLD else XFAIL), claim.xfail
    else:
        verdict, note = (PASS if numbers == HOLD else FAIL), how
    return Finding(claim, verdict, seen, note, numbers, profile, tuple(rows), is_untrained=bool(untrained))


def _choose(claim: Claim, rows: list[FigureRow]) -> list[FigureRow]:
    """Return the rows that the claim names, in the claim's order. Raises LookupError if a row is missing, or if several
    rows match."""
    expected = claim.expected
    if isinstance(expected, Shape):
        return _series(expected, rows)
    if claim.metric not in COUNTED and len(expected.named) > 1:
        rows = _of_one_size(expected.named, rows)
    return [_one(point, rows) for point in expected.named]


def _of_one_size(points: Sequence[Point], rows: list[FigureRow]) -> list[FigureRow]:
    """Return the rows of one size, because speeds at different sizes are not compared. The size is the largest at which
    all points trained; if there is none, the largest at which all points have rows. Raises LookupError if there is no
    such size."""
    matches = [_matching(point, rows) for point in points]
    trained = [[row for row in point_rows if row.valid and row.has_number] for point_rows in matches]
    common = _common_sizes(trained) or _common_sizes(matches)
    if not common:
        lacking = next(
            (str(point) for point, point_rows in zip(points, matches, strict=True) if not point_rows), ""
        )
        raise LookupError(f"no row of {lacking}" if lacking else "no size that all of its methods have")
    size = max(common, key=lambda pair: (pair[0] ** 2 * pair[1], pair))
    return [row for row in rows if (row.hidden_size, row.num_layers) == size]


def _common_sizes(groups: list[list[FigureRow]]) -> set[tuple[int, int]]:
    """Return the sizes, as hidden size and number of layers, that occur in every group of rows."""
    return set.intersection(*({(row.hidden_size, row.num_layers) for row in group} for group in groups))


def _one(point: Point, rows: list[FigureRow]) -> FigureRow:
    matches = _matching(point, rows)
    if not matches:
        raise LookupError(f"no row of {point}")
    if matches[0].metric in COUNTED:  # the largest size that ran; if none ran, the largest that was tried
        return max(matches, key=lambda row: (row.status == "ok", row.value or 0))
    if len(matches) > 1:
        raise LookupError(f"{len(matches)} rows of {point}: {shortened([label(row) for row in matches])}")
    return matches[0]


def _matching(point: Point, rows: list[FigureRow]) -> list[FigureRow]:
    matches = [
        row
        for row in rows
        if (row.method, row.series) == (point.method, point.series)
        and point.num_layers in (None, row.num_layers)
        and point.hidden_size in (None, row.hidden_size)
        and (not isinstance(point.window_size, int) or point.window_size == row.window_size)
    ]
    if not isinstance(point.window_size, str):
        return matches
    windows = {row.window_size for row in matches if row.window_size is not None}
    extreme = max if point.window_size == "largest" else min
    return [row for row in matches if row.window_size == extreme(windows)] if len(windows) > 1 else []


def _series(shape: Shape, rows: list[FigureRow]) -> list[FigureRow]:
    """Return one row for each value on the shape's axis, in ascending order. Raises LookupError if there are too few
    rows, or rows of several series."""
    matches = [row for row in _matching(shape.of, rows) if getattr(row, shape.against) is not None]
    matches.sort(key=lambda row: getattr(row, shape.against))
    num_places = len({getattr(row, shape.against) for row in matches})
    if num_places < shape.min_points:
        raise LookupError(
            f"{num_places} of at least {shape.min_points} points of {shape.of} along {shape.against}"
        )
    others = {(row.hidden_size, None if shape.against == "num_layers" else row.num_layers) for row in matches}
    if len(matches) > num_places or len(others) > 1:
        raise LookupError(f"rows of several series: {shortened([label(row) for row in matches])}")
    return matches


def holds_there(claim: Claim, row: FigureRow, is_emulated: bool = False) -> bool:
    """True if the row was measured on a machine that the claim is about. `is_emulated`: True if the run had the budgets
    of the paper's machine on another machine: such a run counts for claims on sizes, but not for claims on times."""
    if "any" in claim.machines:
        return True
    if "gpu" in claim.machines and (row.clock == "cuda" or row.origin != "run"):
        return True
    is_paper = any(name in row.machine.lower() for name in ("v100", PAPER_MACHINE))
    return PAPER_MACHINE in claim.machines and (is_paper or (is_emulated and row.metric in COUNTED))


def label(row: FigureRow) -> str:
    window = f", window {row.window_size}" if row.window_size is not None else ""
    return f"{row.method}, {counted(row.num_layers, 'layer')}{window}" + (
        f", {row.series}" if row.series else ""
    )


def _why(row: FigureRow) -> str:
    ended = f"ended as {row.status}" if row.status != "ok" else ""
    return f"{label(row)} ({': '.join(part for part in (ended, row.reason) if part) or 'no number'})"
