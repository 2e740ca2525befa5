"""Figure 8b: does the time of a step grow linearly with depth?

One window at all depths and no resident layer, so that every layer costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.job import Job
from harness.figures import case, plot
from harness.figures.point import FigureRow
from harness.figures.profile import Profile

METRIC = "step_seconds"
METHODS = ("stronghold",)
SEARCHES = ()
PUBLISHED_DEPTHS = (16, 24, 32, 40, 48, 56, 64, 78, 92)
RUNS = {"demo": (32, 47, 62, 92), "quick": (16, 32, 56, 92), "paper": PUBLISHED_DEPTHS, "fit": PUBLISHED_DEPTHS}
LOOK = {"is_line": True}


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    depths = dict.fromkeys(used.depth(published) for published in RUNS[used.kind])
    window = used.window_at(min(depths))
    return [used.job(METHODS[0], depth, window_size=window, resident_layers=0) for depth in depths]


def draw(axes: plot.Axes, rows: list[FigureRow]) -> None:
    plot.line(axes, [(row.num_layers, row) for row in rows], case.label(METHODS[0]))
    axes.set_xlabel("#Layers")


def pick(rows: Sequence[FigureRow]) -> list[FigureRow]:
    return sorted(rows, key=lambda row: row.num_layers)
