"""Figure 8a: how fast is each method at one size that all of them train (published: 32 layers, 1.717 B)?"""

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

METHODS = ("megatron-lm", "l2l", "zero-offload", "zero-infinity", "stronghold")  # in the figure's order
SEARCHES = ()
RUNS = dict.fromkeys(("demo", "quick", "paper", "fit"), 32)  # layers, on the published scale
WINDOWED = "stronghold"
PUBLISHED = _published.rows("samples_per_second", 3)


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    depth = used.depth(RUNS[used.kind])
    window = {"window_size": used.window_at(depth)}
    return [used.job(name, depth, **(window if name == WINDOWED else {})) for name in METHODS]


def table(records: Sequence[Record], used: Profile) -> list[Row]:
    return case.rows("samples_per_second", jobs(used, {}), records)


def figure(rows: Sequence[Row], note: str) -> Figure:
    return plot.figure(rows, _draw, note)


def _draw(axes: Axes, rows: list[Row]) -> None:
    plot.bars(axes, [(case.label(name), [[row for row in rows if row.method == name]]) for name in METHODS])
    plot.tilt(axes)
    axes.set_ylabel("Throughput (samples/s)")
