"""Figure 9: how wide must the window be?

No layer stays on the device for good: the published window meant both, here it is the window alone that widens.
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
PUBLISHED_WINDOWS = (2, 4, 6, 8, 10, 12, 14, 15)
RUNS = {"demo": (1, 2, 3, 4), "quick": (2, 4, 8, 15), "paper": PUBLISHED_WINDOWS, "fit": PUBLISHED_WINDOWS}
DEPTH = {"demo": 62}  # on the published scale; elsewhere as published
PUBLISHED_DEPTH = 32
PUBLISHED = _published.rows("step_seconds", 5)
AXIS = "window_size"


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    depth = used.depth(DEPTH.get(used.kind, PUBLISHED_DEPTH))
    windows = [window for window in RUNS[used.kind] if window <= depth]
    return [used.job(METHODS[0], depth, window_size=window, resident_layers=0) for window in windows]


def table(records: Sequence[Record], used: Profile) -> list[Row]:
    return case.rows("step_seconds", jobs(used, {}), records)


def figure(rows: Sequence[Row], note: str) -> Figure:
    return plot.figure(rows, _draw, note)


def _draw(axes: Axes, rows: list[Row]) -> None:
    plot.bars(axes, [(str(row.window_size), [[row]]) for row in rows])
    axes.set_xlabel("window (layers)")
    axes.set_ylabel(plot.axis_text("Iteration time", rows))
