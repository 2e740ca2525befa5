"""Figure 8b: does the time of a step grow linearly with depth?

All depths have the same window and no resident layer, so that each layer takes the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cases.case2 import STREAMED_OPTIONS
from harness.core import method
from harness.core.job import Job
from papers.figures import plot
from papers.figures.case import Case
from papers.figures.point import FigureRow
from papers.figures.profile import CaseProfile

STRONGHOLD = "stronghold"
PUBLISHED_DEPTHS = (16, 24, 32, 40, 48, 56, 64, 78, 92)
DEPTHS = {
    "demo": (32, 47, 62, 92),
    "quick": (16, 32, 56, 92),
    "paper": PUBLISHED_DEPTHS,
    "fit": PUBLISHED_DEPTHS,
}


class StepTimeByDepth(Case):
    metric = "step_seconds"
    methods = (STRONGHOLD,)
    look: ClassVar = {"is_line": True}
    picks = True
    quick = methods

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        depths = dict.fromkeys(case_profile.depth(published) for published in DEPTHS[case_profile.kind])
        window = case_profile.window_at(min(depths))
        return [
            case_profile.job(STRONGHOLD, depth, window_size=window, **STREAMED_OPTIONS) for depth in depths
        ]

    def draw(self, axes: plot.Axes, rows: list[FigureRow]) -> None:
        plot.line(axes, [(row.num_layers, row) for row in rows], method.load(STRONGHOLD).label)
        axes.set_xlabel("Layers")

    def pick(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        return sorted(rows, key=lambda row: row.num_layers)
