"""Judges a claim by the rows of its case: first by the gate's verdicts on the runs of these rows, then by the rows'
numbers, by which the claim holds, does not hold, or is left open by noise (examine)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core.job import params_text
from papers.claims.claims import PAPER_MACHINE, Claim, Expected, Order, Plateau, Point, Ratio, Shape, Value
from papers.figures import profile as scaled
from papers.figures.point import CONFIDENCE, COUNTED_METRICS, FigureRow, RatioInterval, doubts_text, ratio

HOLD, BROKEN, OPEN = "hold", "do not hold", "NOT DISTINGUISHABLE"
PASS, FAIL, XFAIL, XPASS = "PASS", "FAIL", "XFAIL", "XPASS"
NOT_TESTED, OTHER_MACHINE, SIMULATED = "NOT TESTED", "N/A", "SIMULATED"
# every verdict, in the order in which `verify` lists them
VERDICTS = (PASS, FAIL, XFAIL, XPASS, OPEN, SIMULATED, NOT_TESTED, OTHER_MACHINE)
BAD_VERDICTS = (FAIL, XPASS)
# by verdict of the numbers alone: the end of the sentence that begins with "numbers by themselves"
NUMBERS_SENTENCE_ENDS = {
    HOLD: "would hold",
    BROKEN: "would fail, too",
    OPEN: "are not distinguishable",
    "": "are missing",
}
# names that stand in a finding for a profile: the original's published numbers, and imported logs
PUBLISHED, IMPORTED = "published", "imported"
# kind of machine that no case runs on, so that claims about it cannot be tested here
SEVERAL_GPUS = "several-gpus"
UNTRAINED_TEXT = "rests on a run that did not train, says the gate"
STATUSES_WITHOUT_RESULT = ("timeout", "unavailable", "interrupted")  # such a run says nothing about a claim
MachineCheck = Callable[[Claim, FigureRow], bool]


@dataclass(frozen=True)
class Finding:
    """A verdict on a claim. `values_text`: the measured values. `note`: the reason for the verdict or, if the claim
    was not tested, the command that would test it. `rests_on`: the rows that were judged."""

    claim: Claim
    verdict: str
    values_text: str = ""
    note: str = ""
    numbers_verdict: str = ""  # by the numbers alone: HOLD, BROKEN or OPEN; empty: none
    profile: str = ""
    rests_on: tuple[FigureRow, ...] = ()
    is_untrained: bool = False  # True: the claim fails because a run that it rests on did not train

    def to_dict(self) -> JsonObject:
        claim = self.claim
        return {
            "id": claim.id,
            "verdict": self.verdict,
            "text": claim.text,
            "source": claim.source,
            "case": claim.case,
            "seen": self.values_text,
            "expected": claim.expected.text,
            "note": self.note,
            "numbers": self.numbers_verdict,
            "profile": self.profile,
            "rests_on": [
                {"row": row_label(row), "valid": row.valid, "keys": list(row.keys)} for row in self.rests_on
            ],
        }


def judge_claim(claim: Claim, tables: dict[str, list[FigureRow]], is_on_its_machine: MachineCheck) -> Finding:
    """Judge a claim by the first of its case's tables that has all rows which the claim needs. A table is preferred if
    its rows are final and were measured on a machine that the claim is about.

    `tables`: by name of a profile, its table; the best profile comes first. `is_on_its_machine`: returns True if a row
    was measured on a machine that the claim is about.
    """
    tables = {
        profile: [row for row in rows if row.metric == claim.metric] for profile, rows in tables.items()
    }
    rows_by_profile: dict[str, list[FigureRow]] = {}
    missing_text = ""
    for profile, rows in tables.items():
        try:
            rows_by_profile[profile] = _rows_of_claim(claim, rows)
        except LookupError as error:
            # a table without rows lacks every row, so its error would tell nothing
            missing_text = missing_text or (str(error) if rows else "")
    findings = [
        _judge_table(claim, profile, rows)
        for profile, rows in rows_by_profile.items()
        if all(is_on_its_machine(claim, row) for row in rows)
    ]
    if findings:
        decided = (finding for finding in findings if finding.verdict not in (NOT_TESTED, SIMULATED))
        return next(decided, findings[0])
    if rows_by_profile:
        profile, profile_rows = next(iter(rows_by_profile.items()))
        row = next(row for row in profile_rows if not is_on_its_machine(claim, row))
        hint = "" if row.origin == "run" else "; try --machine NAME"
        machine = row.machine or f"an unnamed machine{hint}"
        note = f"said of {' and '.join(claim.machines)}; measured on {machine}"
        return Finding(claim, OTHER_MACHINE, note=note, profile=profile, rests_on=tuple(profile_rows))
    untrained = _untrained_point(claim, tables, is_on_its_machine)
    if untrained:
        note = f"{UNTRAINED_TEXT}: {shortened([_reason_text(row) for row in untrained])}"
        return Finding(claim, FAIL, missing_text, note, rests_on=tuple(untrained), is_untrained=True)
    if claim.machines == (SEVERAL_GPUS,):
        return Finding(claim, OTHER_MACHINE, note=f"said of {SEVERAL_GPUS}, on which no case runs")
    return Finding(claim, NOT_TESTED, note=f"{claim.command} ({missing_text or 'no records'})")


def _untrained_point(
    claim: Claim, tables: dict[str, list[FigureRow]], is_on_its_machine: MachineCheck
) -> list[FigureRow]:
    """Find the claim's first point of which no run trained, and for which no further run of the case could change this.
    Return the point's rows; empty if there is no such point."""
    for rows in tables.values():
        for point in claim.expected.named:
            matches = _matching_rows(point, rows)
            is_untrained = [
                _is_decided(row) and not row.valid and is_on_its_machine(claim, row) for row in matches
            ]
            if matches and all(is_untrained):
                return matches
    return []


