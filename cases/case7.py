"""Varuna: how fast are pipelines on networks with jitter, and on machines that come and go?

Two parts are measured. The first compares the step time of each number of stages and each micro-batch size, on two CPU
ranks or on one GPU, with AutoConfig's prediction from a profile of the same model. The second compares a job that goes
from two workers to one and back with an undisturbed job. The folder results/case7_PROFILE keeps the profile and both
jobs; without this folder the case measures them again. Two parts are simulated under a virtual clock: the three
schedules under jitter, and samples per second through a random trace of machines.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cases import _morphs
from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core.job import Budget, Job, Workload
from harness.core.rates import Rates
from harness.core.record import Record
from harness.models.named_models import load
from harness.simulation import machine_trace
from methods.pipeline.config import simulate as pipelines
from methods.pipeline.config.auto_config import AutoConfig
from methods.pipeline.config.measured_profile import measure_profile
from methods.pipeline.config.profile import GptCosts
from methods.pipeline.launch.folder import read_lines
from methods.pipeline.schedule import SCHEDULES, SLOTS
from papers.figures import plot, points
from papers.figures.case import Case
from papers.figures.point import FigureRow
from papers.figures.profile import CaseProfile

METRIC = "step_seconds"
VARUNA = "varuna"
# numbers of micro-batches, by profile
CHUNK_SIZES = {"demo": (1,), "quick": (1, 2, 4), "paper": (1, 2, 4), "fit": (1, 2, 4)}
NUM_RANKS = {"cpu": 2, "cuda": 1}
# A simulated forward pass takes 1 s. SEND_SECONDS: seconds of a message. JITTER: relative standard deviation of a
# message's time.
NUM_STAGES, NUM_MICRO_BATCHES, JITTER = 9, 64, 0.3
SEND_SECONDS = (0.0, 0.25, 0.5, 0.75, 1.0)
CLAIMED_SEND_SECONDS = 0.5
NUM_SEEDS = 3
# Steps of the morphing job and of the undisturbed job; a worker leaves after step 8 and comes back after step 16.
NUM_STEPS, CHANGES = 40, (_morphs.Change(8, 1), _morphs.Change(16, 2))
# The trace: 355 M parameters on up to 12 machines of one V100 each, batch 256.
TRACE_MODEL, NUM_MACHINES, TRACE_BATCH_SIZE, TRACE_SEED = "varuna-355m", 12, 256, 7
TRACE_HOURS, MACHINE_HOURS = 60.0, 24.0  # the trace's length, and the mean time for which a machine stays
V100_RATES, V100_BYTES, NETWORK_BYTES_PER_SECOND = Rates(30e12), 16 * 2**30, 1.25e9
MORPH_SECONDS, RESTART_SECONDS = 15.0, 300.0  # assumed seconds from a change of machines to the next step
SIMULATED_ROW = FigureRow(
    METRIC, VARUNA, 0, 0, None, None, valid=True, status="ok", origin="simulated", clock="virtual"
)
SCHEDULE_NAMES = {"varuna": "Varuna", "1f1b": "1F1B", "gpipe": "GPipe"}
SCHEDULE_LOOKS = {"varuna": ("#B8860B", "o"), "1f1b": ("#B0413E", "s"), "gpipe": ("#54689A", "^")}
TRACE_LOOKS = {
    "morphs": ("morphs to the machines that are there", "#B8860B"),
    "restarts": ("restarts from its last hourly checkpoint", "#B0413E"),
}
SMALL_PRINT = (
    "schedules: 9 stages, 64 micro-batches, messages with a jitter of 0.3, mean of 3 seeds; foretold: by a profile"
    " of the same model\ntrace: synthetic, seeded; 355 M parameters on up to 12 machines of one V100, batch 256\n"
    "a change costs {} where the job morphs, else 300 s (assumed) and the work since the checkpoint"
)


class Pipelines(Case):
    metric = METRIC
    methods = (VARUNA,)
    mixes_metrics = True

    def profiles(self, case_profile: CaseProfile) -> tuple[CaseProfile, ...]:
        """Return the profiles. Without a GPU the profiles use the device cpu, because the device sim has only one
        rank."""
        if case_profile.device == "sim":
            return (replace(case_profile, device="cpu", budget=Budget()),)
        return (case_profile,)

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        """Return a job for each number of stages and size of micro-batch, at the published depth or, on a GPU, at the
        largest depth at which the largest micro-batch fits."""
        [profile] = self.profiles(case_profile)
        num_ranks = NUM_RANKS[profile.device]
        num_layers = case_profile.common
        if profile.device == "cuda":
            largest_chunk = max(CHUNK_SIZES[case_profile.kind])
            depth = profile.largest_planned(VARUNA, num_stages=1, chunk_size=largest_chunk)
            num_layers = min(num_layers, depth)
        num_layers = max(1, num_layers)
        jobs = []
        for num_stages in range(1, num_ranks + 1):
            if num_ranks % num_stages:
                continue
            for chunk_size in CHUNK_SIZES[case_profile.kind]:
                if case_profile.workload.batch_size * num_stages // num_ranks % chunk_size == 0:
                    options = {"world_size": num_ranks, "num_stages": num_stages, "chunk_size": chunk_size}
                    jobs.append(profile.job(VARUNA, num_layers, **options))
        return jobs

    def measure(self, case_profile: CaseProfile, results: Path, report: Callable[[JsonObject], None]) -> None:
        """Measure the profile, the morphing job and the undisturbed job, unless their results exist."""
        folder = _results_folder(case_profile, results)
        try:
            if not (folder / "profile").exists():
                report({"event": "build", "text": "case 7: a profile"})
                job, *_ = self.jobs(case_profile, {})
                options = {"world_size": NUM_RANKS[job.device]}
                measured = Job("profile", job.workload, options, device=job.device)
                measure_profile(measured, CHUNK_SIZES[case_profile.kind], folder / "profile", report)
            for name, schedule in (
                ("undisturbed", _morphs.Schedule(1, 1)),
                ("morphed", _morphs.Schedule(2, 2, CHANGES)),
            ):
                if len(_job_steps(folder, name)) < NUM_STEPS:
                    report({"event": "build", "text": f"case 7: the job {name}"})
                    shutil.rmtree(folder / name, ignore_errors=True)
                    _morphs.run_morphing_job(folder / name, schedule, NUM_STEPS)
        except (ValueError, TimeoutError) as error:
            report({"event": "warning", "text": f"case 7: {error}"})

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return the measured rows, and the step times of the schedules as the claim defines them."""
        measured = [
            replace(
                row, group=_configuration_text(int(job.options["num_stages"]), int(job.options["chunk_size"]))
            )
            for job in self.jobs(case_profile, {})
            for row in points.rows_of_jobs(METRIC, records, [job])
        ]
        if not measured:
            return []
        return [*measured, *(replace(row, metric=METRIC) for row in _schedule_rows((CLAIMED_SEND_SECONDS,)))]

    def beside(self, rows: Sequence[FigureRow], case_profile: CaseProfile, results: Path) -> list[FigureRow]:
        """Return the step times predicted from the profile that measure() left, each step of both jobs, and the
        morphing job's pauses."""
        folder = _results_folder(case_profile, results)
        foretold: list[FigureRow] = []
        if (folder / "profile").exists():
            job, *_ = self.jobs(case_profile, {})
            foretold = _foretold_rows(
                rows, NUM_RANKS[job.device], job.workload.batch_size, folder / "profile"
            )
        return [*foretold, *_job_rows(folder, "undisturbed"), *_job_rows(folder, "morphed")]

    def kept(self, case_profile: CaseProfile, results: Path) -> list[Path]:
        folder = _results_folder(case_profile, results)
        return sorted([*folder.glob("profile/*"), *folder.glob("*/job/steps.jsonl")])

    def simulated(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        pauses = [row.value for row in rows if row.metric == "pause_seconds" and row.value]
        return [
            *_schedule_rows(SEND_SECONDS),
            *_trace_rows(statistics.median(pauses) if pauses else MORPH_SECONDS),
        ]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        return _draw_pipelines(rows, note)


def _results_folder(case_profile: CaseProfile, results: Path) -> Path:
    return results.resolve() / f"case7_{case_profile.name}"


def _job_steps(folder: Path, name: str) -> list[JsonObject]:
    return read_lines(folder / name / "job" / "steps.jsonl")


def _foretold_rows(
    rows: Sequence[FigureRow], num_ranks: int, batch_size: int, profile: Path
) -> list[FigureRow]:
    """Return the step times that AutoConfig predicts from a profile, of those configurations that were measured."""
    measured = {row.group: row for row in rows if row.origin == "run" and row.value}
    foretold = []
    for config in AutoConfig(num_ranks, num_ranks, batch_size, profile).table():
        row = measured.get(_configuration_text(config.num_stages, config.chunk_size))
        if row and config.num_ranks == num_ranks:
            foretold.append(
                replace(
                    SIMULATED_ROW,
                    metric="foretold_seconds",
                    value=config.step_seconds,
                    x=row.value,
                    group=row.group,
                    machine=row.machine,
                )
            )
    return foretold


def _job_rows(folder: Path, name: str) -> Iterator[FigureRow]:
    """Yield the loss and the workers of each step of a job, then the job's pauses from round to round."""
    imported = replace(SIMULATED_ROW, origin="imported", clock="", series=name)
    steps = _job_steps(folder, name)
    for step in steps:
        for metric, value in (("loss", step["loss"]), ("workers", step["num_workers"])):
            yield replace(imported, metric=metric, value=float(value), x=float(step["step"]))
    for before, after in itertools.pairwise(steps):
        if before["round"] != after["round"]:
            pause_seconds = after["time"] - before["time"]
            yield replace(imported, metric="pause_seconds", value=pause_seconds, x=float(after["step"]))


def _configuration_text(num_stages: int, chunk_size: int) -> str:
    return f"{counted(num_stages, 'stage')}, micro-batches of {chunk_size}"


def _schedule_rows(sends: Sequence[float]) -> Iterator[FigureRow]:
    """Yield a row for each schedule and each message time: the mean step time, in units of a forward pass."""
    for name in SCHEDULES:
        for send_seconds in sends:
            mean = _mean_step(name, send_seconds)
            yield replace(SIMULATED_ROW, metric="schedule_seconds", value=mean, x=send_seconds, series=name)


@functools.cache  # figures, claims and reports ask for the same mean repeatedly
def _mean_step(schedule: str, send_seconds: float) -> float:
    network = pipelines.Network(send_seconds, jitter=JITTER)
    steps = [
        pipelines.simulate_step(
            schedule, [SLOTS] * NUM_STAGES, NUM_MICRO_BATCHES, network, seed=seed
        ).step_seconds
        for seed in range(NUM_SEEDS)
    ]
    return sum(steps) / NUM_SEEDS


@functools.cache
def _samples_per_second(num_machines: int) -> float:
    """Return the samples per second of the best configuration for this number of machines."""
    if not num_machines:
        return 0.0
    workload = Workload(**load(TRACE_MODEL).sizes, batch_size=1)
    costs = GptCosts(workload, V100_RATES, (1, 2, 4), V100_BYTES, NETWORK_BYTES_PER_SECOND)
    return TRACE_BATCH_SIZE / AutoConfig(num_machines, 1, TRACE_BATCH_SIZE, costs).get_min().step_seconds


def _trace_rows(morph_seconds: float) -> Iterator[FigureRow]:
    """Yield rows over the trace's hours: the number of machines, then the samples per second if the job morphs at each
    change, and if it restarts.
    """
    trace = machine_trace.draw_trace(TRACE_HOURS, NUM_MACHINES, MACHINE_HOURS, TRACE_SEED)
    for change in trace:
        yield replace(
            SIMULATED_ROW, metric="machines", value=float(change.num_machines), x=change.seconds / 3600
        )
    for name, is_told, pause_seconds in (
        ("morphs", True, morph_seconds),
        ("restarts", False, RESTART_SECONDS),
    ):
        job = machine_trace.ElasticJob(_samples_per_second, machine_trace.HOUR, pause_seconds, is_told)
        spans = job.spans(trace, TRACE_HOURS * machine_trace.HOUR)
        for span in spans:
            yield replace(
                SIMULATED_ROW,
                metric="trace_speed",
                value=span.samples_per_second,
                x=span.start / 3600,
                series=name,
            )
        mean = machine_trace.total_samples(spans) / (TRACE_HOURS * machine_trace.HOUR)
        yield replace(SIMULATED_ROW, metric="mean_speed", value=mean, series=name)


def _draw_pipelines(rows: Sequence[FigureRow], note: str) -> plot.Figure:
    with plot.empty(7.6, 6.0) as drawing:
        panels = drawing.subplots(2, 2)
        (schedules_axes, foretold_axes), (morphs_axes, trace_axes) = panels

        def rows_of(metric: str) -> list[FigureRow]:
            return [row for row in rows if row.metric == metric]

        _draw_schedules(schedules_axes, rows_of("schedule_seconds"))
        _draw_foretold(foretold_axes, rows_of("foretold_seconds"), note)
        _draw_morphs(morphs_axes, rows_of("loss"), rows_of("workers"))
        _draw_trace(trace_axes, rows_of("trace_speed"), rows_of("mean_speed"), rows_of("machines"))
        measured = [row for row in rows if row.metric == "step_seconds" and row.origin == "run"]
        pauses = [row.value for row in rows_of("pause_seconds") if row.value]
        pause = f"{statistics.median(pauses):.1f} s (measured, panel beside)" if pauses else "15 s (assumed)"
        plot.small_print(drawing, f"{plot.caption(measured, [], note)}\n{SMALL_PRINT.format(pause)}")
        drawing.subplots_adjust(left=0.085, right=0.93, top=0.95, bottom=0.175, wspace=0.34, hspace=0.35)
    return drawing


def _draw_schedules(axes: plot.Axes, rows: Sequence[FigureRow]) -> None:
    plot.title(axes, "simulated (virtual clock)")
    varuna_seconds = {row.x: row.value or 1.0 for row in rows if row.series == "varuna"}
    for name, (color, mark) in SCHEDULE_LOOKS.items():
        points = [
            (row.x or 0.0, (row.value or 0.0) / varuna_seconds[row.x]) for row in rows if row.series == name
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True), mark + "-", color=color, markersize=4, label=SCHEDULE_NAMES[name]
            )
    axes.axhline(1.26, color=plot.EDGE, linewidth=0.6, linestyle=":")
    axes.text(0, 1.262, "published: up to 26 %", fontsize=5.8, color=plot.EDGE, va="bottom")
    axes.set(xlabel="Seconds of a message (forward pass: 1 s)", ylabel="Step time over Varuna's")
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.42))


