"""Figure 6a: how large a model does each method train in the same memories?

The largest depth is searched by real runs, and what failed above it is drawn as a cross. The paper's profile tries the
published sizes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cases import _published
from harness.core.job import Job
from harness.core.record import Record
from harness.figures import case, plot
from harness.figures.point import Row, row
from harness.figures.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = ("megatron-lm", "l2l", "zero-offload", "zero-infinity", "stronghold")  # in the figure's order
SEARCHES = METHODS
RUNS = {"paper": {"megatron-lm": 32, "l2l": 78, "zero-offload": 48, "zero-infinity": 48, "stronghold": 100}}
PUBLISHED = _published.rows("params", 1)


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    return [used.probe(name, depth) for name, depth in RUNS.get(used.kind, {}).items()]


def table(records: Sequence[Record], used: Profile) -> list[Row]:
    """For each method its largest size, then the smallest above it that failed."""
    rows = []
    for name in METHODS:
        largest, failed = case.largest(name, records)
        is_final = case.is_searched(name, records)
        rows += [replace(row("params", part), is_final=is_final) for part in (largest, failed) if part]
    return rows


def figure(rows: Sequence[Row], note: str) -> Figure:
    return plot.figure(rows, _draw, note)


def _draw(axes: Axes, rows: list[Row]) -> None:
    plot.bars(axes, [(case.label(name), [[row for row in rows if row.method == name]]) for name in METHODS])
    plot.tilt(axes)
    axes.set_ylabel(plot.axis_text("Model Size", rows))
