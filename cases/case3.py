"""Figure 8a: how fast is each method at one size that all of them train (published: 32 layers, 1.717 B)?"""

from __future__ import annotations

from collections.abc import Sequence

from cases.case1 import LargestModel
from cases.case2 import STREAMED_OPTIONS
from harness.core.job import Job
from papers.figures.case import Case
from papers.figures.point import FigureRow
from papers.figures.profile import CaseProfile

PUBLISHED_DEPTH = 32
WINDOWED = "stronghold"


class SpeedAtOneSize(Case):
    metric = "samples_per_second"
    methods = LargestModel.methods
    picks = True
    quick = ("l2l", WINDOWED)

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        depth = case_profile.depth(PUBLISHED_DEPTH)
        streamed = {"window_size": case_profile.window_at(depth), **STREAMED_OPTIONS}
        return [
            case_profile.job(name, depth, **(streamed if name == WINDOWED else {})) for name in self.methods
        ]

    def pick(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        """Return the rows at the depth at which most methods were run; if several depths have equally many methods,
        take the largest depth."""
        methods = {
            depth: {row.method for row in rows if row.num_layers == depth}
            for depth in {row.num_layers for row in rows}
        }
        shared = max(methods, key=lambda depth: (len(methods[depth]), depth))
        return sorted(
            (row for row in rows if row.num_layers == shared), key=lambda row: self.methods.index(row.method)
        )