def _draw_foretold(axes: plot.Axes, rows: Sequence[FigureRow], note: str) -> None:
    plot.title(axes, f"measured, {note}; foretold by a profile")
    points = [(row.x or 0.0, row.value or 0.0, row.group) for row in rows]
    limit = 1.15 * max((max(point[:2]) for point in points), default=1.0)
    axes.plot([0, limit], [0, limit], ":", color=plot.EDGE, linewidth=0.8)
    for x, y, text in points:
        axes.plot(x, y, "o", color=SCHEDULE_LOOKS["varuna"][0], markersize=4)
        look: Any = {"textcoords": "offset points", "fontsize": 5.8, "color": plot.EDGE}
        # Put the label above or below the point, away from the diagonal, and let the text run towards the panel's
        # middle.
        side = "left" if x < limit / 2 else "right"
        axes.annotate(text, (x, y), xytext=(0, 5 if y >= x else -10), ha=side, **look)
    axes.set(
        xlim=(0, limit), ylim=(0, limit), xlabel="Measured step time (s)", ylabel="Foretold step time (s)"
    )


def _draw_morphs(axes: plot.Axes, losses: Sequence[FigureRow], workers: Sequence[FigureRow]) -> None:
    plot.title(axes, "measured: loss through morphs")
    if not losses:
        plot.write_instead(axes, "No morphed job here: ./run.sh case 7 makes one.")
        return
    for name, line, width in (("undisturbed", "-", 2.4), ("morphed", "-", 0.8)):
        points = [(row.x or 0.0, row.value or 0.0) for row in losses if row.series == name]
        color = {"undisturbed": "#C9C9C9", "morphed": "#B8860B"}[name]
        axes.plot(*zip(*points, strict=True), line, color=color, linewidth=width, label=name)
    low, high = min(row.value or 0.0 for row in losses), max(row.value or 0.0 for row in losses)
    axes.set(xlabel="Step", ylabel="Loss", ylim=(low - 0.5 * (high - low), high + 0.05 * (high - low)))
    axes.legend(loc="upper right")
    _draw_counts_beneath(
        axes, [(row.x or 0.0, row.value or 0.0) for row in workers if row.series == "morphed"], "Workers", low
    )


