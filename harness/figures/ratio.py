"""Can two numbers be told apart? The ratio of two rows, and bounds that it has to leave before anything is said.

Processes are repeats; steps of one process are not: what slows one, another program's load, slows its neighbors, too.
Below three processes on either side a margin stands in for the interval. It takes a whole process for one step: its
median is as uncertain as a step is, whose scatter is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.figures.point import CONFIDENCE, FEWEST_FOR_INTERVAL, Row

LEAST_MARGIN = 0.05  # of a ratio, where a side has too few runs for an interval
STANDARD_ERRORS = 2  # that a margin spans
COUNTED = ("params",)  # metrics that are counted, not timed: two of them differ or they do not


@dataclass(frozen=True)
class Ratio:
    """`value` is over / under; the truth is taken to lie from `low` to `high`; `how` says by what right."""

    value: float
    low: float
    high: float
    how: str
    has_interval: bool

    @property
    def text(self) -> str:
        if self.low == self.high == self.value:
            return f"{self.value:.3g}"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def has_number(row: Row) -> bool:
    return row.value is not None and math.isfinite(row.value) and row.value > 0


def has_interval(row: Row) -> bool:
    return row.num_runs >= FEWEST_FOR_INTERVAL and row.low is not None and row.high is not None


def ratio(over: Row, under: Row) -> Ratio:
    """Of two rows that have numbers: the ratio of their medians, bounded by Welch's interval on logarithms."""
    assert over.value is not None and under.value is not None
    value = over.value / under.value
    if over.metric in COUNTED:
        low = (over.low or over.value) / (under.high or under.value)
        high = (over.high or over.value) / (under.low or under.value)
        return Ratio(value, low, high, "counted", has_interval=True)
    runs = f"{over.num_runs} and {under.num_runs} runs"
    if has_interval(over) and has_interval(under):
        low, high = _welch(over, under)
        return Ratio(value, low, high, f"95 % interval, {runs}", has_interval=True)
    factor = max(1 + LEAST_MARGIN, math.exp(STANDARD_ERRORS * math.hypot(over.scatter or 0, under.scatter or 0)))
    how = (
        f"margin of {factor - 1:.0%}: {runs}{_scatter_text(over, under)}, an interval needs {FEWEST_FOR_INTERVAL} each"
    )
    return Ratio(value, value / factor, value * factor, how, has_interval=False)


def _scatter_text(over: Row, under: Row) -> str:
    known = [f"{row.scatter:.1%}" for row in (over, under) if row.scatter is not None]
    return f" with steps that scatter by {' and '.join(known)}" if len(known) == 2 else ""


def _welch(over: Row, under: Row) -> tuple[float, float]:
    """Bounds of the ratio of means; the error of a logarithm is the relative error (delta method)."""
    from scipy import stats

    means, squares, weights = [], [], []
    for row in (over, under):
        assert row.low is not None and row.high is not None
        mean, half = (row.low + row.high) / 2, (row.high - row.low) / 2
        error = half / float(stats.t.ppf((1 + CONFIDENCE) / 2, row.num_runs - 1))
        means.append(mean)
        squares.append((error / mean) ** 2)
        weights.append(squares[-1] ** 2 / (row.num_runs - 1))
    center = means[0] / means[1]
    if not sum(weights):
        return center, center
    freedom = sum(squares) ** 2 / sum(weights)  # Welch and Satterthwaite
    factor = math.exp(float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(sum(squares)))
    return center / factor, center * factor
