"""Figure 9: how wide must the window be?

No layer is resident in these runs, so that only the window's width changes. (In the published code the option for the
window also changes the number of resident layers.)
"""

from __future__ import annotations

from collections.abc import Sequence

from cases.case2 import STREAMED_OPTIONS
from harness.core.job import Job
from papers.figures import plot
from papers.figures.case import Case
from papers.figures.point import FigureRow
from papers.figures.profile import CaseProfile

STRONGHOLD = "stronghold"
PUBLISHED_WINDOWS = (2, 4, 6, 8, 10, 12, 14, 15)
WINDOWS = {"demo": (1, 2, 3, 4), "quick": (2, 4, 8, 15), "paper": PUBLISHED_WINDOWS, "fit": PUBLISHED_WINDOWS}
PUBLISHED_DEPTH, DEMO_DEPTH = 32, 62  # depth on the published scale


class StepTimeByWindow(Case):
    metric = "step_seconds"
    methods = (STRONGHOLD,)
    axis = "window_size"
    picks = True
    quick = methods

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        depth = case_profile.depth(DEMO_DEPTH if case_profile.kind == "demo" else PUBLISHED_DEPTH)
        windows = [window for window in WINDOWS[case_profile.kind] if window <= depth]
        return [
            case_profile.job(STRONGHOLD, depth, window_size=window, **STREAMED_OPTIONS) for window in windows
        ]

    def draw(self, axes: plot.Axes, rows: list[FigureRow]) -> None:
        plot.bars(axes, [(str(row.window_size), [[row]]) for row in rows])
        axes.set_xlabel("Window (layers)")

    def pick(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        """Return the rows at the depth that was run with most window sizes; if several depths have equally many window
        sizes, take the largest depth."""
        windows = {
            depth: {row.window_size for row in rows if row.num_layers == depth}
            for depth in {row.num_layers for row in rows}
        }
        shared = max(windows, key=lambda depth: (len(windows[depth]), depth))
        return sorted((row for row in rows if row.num_layers == shared), key=lambda row: row.window_size or 0)
