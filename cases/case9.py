"""This project's own case: how does throughput grow with the tokens per step? Each method trains one model, which all
methods can train, with batches of growing size.

With a larger batch the device computes more for each copy and each update. A cross in the figure marks a batch that
does not fit in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cases.case2 import STREAMED_OPTIONS
from harness.core import method
from harness.core.job import Job
from harness.core.record import Record
from papers.figures import plot, points
from papers.figures.case import Case
from papers.figures.point import FigureRow
from papers.figures.profile import CaseProfile

STRONGHOLD = "stronghold"
# Methods that train as the reference does, on one device, without a disk.
METHODS = (
    "resident",
    "l2l",
    STRONGHOLD,
    "hydra",
    "megatron-lm",
    "zero-offload",
    "zero-infinity",
    "fsdp2-offload",
)
BATCHES = {"demo": (1, 4, 16)}
FULL_BATCHES = (1, 2, 4, 8, 16, 32)
PUBLISHED_DEPTH = 32
SIZE_INCHES = (7.6, 4.2)


class SpeedByTokens(Case):
    metric = "tokens_per_second"
    methods = METHODS
    axis = "x"
    in_all = False

    def profiles(self, case_profile: CaseProfile) -> list[CaseProfile]:
        """Return a profile for each batch size."""
        loads = [
            replace(case_profile.workload, batch_size=size)
            for size in BATCHES.get(case_profile.kind, FULL_BATCHES)
        ]
        return [replace(case_profile, workload=load) for load in loads]

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        """Return a job for each method and batch size. STRONGHOLD has no resident layer here, because resident layers
        have no copies to hide."""
        depth = case_profile.depth(PUBLISHED_DEPTH)
        options = {STRONGHOLD: {"window_size": case_profile.window_at(depth), **STREAMED_OPTIONS}}
        return [
            profile.job(name, depth, **options.get(name, {}))
            for name in self.methods
            for profile in self.profiles(case_profile)
        ]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        return [
            replace(row, x=float(job.workload.batch_size * job.workload.seq_len))
            for job in self.jobs(case_profile, {})
            for row in points.rows_of_jobs(self.metric, records, [job])
        ]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        """Draw one panel per method; the dotted line is the reference's speed."""
        with plot.empty(*SIZE_INCHES) as drawing:
            panels = list(drawing.subplots(2, -(-len(self.methods) // 2)).flat)
            for axes, name in zip(panels, self.methods, strict=True):
                self._panel(axes, rows, name)
            top = max(axes.get_ylim()[1] for axes in panels)
            for axes in panels:
                axes.set_ylim(0, 1.08 * top)
            plot.legend(drawing, rows, {}, is_line=True)
            plot.small_print(drawing, plot.caption(rows, [], f"{note}; dotted: the reference"))
            drawing.supxlabel("Tokens of a step", fontsize=8, y=0.14)
            drawing.supylabel(plot.LABELS[self.metric], fontsize=8, x=0.005)
            drawing.subplots_adjust(left=0.085, right=0.985, top=0.87, bottom=0.23, wspace=0.32, hspace=0.45)
        return drawing

    def _panel(self, axes: plot.Axes, rows: Sequence[FigureRow], name: str) -> None:
        axes.set_xscale("log", base=2)
        plot.title(axes, method.load(name).label)
        reference_points = [
            (row.x or 0.0, row.value or 0.0) for row in rows if row.method == method.reference() and row.value
        ]
        if reference_points:
            axes.plot(*zip(*reference_points, strict=True), ":", color=plot.EDGE, linewidth=0.8)
        plot.line(axes, [(row.x or 0.0, row) for row in rows if row.method == name], "")
        axes.minorticks_off()
