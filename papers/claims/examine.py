"""Examines a claim only by the numbers of its rows: the claim holds, does not hold, or noise leaves it open."""

from __future__ import annotations

import math
from typing import NamedTuple

from harness.core.job import params_text
from papers.claims.claims import Expected, Order, Plateau, Ratio, Shape, Value
from papers.figures.point import CONFIDENCE, FigureRow, RatioInterval, ratio

HOLD, BROKEN, OPEN = "hold", "do not hold", "NOT DISTINGUISHABLE"


class Answer(NamedTuple):
    numbers: str  # HOLD, BROKEN or OPEN
    seen: str
    how: str = ""  # how the bounds were found, as text


def examine(expected: Expected, rows: list[FigureRow]) -> Answer:
    """Examine a claim. `rows`: the rows that the claim names, in the claim's order; for a shape, the rows along its
    axis. Each row must have a number."""
    match expected:
        case Order():
            return _order(expected, rows)
        case Ratio():
            interval = ratio(*rows)
            seen = f"{value_text(rows[0])} / {value_text(rows[1])} = {interval.text}"
            return Answer(_decide(interval.low, interval.high, *expected.bounds), seen, interval.how)
        case Value():
            return _value(expected, rows[0])
        case Shape():
            return (
                _plateau(expected, expected.plateau, rows) if expected.plateau else _exponent(expected, rows)
            )


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


def _decide(low: float, high: float, least: float, most: float) -> str:
    if least <= low and high <= most:
        return HOLD
    return BROKEN if high < least or most < low else OPEN


def _order(expected: Order, rows: list[FigureRow]) -> Answer:
    """Compare each point with each point of the next group. If the order of one pair is wrong, the claim does not hold,
    even if noise leaves other pairs open."""
    by_point = dict(zip(expected.named, rows, strict=True))
    numbers, notes = [], []
    for upper, lower in zip(expected.points, expected.points[1:], strict=False):
        for first, second in ((first, second) for first in upper for second in lower):
            interval = ratio(by_point[first], by_point[second])
            numbers.append(_decide(interval.low, interval.high, math.nextafter(1, 2), math.inf))
            if numbers[-1] != HOLD:
                notes.append(f"{first} / {second} is {interval.text}: {interval.how}")
    seen = ", ".join(f"{point} {value_text(row)}" for point, row in by_point.items())
    return Answer(next((one for one in (BROKEN, OPEN) if one in numbers), HOLD), seen, shortened(notes))


def _value(expected: Value, row: FigureRow) -> Answer:
    """Judge a value by its interval. If there is no interval, the value itself decides, because the claim's tolerance
    is already a margin."""
    low, high = (row.low, row.high) if row.has_interval else (row.value, row.value)
    assert low is not None and high is not None and row.value is not None
    least, most = (expected.value * (1 + sign * expected.tolerance) for sign in (-1, 1))
    seen = f"{value_text(row)}, {round(row.value / expected.value - 1, 3) + 0.0:+.1%}"
    return Answer(_decide(low, high, least, most), seen)


def _exponent(expected: Shape, rows: list[FigureRow]) -> Answer:
    """Fit the exponent by least squares on logarithms, and judge it by Student's interval, which follows from the
    residuals."""
    import numpy as np
    from scipy import stats

    assert expected.exponent
    places = np.log([getattr(row, expected.against) for row in rows])
    values = np.log([row.value or 1 for row in rows])
    fit = stats.linregress(places, values)
    freedom = len(rows) - 2
    half = stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * fit.stderr
    low, high = float(fit.slope - half), float(fit.slope + half)
    residual = math.sqrt(sum((values - fit.intercept - fit.slope * places) ** 2) / freedom)
    seen = f"exponent {fit.slope:.2f} ({low:.2f} to {high:.2f}), residual {residual:.1%}"
    return Answer(
        _decide(low, high, *expected.exponent), seen, f"{len(rows)} points, least squares on logarithms"
    )


def _plateau(expected: Shape, plateau: Plateau, rows: list[FigureRow]) -> Answer:
    """Judge a plateau by the rows' intervals. If a row has no interval, judge it by the rows' values, because the gain
    that the claim allows is already a margin."""

    def flat_from(bound: str) -> int:
        """Return the index of the first row over which no later row gains more than allowed. `bound`: which number of a
        gain is taken, value, low or high."""
        for index, row in enumerate(rows):
            if all(getattr(_gain(row, later), bound) <= 1 + plateau.gain for later in rows[index + 1 :]):
                return index
        raise AssertionError("nothing lies beyond the last row")

    index = flat_from("value")
    # The plateau is longest if every gain is at the lower end of its interval, and shortest if every gain is at the
    # upper end.
    longest, shortest = (
        len(rows) - (flat_from(bound) if all(row.has_interval for row in rows) else index)
        for bound in ("low", "high")
    )
    numbers = _decide(shortest, longest, plateau.num_points, math.inf)
    place, last = (getattr(rows[at], expected.against) for at in (index, -1))
    if index == len(rows) - 1:
        gain = _gain(rows[-2], rows[-1]).value - 1
        seen = f"no plateau: the last step, to {last}, still gains {gain:.1%}"
    else:
        seen = f"flat from {place} to {last}, {len(rows) - index} points"
    return Answer(numbers, seen, f"{len(rows)} points of {expected.against}")


def _gain(row: FigureRow, later: FigureRow) -> RatioInterval:
    """Return the ratio by which the later row is better. For times, shorter is better."""
    return ratio(row, later) if row.metric == "step_seconds" else ratio(later, row)
