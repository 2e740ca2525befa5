"""Figure 8a: how fast is each method at one size that all of them train (published: 32 layers, 1.717 B)?"""

from __future__ import annotations

from collections.abc import Sequence

from cases.case1 import METHODS
from harness.core.job import Job
from harness.figures.point import FigureRow
from harness.figures.profile import Profile

METRIC = "samples_per_second"
SEARCHES = ()
RUNS = dict.fromkeys(("demo", "quick", "paper", "fit"), 32)  # layers, on the published scale
WINDOWED = "stronghold"
QUICK = ("l2l", WINDOWED)  # of the shortest demo


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    depth = used.depth(RUNS[used.kind])
    window = {"window_size": used.window_at(depth)}
    return [used.job(name, depth, **(window if name == WINDOWED else {})) for name in METHODS]


def pick(rows: Sequence[FigureRow]) -> list[FigureRow]:
    """At the depth that most methods have, of several the largest."""
    methods = {
        depth: {row.method for row in rows if row.num_layers == depth} for depth in {row.num_layers for row in rows}
    }
    shared = max(methods, key=lambda depth: (len(methods[depth]), depth))
    return sorted((row for row in rows if row.num_layers == shared), key=lambda row: METHODS.index(row.method))