def _draw_trace(
    axes: plot.Axes, speeds: Sequence[FigureRow], means: Sequence[FigureRow], machines: Sequence[FigureRow]
) -> None:
    plot.title(axes, "simulated: synthetic trace of machines")
    mean_of_series = {row.series: row.value or 0.0 for row in means}
    for name, (text, color) in TRACE_LOOKS.items():
        points = [(row.x or 0.0, row.value or 0.0) for row in speeds if row.series == name]
        if points:
            axes.step(
                *zip(*points, strict=True),
                where="post",
                color=color,
                label=f"{text}, mean {mean_of_series[name]:.0f}",
            )
    top = max((row.value or 0.0 for row in speeds), default=1.0)
    axes.set(xlabel="Hours", ylabel=plot.LABELS["samples_per_second"], ylim=(-0.5 * top, 1.45 * top))
    axes.legend(loc="upper right", fontsize=5.6)
    _draw_counts_beneath(axes, [(row.x or 0.0, row.value or 0.0) for row in machines], "Machines", 0.0)


def _draw_counts_beneath(
    axes: plot.Axes, points: Sequence[tuple[float, float]], text: str, lowest: float
) -> None:
    """Draw the points, pairs of x and a count, as steps on a second y axis in the panel's lowest quarter. `text`: label
    of this second axis. `lowest`: the first y axis gets no ticks below this value, where the counts are drawn.
    """
    axes.set_yticks([tick for tick in axes.get_yticks() if lowest <= tick <= axes.get_ylim()[1]])
    count_axes = axes.twinx()
    count_axes.step(*zip(*points, strict=True), where="post", color=plot.EDGE, linewidth=0.7)
    highest = max(value for _, value in points)
    count_axes.set(ylim=(0, 4.2 * highest), yticks=(0, highest))
    count_axes.set_ylabel(text, loc="bottom")
