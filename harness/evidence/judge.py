"""Judge a claim by the rows of its case: first whether the runs behind them trained, then what their numbers say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.evidence.claims import PAPER_MACHINE, Claim, Exponent, Order, Plateau, Point, Ratio, Value
from harness.figures import profile as scaled
from harness.figures.point import CONFIDENCE, COUNTED, RatioInterval, Row, has_interval, has_number, ratio

PASS, FAIL, XFAIL, XPASS = "PASS", "FAIL", "XFAIL", "XPASS"
OPEN, NOT_TESTED, OTHER_MACHINE = "NOT DISTINGUISHABLE", "NOT TESTED", "N/A"
BAD = (FAIL, XPASS)
HOLD, BROKEN = "hold", "do not hold"  # what numbers alone may say, or OPEN
UNTRAINED = "rests on a run that did not train, says the gate"
NO_RESULT = ("timeout", "unavailable", "interrupted")  # ends of a run that say nothing about a claim


@dataclass(frozen=True)
class Finding:
    """A verdict; what was seen; the rows it rests on; the reason, or the command that would test it."""

    claim: Claim
    verdict: str
    seen: str = ""
    note: str = ""
    numbers: str = ""  # what the numbers say by themselves: hold, do not hold, NOT DISTINGUISHABLE
    profile: str = ""
    rests_on: tuple[Row, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.claim.id, "verdict": self.verdict, "text": self.claim.text, "source": self.claim.source,
            "case": self.claim.case, "seen": self.seen, "expected": self.claim.expected.text, "note": self.note,
            "numbers": self.numbers, "profile": self.profile,
            "rests_on": [{"row": label(row), "valid": row.valid, "keys": list(row.keys)} for row in self.rests_on],
        }  # fmt: skip


def judge(claim: Claim, tables: dict[str, list[Row]], is_there: Callable[[Claim, Row], bool]) -> Finding:
    """By the first table, best profile first, that has the rows of the claim on a machine where it is said to hold, and
    is finished, if any is. `is_there` says whether a row was measured on such a machine."""
    found: dict[str, list[Row]] = {}
    missing = ""
    for profile, rows in tables.items():
        try:
            found[profile] = _choose(claim, [row for row in rows if row.metric == claim.metric])
        except LookupError as error:
            missing = missing or str(error)
    there = {profile: rows for profile, rows in found.items() if all(is_there(claim, row) for row in rows)}
    judged = [_judge(claim, profile, rows) for profile, rows in there.items()]
    if judged:
        return next((finding for finding in judged if finding.verdict != NOT_TESTED), judged[0])
    if found:
        profile, chosen = next(iter(found.items()))
        row = next(row for row in chosen if not is_there(claim, row))
        nameless = "an unnamed machine" if row.origin == "run" else "an unnamed machine, which --machine may name"
        note = f"said of {' and '.join(claim.machines)}; measured on {row.machine or nameless}"
        return Finding(claim, OTHER_MACHINE, note=note, profile=profile, rests_on=tuple(chosen))
    untrained = _all_untrained(claim, tables, is_there)
    if untrained:
        note = f"{UNTRAINED}: {_some([_why(row) for row in untrained])}"
        return Finding(claim, FAIL, missing, note, rests_on=tuple(untrained))
    return Finding(claim, NOT_TESTED, note=f"{claim.command} ({missing or 'no records'})")


def _all_untrained(claim: Claim, tables: dict[str, list[Row]], is_there: Callable[[Claim, Row], bool]) -> list[Row]:
    """The rows of a point of the claim none of whose rows trained: to run the case again would change nothing, for a
    case measures no other at the size of what did not train."""
    for rows in tables.values():
        for point in claim.expected.points:
            found = _matching(point, [row for row in rows if row.metric == claim.metric])
            bad = [row for row in found if _is_decided(row) and not row.valid and is_there(claim, row)]
            if bad and len(bad) == len(found):
                return bad
    return []


def _is_decided(row: Row) -> bool:
    """Whether to run the case again would change nothing. What imported logs lack is missing, and has not failed."""
    return row.status not in NO_RESULT and row.is_judged and row.is_final and row.origin != "imported"


def _judge(claim: Claim, profile: str, rows: list[Row]) -> Finding:
    ended = [f"{label(row)} ended as {row.status}: {row.reason}" for row in rows if row.status in NO_RESULT]
    unjudged = [f"{label(row)} is not compared with the reference yet" for row in rows if not row.is_judged]
    searched = [label(row) for row in rows if not row.is_final]
    if ended or unjudged or searched:
        call = claim.command if ended else scaled.call(claim.case, profile)
        why = (ended or unjudged or [f"search not finished: {_some(searched)}"])[0]
        return Finding(claim, NOT_TESTED, note=f"{call} ({why})", profile=profile, rests_on=tuple(rows))
    silent = [row for row in rows if not has_number(row)]
    numbers, seen, how = ("", "no number", "") if silent else EXAMINE[type(claim.expected)](claim.expected, rows)
    untrained = [row for row in rows if not row.valid or row in silent]
    if untrained:  # what did not train is not excused by an expected failure
        verdict, note = FAIL, f"{UNTRAINED}: {_some([_why(row) for row in untrained])}"
    elif numbers == OPEN:
        verdict, note = OPEN, f"{how}; more runs of the case may tell them apart"
    elif claim.xfail:
        verdict, note = (XPASS if numbers == HOLD else XFAIL), claim.xfail
    else:
        verdict, note = (PASS if numbers == HOLD else FAIL), how
    return Finding(claim, verdict, seen, note, numbers, profile, tuple(rows))


def _choose(claim: Claim, rows: list[Row]) -> list[Row]:
    """The rows that the claim speaks of, in its order. Raises LookupError, saying which is missing or ambiguous."""
    expected = claim.expected
    if isinstance(expected, Exponent | Plateau):
        return _series(expected, rows)
    if claim.metric not in COUNTED and len(expected.points) > 1:
        rows = _of_one_size(expected.points, rows)
    return [_one(point, rows) for point in expected.points]


def _of_one_size(points: Sequence[Point], rows: list[Row]) -> list[Row]:
    """The rows of the largest size that all points have: speeds of different sizes are not compared."""
    sizes = [{(row.hidden_size, row.num_layers) for row in _matching(point, rows)} for point in points]
    common = set.intersection(*sizes)
    if not common:
        lacking = next((str(point) for point, own in zip(points, sizes, strict=True) if not own), "")
        raise LookupError(f"no row of {lacking}" if lacking else "no size that all of its methods have")
    size = max(common, key=lambda pair: (pair[0] ** 2 * pair[1], pair))
    return [row for row in rows if (row.hidden_size, row.num_layers) == size]


def _one(point: Point, rows: list[Row]) -> Row:
    found = _matching(point, rows)
    if not found:
        raise LookupError(f"no row of {point}")
    if found[0].metric in COUNTED:  # the largest that ran; where none did, the largest that was tried
        return max(found, key=lambda row: (row.status == "ok", row.value or 0))
    if len(found) > 1:
        raise LookupError(f"{len(found)} rows of {point}: {_some([label(row) for row in found])}")
    return found[0]


def _matching(point: Point, rows: list[Row]) -> list[Row]:
    found = [
        row
        for row in rows
        if (row.method, row.series) == (point.method, point.series)
        and point.num_layers in (None, row.num_layers)
        and point.hidden_size in (None, row.hidden_size)
        and (not isinstance(point.window_size, int) or point.window_size == row.window_size)
    ]
    if isinstance(point.window_size, str):
        windows = [row.window_size for row in found if row.window_size is not None]
        if len(set(windows)) < 2:
            return []
        extreme = max(windows) if point.window_size == "largest" else min(windows)
        return [row for row in found if row.window_size == extreme]
    return found


def _series(expected: Exponent | Plateau, rows: list[Row]) -> list[Row]:
    """One row for each value on the axis, ascending."""
    found = [row for row in _matching(expected.point, rows) if getattr(row, expected.axis) is not None]
    found.sort(key=lambda row: getattr(row, expected.axis))
    places = [getattr(row, expected.axis) for row in found]
    fewest = expected.fewest if isinstance(expected, Exponent) else expected.num_points
    if len(set(places)) < fewest:
        raise LookupError(f"{len(set(places))} of at least {fewest} points of {expected.point} along {expected.axis}")
    others = {(row.hidden_size, None if expected.axis == "num_layers" else row.num_layers) for row in found}
    if len(places) > len(set(places)) or len(others) > 1:
        raise LookupError(f"rows of several series: {_some([label(row) for row in found])}")
    return found


def _order(expected: Order, rows: list[Row]) -> tuple[str, str, str]:
    """Each neighbor above each neighbor below; what is open is said only where nothing is broken."""
    by_point = dict(zip(expected.points, rows, strict=True))
    says, note = [], []
    for upper, lower in zip(expected.groups, expected.groups[1:], strict=False):
        for first in upper:
            for second in lower:
                found = ratio(by_point[first], by_point[second])
                says.append(_decide(found.low, found.high, math.nextafter(1, 2), math.inf))
                if says[-1] != HOLD:
                    note.append(f"{first} / {second} is {found.text}: {found.how}")
    seen = ", ".join(f"{point} {value_text(row)}" for point, row in by_point.items())
    worst = BROKEN if BROKEN in says else OPEN if OPEN in says else HOLD
    return worst, seen, _some(note)


def _ratio(expected: Ratio, rows: list[Row]) -> tuple[str, str, str]:
    found = ratio(*rows)
    seen = f"{value_text(rows[0])} / {value_text(rows[1])} = {found.text}"
    return _decide(found.low, found.high, expected.least, expected.most), seen, found.how


def _exponent(expected: Exponent, rows: list[Row]) -> tuple[str, str, str]:
    """By least squares on logarithms; its interval is Student's, of the residuals."""
    from scipy import stats

    places = [math.log(getattr(row, expected.axis)) for row in rows]
    values = [math.log(row.value or 1) for row in rows]
    fit = stats.linregress(places, values)
    freedom = len(rows) - 2
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * fit.stderr)
    residuals = [y - fit.intercept - fit.slope * x for x, y in zip(places, values, strict=True)]
    residual = math.sqrt(sum(value**2 for value in residuals) / freedom)
    low, high = fit.slope - half, fit.slope + half
    seen = f"exponent {fit.slope:.2f} ({low:.2f} to {high:.2f}), residual {residual:.1%}"
    return _decide(low, high, expected.least, expected.most), seen, f"{len(rows)} points, least squares on logarithms"