def _is_decided(row: FigureRow) -> bool:
    """True if no further run of the case could change the row. A row from imported logs is not decided, because the
    logs are incomplete."""
    return (
        row.status not in STATUSES_WITHOUT_RESULT
        and row.is_judged
        and row.is_final
        and row.origin != "imported"
    )


def _judge_table(claim: Claim, profile: str, rows: list[FigureRow]) -> Finding:
    without_result = [
        f"{row_label(row)} ended as {row.status}: {row.reason}"
        for row in rows
        if row.status in STATUSES_WITHOUT_RESULT
    ]
    unjudged = [
        f"{row_label(row)} is not compared with the reference yet" for row in rows if not row.is_judged
    ]
    searched = [row_label(row) for row in rows if not row.is_final]
    if without_result or unjudged or searched:
        call = claim.command if without_result else scaled.profile_command(claim.case, profile)
        reason = (without_result or unjudged or [f"search not finished: {shortened(searched)}"])[0]
        return Finding(claim, NOT_TESTED, note=f"{call} ({reason})", profile=profile, rests_on=tuple(rows))
    has_numbers = all(row.has_number for row in rows)
    examination = examine(claim.expected, rows) if has_numbers else Examination("", "no number")
    untrained = [row for row in rows if not row.valid or not row.has_number]
    if untrained:  # an expected failure does not excuse a run that did not train
        verdict, note = FAIL, f"{UNTRAINED_TEXT}: {shortened([_reason_text(row) for row in untrained])}"
    else:
        verdict, note = _verdict_of_trained(claim, profile, rows, examination)
    return Finding(
        claim,
        verdict,
        examination.values_text,
        note,
        examination.verdict,
        profile,
        tuple(rows),
        is_untrained=bool(untrained),
    )


def _verdict_of_trained(
    claim: Claim, profile: str, rows: list[FigureRow], examination: Examination
) -> tuple[str, str]:
    """Return the verdict on a claim all of whose rows trained, and a note."""
    if any(row.is_simulated for row in rows):
        return SIMULATED, f"computed or timed by a simulation, not measured; {examination.how_bounded}"
    if doubts := doubts_text({row_label(row): row for row in rows}):
        call = scaled.profile_command(claim.case, profile)
        return OPEN, f"doubtful: {doubts}; try {call} --repeats 3 when idle"
    if examination.verdict == OPEN:
        return OPEN, f"{examination.how_bounded}; more runs of the case may tell them apart"
    if claim.xfail:
        return (XPASS if examination.verdict == HOLD else XFAIL), claim.xfail
    return (PASS if examination.verdict == HOLD else FAIL), examination.how_bounded


def _rows_of_claim(claim: Claim, rows: list[FigureRow]) -> list[FigureRow]:
    """Return the rows that the claim names, in the claim's order. Raises LookupError if a row is missing, or if several
    rows match."""
    expected = claim.expected
    if isinstance(expected, Shape):
        return _rows_of_series(expected, rows)
    if claim.metric not in COUNTED_METRICS and len(expected.named) > 1:
        rows = _rows_of_one_size(expected.named, rows)
    return [_row_of_point(point, rows) for point in expected.named]


def _rows_of_one_size(points: Sequence[Point], rows: list[FigureRow]) -> list[FigureRow]:
    """Return the rows of one size, because speeds at different sizes are not compared. The size is the largest at which
    all points trained; if there is none, the largest at which all points have rows. Raises LookupError if there is no
    such size."""
    matches = [_matching_rows(point, rows) for point in points]
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


