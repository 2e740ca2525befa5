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
from typing import Any

from cases.case2 import STREAMED_OPTIONS, STRONGHOLD
from harness.core import method
from harness.core.job import Budget, Job
from harness.core.record import Record
from harness.plan import accuracy
from papers.figures import plot, points
from papers.figures.case import Case
from papers.figures.point import FigureRow, row_of
from papers.figures.profile import CaseProfile

RANK_COUNTS = (1, 2, 4)
STRONG, WEAK = "strong", "weak"
FORETOLD = "foretold_samples_per_second"
SERIES_LOOKS = {"strong": ("#2F6690", "o", "one batch, split"), "weak": ("#C9A227", "s", "one sample a rank")}
SMALL_PRINT = (
    "strong scaling: the profile's batch, split over the ranks; weak: one sample a rank. White: the gate was not"
    " passed; cross: no run.\nforetold: by the machine's rates, split over the ranks; what ranks exchange is left out,"
    " but for Varuna's pipelines"
)
NO_FORECAST = "no forecast: the machine's rates are not known (./run.sh doctor --calibrate)"


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
        STRONGHOLD,
    )
    mixes_metrics = True
    in_all = False

    def profiles(self, case_profile: CaseProfile) -> tuple[CaseProfile, ...]:
        """Return a profile for each batch size. Without a GPU the profiles use the device cpu, because the device sim
        has only one rank.
        """
        profile = case_profile
        if case_profile.device == "sim":
            profile = replace(case_profile, device="cpu", budget=Budget())
        sizes = dict.fromkeys([*RANK_COUNTS, profile.workload.batch_size])
        return tuple(replace(profile, workload=replace(profile.workload, batch_size=size)) for size in sizes)

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        jobs_of_points = [job for _, _, job in self._points(case_profile)]
        return [job for index, job in enumerate(jobs_of_points) if job not in jobs_of_points[:index]]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return each measured row, followed by its predicted row. A method without a run on one rank is left out,
        because its other runs may belong to other cases.
        """
        rows = []
        for series, num_ranks, job in self._points(case_profile):
            records_by_ranks = [record for record in records if record.job.world_size == num_ranks]
            if repeats := points.repeats_of(job, records_by_ranks):
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
        methods_on_one_rank = {row.method for row in rows if row.x == 1.0}
        return [row for row in rows if row.method in methods_on_one_rank]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        return _draw_scaling(rows, self.methods, note)

    def _points(self, case_profile: CaseProfile) -> Iterator[tuple[str, int, Job]]:
        """Yield for each point of the figure its series, its number of ranks and its job."""
        by_size = {profile.workload.batch_size: profile for profile in self.profiles(case_profile)}
        whole_batch, num_layers = case_profile.workload.batch_size, case_profile.common
        if case_profile.device == "cuda":
            # a budget that holds the published depth may not hold it for every method
            largest = (by_size[whole_batch].largest_planned(name) for name in self.methods)
            num_layers = max(1, min(num_layers, *largest))
        for name in self.methods:
            streamed = (
                {"window_size": case_profile.window_at(num_layers), **STREAMED_OPTIONS}
                if name == STRONGHOLD
                else {}
            )
            for series, sizes in ((STRONG, [whole_batch] * len(RANK_COUNTS)), (WEAK, RANK_COUNTS)):
                for num_ranks, size in zip(RANK_COUNTS, sizes, strict=True):
                    # For one rank leave the option world_size out: the job then also finds records that were made
                    # without this option.
                    options = streamed | ({"world_size": num_ranks} if num_ranks > 1 else {})
                    yield series, num_ranks, by_size[size].job(name, num_layers, **options)


def _draw_scaling(rows: Sequence[FigureRow], names: Sequence[str], note: str) -> plot.Figure:
    measured = [row for row in rows if row.origin == "run"]
    foretold = [row for row in rows if row.origin == "simulated"]
    with plot.empty(7.6, 4.2) as drawing:
        panels = drawing.subplots(2, -(-len(names) // 2), squeeze=False)
        for number, (axes, name) in enumerate(zip(panels.flat, names, strict=False)):
            _draw_method_panel(
                axes,
                _rows_of_method(name, measured),
                _rows_of_method(name, foretold),
                has_forecasts=bool(foretold),
            )
            plot.title(axes, method.load(name).label)
            if number % panels.shape[1] == 0:
                axes.set_ylabel("Samples/s")
            if number >= panels.shape[1]:
                axes.set_xlabel("ranks")
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        drawing.legend(
            handles.values(), handles.keys(), ncols=4, loc="upper right", bbox_to_anchor=(0.995, 1.0)
        )
        explanation = SMALL_PRINT if foretold else f"{SMALL_PRINT.partition(chr(10))[0]}\n{NO_FORECAST}"
        plot.small_print(drawing, f"{plot.caption(measured, [], note)}\n{explanation}")
        drawing.subplots_adjust(left=0.07, right=0.99, top=0.88, bottom=0.27, wspace=0.35, hspace=0.4)
    return drawing


def _rows_of_method(name: str, rows: Sequence[FigureRow]) -> list[FigureRow]:
    return [row for row in rows if row.method == name]


def _draw_method_panel(
    axes: plot.Axes, measured: Sequence[FigureRow], foretold: Sequence[FigureRow], has_forecasts: bool
) -> None:
    for series, (color, mark, text) in SERIES_LOOKS.items():
        series_rows = [row for row in measured if row.series == series]
        points = [(row.x or 0.0, row.value or 0.0) for row in series_rows if plot.succeeded(row)]
        if points:
            axes.plot(*zip(*points, strict=True), "-", color=color)
        for row in series_rows:
            x, look = [row.x or 0.0], dict[str, Any](color=color, markersize=4)
            if plot.succeeded(row):
                look |= (
                    {"markerfacecolor": color, "label": text} if row.valid else {"markerfacecolor": "white"}
                )
                axes.plot(x, [row.value or 0.0], mark, **look)
            else:
                axes.plot(x, [0.0], "x", clip_on=False, **look)
        foretold_points = [(row.x or 0.0, row.value or 0.0) for row in foretold if row.series == series]
        if foretold_points:
            axes.plot(
                *zip(*foretold_points, strict=True),
                ":",
                color=color,
                linewidth=1.0,
                label=f"{text}: foretold",
            )
    if has_forecasts and measured and not foretold:
        _write_into(axes, "no forecast")
    if not measured:
        _write_into(axes, "not measured")
    axes.set_xticks([1, 2, 4])
    axes.set(xlim=(0.6, 4.4), ylim=(0, None))


def _write_into(axes: plot.Axes, text: str) -> None:
    look: Any = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, text, fontsize=6, color=plot.EDGE, **look)
