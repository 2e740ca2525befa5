"""Figure 8b: does the time of a step grow linearly with depth?

One window at all depths and no layer that stays on the device for good, so that every layer costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cases import _published
from harness.core.job import Job
from harness.core.record import Record
from harness.figures import case, plot
from harness.figures.point import Row
from harness.figures.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = ("stronghold",)
SEARCHES = ()
PUBLISHED_DEPTHS = (16, 24, 32, 40, 48, 56, 64, 78, 92)
RUNS = {"demo": (32, 47, 62, 92), "quick": (16, 32, 56, 92), "paper": PUBLISHED_DEPTHS, "fit": PUBLISHED_DEPTHS}
PUBLISHED = _published.rows("step_seconds", 4)


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    depths = dict.fromkeys(used.depth(published) for published in RUNS[used.kind])
    window = used.window_at(min(depths))
    return [used.job(METHODS[0], depth, window_size=window, resident_layers=0) for depth in depths]


def table(records: Sequence[Record], used: Profile) -> list[Row]:
    return case.rows("step_seconds", jobs(used, {}), records)


def figure(rows: Sequence[Row], note: str) -> Figure:
    return plot.figure(rows, _draw, note, is_line=True)


def _draw(axes: Axes, rows: list[Row]) -> None:
    plot.line(axes, [(row.num_layers, row) for row in rows], case.label(METHODS[0]))
    axes.set_xlabel("#Layers")
    axes.set_ylabel(plot.axis_text("Iteration Time", rows))