def _plateau(expected: Plateau, rows: list[Row]) -> tuple[str, str, str]:
    """From which point on no larger one gains more; by intervals where all have them, else by the values: what may
    be gained is itself the margin."""
    bounds = {name: _flat_from(expected, rows, name) for name in ("low", "value", "high")}
    if not all(has_interval(row) for row in rows):
        bounds = dict.fromkeys(bounds, bounds["value"])
    # Read by the smallest gains that the intervals allow, the plateau is longest.
    longest, shortest = (len(rows) - bounds[name] for name in ("low", "high"))
    numbers = HOLD if shortest >= expected.num_points else BROKEN if longest < expected.num_points else OPEN
    index = bounds["value"]
    place, last = getattr(rows[index], expected.axis), getattr(rows[-1], expected.axis)
    if index == len(rows) - 1:
        gain = _gain(rows[-2], rows[-1]).value - 1
        seen = f"no plateau: the last step, to {last}, still gains {gain:.1%}"
    else:
        seen = f"flat from {place} to {last}, {len(rows) - index} points"
    return numbers, seen, f"{len(rows)} points of {expected.axis}"


def _flat_from(expected: Plateau, rows: list[Row], bound: str) -> int:
    """Index of the first row beyond which no row gains more than is allowed."""
    for index, row in enumerate(rows):
        if all(getattr(_gain(row, later), bound) <= 1 + expected.gain for later in rows[index + 1 :]):
            return index
    return len(rows) - 1


