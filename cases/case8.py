"""This project's own case: how much faster do more ranks train? It measures the throughput of every method that
supports ranks, on 1, 2 and 4 ranks.

Strong scaling splits one batch over the ranks; weak scaling gives each rank one sample. Each rank has its own GPU, or a
part of the CPU's cores. On a CPU more ranks are not faster, and the figure shows the overhead of ranks. If the
machine's rates are known, the figure also shows the predicted throughput (harness/plan/resources.py), which includes
the time of the exchange between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cases import _case8_figure
from cases.case2 import OURS, STREAMED
from harness.core.job import Budget, Job
from harness.core.record import Record
from harness.plan import accuracy
from papers.figures import plot, points
from papers.figures.case import Case
from papers.figures.point import FigureRow, row_of
from papers.figures.profile import CaseProfile

RANKS = (1, 2, 4)
STRONG, WEAK = "strong", "weak"
FORETOLD = "foretold_samples_per_second"


class Scaling(Case):
    metric = "samples_per_second"
    methods = (
        "fsdp2-offload",
        "zero-offload",
        "zero-infinity",
        "zero-infinity-nvme",
        "megatron-lm",
        "varuna",
        "l2l",
        OURS,
    )
    mixes_metrics = True
    in_all = False

    def profiles(self, case_profile: CaseProfile) -> tuple[CaseProfile, ...]:
        """Return a profile for each batch size. Without a GPU the profiles use the device cpu, because the device sim
        has only one rank.
        """
        profile = (
            replace(case_profile, device="cpu", budget=Budget())
            if case_profile.device == "sim"
            else case_profile
        )
        sizes = dict.fromkeys([*RANKS, profile.workload.batch_size])
        return tuple(replace(profile, workload=replace(profile.workload, batch_size=size)) for size in sizes)

    def jobs(self, case_profile: CaseProfile, sizes: dict[str, int]) -> list[Job]:
        jobs_of_points = [job for _, _, job in self._points(case_profile)]
        return [job for index, job in enumerate(jobs_of_points) if job not in jobs_of_points[:index]]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return each measured row, followed by its predicted row. A method without a run on one rank is left out,
        because its other runs may belong to other cases.
        """
        rows = []
        for series, num_ranks, job in self._points(case_profile):
            records_by_ranks = [record for record in records if record.job.world_size == num_ranks]
            if repeats := points.repeats(job, records_by_ranks):
                row = replace(row_of(self.metric, repeats), series=series, x=float(num_ranks))
                rows.append(row)
                if forecast := accuracy.forecast_of_record(repeats[-1]):
                    speed = repeats[-1].samples_per_step / forecast.seconds
                    rows.append(
                        replace(
                            row,
                            metric=FORETOLD,
                            value=speed,
                            low=None,
                            high=None,
                            scatter=None,
                            keys=(),
                            origin="simulated",
                            clock="",
                            num_steps=None,
                            steps=(),
                            load=None,
                            values=(),
                        )
                    )
        alone = {row.method for row in rows if row.x == 1.0}
        return [row for row in rows if row.method in alone]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        return _case8_figure.figure(rows, self.methods, note)

    def _points(self, case_profile: CaseProfile) -> Iterator[tuple[str, int, Job]]:
        """Yield for each point of the figure its series, its number of ranks and its job."""
        by_size = {profile.workload.batch_size: profile for profile in self.profiles(case_profile)}
        whole, num_layers = case_profile.workload.batch_size, case_profile.common
        if (
            case_profile.device == "cuda"
        ):  # a budget that holds the published depth may not hold it for every method
            largest = (by_size[whole].largest_planned(name) for name in self.methods)
            num_layers = max(1, min(num_layers, *largest))
        for name in self.methods:
            streamed = {"window_size": case_profile.window_at(num_layers), **STREAMED} if name == OURS else {}
            for series, sizes in ((STRONG, [whole] * len(RANKS)), (WEAK, RANKS)):
                for num_ranks, size in zip(RANKS, sizes, strict=True):
                    # For one rank leave the option world_size out: the job then also finds records that were made
                    # without this option.
                    options = streamed | ({"world_size": num_ranks} if num_ranks > 1 else {})
                    yield series, num_ranks, by_size[size].job(name, num_layers, **options)