def _row_of_point(point: Point, rows: list[FigureRow]) -> FigureRow:
    matches = _matching_rows(point, rows)
    if not matches:
        raise LookupError(f"no row of {point}")
    if (
        matches[0].metric in COUNTED_METRICS
    ):  # the largest size that ran; if none ran, the largest that was tried
        return max(matches, key=lambda row: (row.status == "ok", row.value or 0))
    if len(matches) > 1:
        raise LookupError(f"{len(matches)} rows of {point}: {shortened([row_label(row) for row in matches])}")
    return matches[0]


def _matching_rows(point: Point, rows: list[FigureRow]) -> list[FigureRow]:
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


def _rows_of_series(shape: Shape, rows: list[FigureRow]) -> list[FigureRow]:
    """Return one row for each value on the shape's axis, in ascending order. Raises LookupError if there are too few
    rows, or rows of several series."""
    matches = [row for row in _matching_rows(shape.of, rows) if getattr(row, shape.against) is not None]
    matches.sort(key=lambda row: getattr(row, shape.against))
    num_axis_values = len({getattr(row, shape.against) for row in matches})
    if num_axis_values < shape.min_points:
        raise LookupError(
            f"{num_axis_values} of at least {shape.min_points} points of {shape.of} along {shape.against}"
        )
    sizes_off_axis = {
        (row.hidden_size, None if shape.against == "num_layers" else row.num_layers) for row in matches
    }
    if len(matches) > num_axis_values or len(sizes_off_axis) > 1:
        raise LookupError(f"rows of several series: {shortened([row_label(row) for row in matches])}")
    return matches


def is_on_claimed_machine(claim: Claim, row: FigureRow, is_emulated: bool = False) -> bool:
    """True if the row was measured on a machine that the claim is about. `is_emulated`: True if the run had the budgets
    of the paper's machine on another machine: such a run counts for claims on sizes, but not for claims on times."""
    if "any" in claim.machines:
        return True
    if "gpu" in claim.machines and (row.clock == "cuda" or row.origin != "run"):
        return True
    is_paper = any(name in row.machine.lower() for name in ("v100", PAPER_MACHINE))
    return PAPER_MACHINE in claim.machines and (is_paper or (is_emulated and row.metric in COUNTED_METRICS))


def is_of_logs(findings: Sequence[Finding]) -> bool:
    """True if the findings rest on imported logs instead of runs of this project."""
    return any(finding.profile == IMPORTED for finding in findings)


def row_label(row: FigureRow) -> str:
    window = f", window {row.window_size}" if row.window_size is not None else ""
    series = f", {row.series}" if row.series else ""
    return f"{row.method}, {counted(row.num_layers, 'layer')}{window}{series}"


def _reason_text(row: FigureRow) -> str:
    end_text = f"ended as {row.status}" if row.status != "ok" else ""
    reason = ": ".join(text for text in (end_text, row.reason) if text)
    return f"{row_label(row)} ({reason or 'no number'})"


class Examination(NamedTuple):
    """The result of examine(). `how_bounded`: the method by which the bounds were found, as text."""

    verdict: str  # HOLD, BROKEN or OPEN
    values_text: str
    how_bounded: str = ""


def examine(expected: Expected, rows: list[FigureRow]) -> Examination:
    """Examine a claim. `rows`: the rows that the claim names, in the claim's order; for a shape, the rows along its
    axis. Each row must have a number."""
    match expected:
        case Order():
            return _examine_order(expected, rows)
        case Ratio():
            interval = ratio(*rows)
            verdict = _compare_to_bounds(interval.low, interval.high, *expected.bounds)
            values = f"{value_text(rows[0])} / {value_text(rows[1])} = {interval.text}"
            return Examination(verdict, values, interval.how_bounded)
        case Value():
            return _examine_value(expected, rows[0])
        case Shape():
            if expected.plateau:
                return _examine_plateau(expected, expected.plateau, rows)
            return _examine_exponent(expected, rows)


def value_text(row: FigureRow) -> str:
    """Return a row's value as text, with the unit of its metric."""
    if row.value is None:
        return "none"
    if row.metric == "params":
        return params_text(int(row.value))
    units = {
        "samples_per_second": "samples/s",
        "tokens_per_second": "tokens/s",
        "loss_difference": "of the loss",
    }
    return f"{row.value:.4g} {units.get(row.metric, 's')}"


def shortened(texts: list[str]) -> str:
    return "; ".join(texts[:2]) + (f"; and {len(texts) - 2} more" if len(texts) > 2 else "")


