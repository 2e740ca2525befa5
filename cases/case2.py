"""Figure 7a: how fast is STRONGHOLD at the largest size of each baseline?

The sizes are the largest sizes that case 1 finds. If no run of a baseline passes the gate, the figure shows only the
baseline's size, and STRONGHOLD does not run at this size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from harness.core import method
from harness.core.job import Job
from harness.core.record import Record
from papers.figures import plot, points, searches
from papers.figures.case import Case
from papers.figures.point import FigureRow, row_of
from papers.figures.profile import CaseProfile

BASELINES = ("megatron-lm", "l2l", "zero-offload", "zero-infinity")  # in the figure's order
STRONGHOLD = "stronghold"
# as published: all layers windowed, no early updates
STREAMED_OPTIONS = {"resident_layers": 0, "clipping": "deferred"}


class SpeedAtLargestSizes(Case):
    metric = "samples_per_second"
    methods = (*BASELINES, STRONGHOLD)
    searches = BASELINES
    look: ClassVar = {"series": {"Baselines": BASELINES[0], "": STRONGHOLD}}
    picks = True

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        depth_by_baseline = {name: depth_by_method[name] for name in BASELINES if name in depth_by_method}
        baselines = [case_profile.job(name, depth) for name, depth in depth_by_baseline.items()]
        depths = sorted(set(depth_by_baseline.values()))
        return baselines + [
            case_profile.job(STRONGHOLD, depth, window_size=case_profile.window_at(depth), **STREAMED_OPTIONS)
            for depth in depths
        ]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return the rows of the baselines, then the rows of STRONGHOLD at the baselines' depths."""
        rows = points.rows_of_jobs(
            self.metric, records, self.jobs(case_profile, searches.largest_depths(self.searches, records))
        )
        for name in BASELINES:
            largest, _ = searches.largest_and_failed(name, records)
            if largest and not any(row.method == name for row in rows):
                # no run of this baseline passed the gate
                rows.append(row_of(self.metric, largest))
        still_searched = {name for name in BASELINES if not searches.is_searched(name, records)}
        rows = [replace(row, is_final=row.method not in still_searched) for row in rows]
        return sorted(rows, key=lambda row: self.methods.index(row.method))

    def draw(self, axes: plot.Axes, rows: list[FigureRow]) -> None:
        groups = []
        for name in BASELINES:
            baseline_rows = [row for row in rows if row.method == name]
            depths = sorted({row.num_layers for row in baseline_rows})
            stronghold_rows = [row for row in rows if row.method == STRONGHOLD and row.num_layers in depths]
            size = f"\n{' and '.join(map(str, depths))} layers" if depths else ""
            groups.append((f"{method.load(name).label}{size}", [baseline_rows, stronghold_rows]))
        plot.bars(axes, groups)
        plot.tilt(axes)

    def pick(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        """Return each baseline's row at its largest depth that trained, and STRONGHOLD's row at the same depth. Runs
        that passed the gate are preferred to other runs. An imported log counts with its speed even if its run ended
        early, as did the paper's run of L2L.
        """
        picked = []
        for name in BASELINES:
            method_rows = [row for row in rows if row.method == name]
            trained = [
                row
                for row in method_rows
                if plot.succeeded(row) or (row.origin == "imported" and row.has_number)
            ]
            picked += sorted(trained, key=lambda row: (row.valid, row.num_layers))[-1:]
        depths = {row.num_layers for row in picked}
        return picked + [row for row in rows if row.method == STRONGHOLD and row.num_layers in depths]