def _gain(row: Row, later: Row) -> RatioInterval:
    """How many times better the later one is: shorter, where the metric is a time."""
    return ratio(row, later) if row.metric == "step_seconds" else ratio(later, row)


def _value(expected: Value, rows: list[Row]) -> tuple[str, str, str]:
    """By its interval where it has one; else by the value: the tolerance is itself the margin."""
    (row,) = rows
    low, high = (row.low, row.high) if has_interval(row) else (row.value, row.value)
    assert low is not None and high is not None
    least, most = (expected.value * (1 + sign * expected.tolerance) for sign in (-1, 1))
    assert row.value is not None
    seen = f"{value_text(row)}, {round(row.value / expected.value - 1, 3) + 0.0:+.1%}"
    return _decide(low, high, least, most), seen, ""


EXAMINE: dict[type, Callable[[Any, list[Row]], tuple[str, str, str]]] = {
    Order: _order, Ratio: _ratio, Exponent: _exponent, Plateau: _plateau, Value: _value,
}  # fmt: skip


def _decide(low: float, high: float, least: float, most: float) -> str:
    if least <= low and high <= most:
        return HOLD
    return BROKEN if high < least or most < low else OPEN


def holds_there(claim: Claim, row: Row, is_emulated: bool = False) -> bool:
    """Whether a row's machine is one that the claim speaks of. A run under the paper machine's budgets stands for that
    machine where sizes are counted, not where time is taken."""
    if "any" in claim.machines:
        return True
    if "gpu" in claim.machines and (row.clock == "cuda" or row.origin != "run"):
        return True
    is_paper = any(name in row.machine.lower() for name in ("v100", PAPER_MACHINE))
    return PAPER_MACHINE in claim.machines and (is_paper or (is_emulated and row.metric in COUNTED))


def label(row: Row) -> str:
    window = f", window {row.window_size}" if row.window_size is not None else ""
    return f"{row.method}, {row.num_layers} layers{window}" + (f", {row.series}" if row.series else "")


def value_text(row: Row) -> str:
    """A row's value with the unit of its metric."""
    if row.value is None:
        return "none"
    if row.metric == "params":
        return f"{row.value / 1e9:.3f} B" if row.value >= 1e8 else f"{row.value / 1e6:.3g} M"
    return f"{row.value:.4g} {'samples/s' if row.metric == 'samples_per_second' else 's'}"


def _why(row: Row) -> str:
    ended = f"ended as {row.status}" if row.status != "ok" else ""
    return f"{label(row)} ({': '.join(part for part in (ended, row.reason) if part) or 'no number'})"


def _some(texts: list[str]) -> str:
    return "; ".join(texts[:2]) + (f"; and {len(texts) - 2} more" if len(texts) > 2 else "")