def _compare_to_bounds(low: float, high: float, least: float, most: float) -> str:
    if least <= low and high <= most:
        return HOLD
    return BROKEN if high < least or most < low else OPEN


def _examine_order(expected: Order, rows: list[FigureRow]) -> Examination:
    """Compare each point with each point of the next group. If the order of one pair is wrong, the claim does not hold,
    even if noise leaves other pairs open."""
    row_of_point = dict(zip(expected.named, rows, strict=True))
    verdicts, notes = [], []
    for upper_group, lower_group in zip(expected.points, expected.points[1:], strict=False):
        for upper, lower in itertools.product(upper_group, lower_group):
            interval = ratio(row_of_point[upper], row_of_point[lower])
            verdicts.append(_compare_to_bounds(interval.low, interval.high, math.nextafter(1, 2), math.inf))
            if verdicts[-1] != HOLD:
                notes.append(f"{upper} / {lower} is {interval.text}: {interval.how_bounded}")
    values = ", ".join(f"{point} {value_text(row)}" for point, row in row_of_point.items())
    worst = next((verdict for verdict in (BROKEN, OPEN) if verdict in verdicts), HOLD)
    return Examination(worst, values, shortened(notes))


def _examine_value(expected: Value, row: FigureRow) -> Examination:
    """Judge a value by its interval. If there is no interval, the value itself decides, because the claim's tolerance
    is already a margin."""
    low, high = (row.low, row.high) if row.has_interval else (row.value, row.value)
    assert low is not None and high is not None and row.value is not None
    least, most = (expected.value * (1 + sign * expected.tolerance) for sign in (-1, 1))
    values = f"{value_text(row)}, {round(row.value / expected.value - 1, 3) + 0.0:+.1%}"
    return Examination(_compare_to_bounds(low, high, least, most), values)


def _examine_exponent(expected: Shape, rows: list[FigureRow]) -> Examination:
    """Fit the exponent by least squares on logarithms, and judge it by Student's interval, which follows from the
    residuals."""
    import numpy as np
    from scipy import stats

    assert expected.exponent
    log_axis = np.log([getattr(row, expected.against) for row in rows])
    log_values = np.log([row.value or 1 for row in rows])
    fit = stats.linregress(log_axis, log_values)
    degrees_of_freedom = len(rows) - 2
    half_width = stats.t.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom) * fit.stderr
    low, high = float(fit.slope - half_width), float(fit.slope + half_width)
    squares = sum((log_values - fit.intercept - fit.slope * log_axis) ** 2)
    residual = math.sqrt(squares / degrees_of_freedom)
    values = f"exponent {fit.slope:.2f} ({low:.2f} to {high:.2f}), residual {residual:.1%}"
    how_bounded = f"{len(rows)} points, least squares on logarithms"
    return Examination(_compare_to_bounds(low, high, *expected.exponent), values, how_bounded)


def _examine_plateau(expected: Shape, plateau: Plateau, rows: list[FigureRow]) -> Examination:
    """Judge a plateau by the rows' intervals. If a row has no interval, judge it by the rows' values, because the gain
    that the claim allows is already a margin."""

    def flat_from(bound: str) -> int:
        """Return the index of the first row over which no later row gains more than allowed. `bound`: which number of a
        gain counts: value, low or high."""
        for index, row in enumerate(rows):
            if all(
                getattr(_ratio_of_gain(row, later), bound) <= 1 + plateau.gain for later in rows[index + 1 :]
            ):
                return index
        raise AssertionError("nothing lies beyond the last row")

    index = flat_from("value")
    # The plateau is longest if every gain is at the lower end of its interval, and shortest if every gain is at the
    # upper end.
    longest, shortest = (
        len(rows) - (flat_from(bound) if all(row.has_interval for row in rows) else index)
        for bound in ("low", "high")
    )
    verdict = _compare_to_bounds(shortest, longest, plateau.num_points, math.inf)
    plateau_start, axis_end = getattr(rows[index], expected.against), getattr(rows[-1], expected.against)
    if index == len(rows) - 1:
        gain = _ratio_of_gain(rows[-2], rows[-1]).value - 1
        values = f"no plateau: the last step, to {axis_end}, still gains {gain:.1%}"
    else:
        values = f"flat from {plateau_start} to {axis_end}, {len(rows) - index} points"
    return Examination(verdict, values, f"{len(rows)} points of {expected.against}")


def _ratio_of_gain(row: FigureRow, later: FigureRow) -> RatioInterval:
    """Return the ratio by which the later row is better. For times, shorter is better."""
    return ratio(row, later) if row.metric == "step_seconds" else ratio(later, row)
