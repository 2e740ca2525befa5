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

from cases import _case7_figure, _morphs
from harness.base.console import counted
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
OURS = "varuna"
# numbers of micro-batches, by profile
RUNS = {"demo": (1,), "quick": (1, 2, 4), "paper": (1, 2, 4), "fit": (1, 2, 4)}
RANKS = {"cpu": 2, "cuda": 1}
# A simulated forward pass takes 1 s. SENDS: seconds of a message. JITTER: relative standard deviation of a message's
# time.
STAGES, MICRO_BATCHES, JITTER = 9, 64, 0.3
SENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
CLAIMED_SEND = 0.5
SEEDS = 3
# Steps of the morphing job and of the undisturbed job; a worker leaves after step 8 and comes back after step 16.
STEPS, CHANGES = 40, (_morphs.Change(8, 1), _morphs.Change(16, 2))
# The trace: 355 M parameters on up to 12 machines of one V100 each, batch 256.
MODEL, MACHINES, BATCH, HOURS, THERE_HOURS, SEED = "varuna-355m", 12, 256, 60.0, 24.0, 7
V100, V100_BYTES, NETWORK = Rates(30e12), 16 * 2**30, 1.25e9
MORPH_SECONDS, RESTART_SECONDS = 15.0, 300.0  # assumed seconds from a change of machines to the next step
SIMULATED = FigureRow(
    METRIC, OURS, 0, 0, None, None, valid=True, status="ok", origin="simulated", clock="virtual"
)


class Pipelines(Case):
    metric = METRIC
    methods = (OURS,)
    mixes_metrics = True

    def profiles(self, case_profile: CaseProfile) -> tuple[CaseProfile, ...]:
        """Return the profiles. Without a GPU the profiles use the device cpu, because the device sim has only one
        rank."""
        return (
            replace(case_profile, device="cpu", budget=Budget())
            if case_profile.device == "sim"
            else case_profile,
        )

    def jobs(self, case_profile: CaseProfile, sizes: dict[str, int]) -> list[Job]:
        """Return a job for each number of stages and size of micro-batch, at the published depth or, on a GPU, at the
        largest depth at which the largest micro-batch fits."""
        [profile] = self.profiles(case_profile)
        num_ranks = RANKS[profile.device]
        most = max(RUNS[case_profile.kind])
        fits = (
            profile.largest_planned(OURS, num_stages=1, chunk_size=most)
            if profile.device == "cuda"
            else case_profile.common
        )
        num_layers = max(1, min(case_profile.common, fits))
        jobs = []
        for num_stages in range(1, num_ranks + 1):
            if num_ranks % num_stages:
                continue
            for chunk_size in RUNS[case_profile.kind]:
                if case_profile.workload.batch_size * num_stages // num_ranks % chunk_size == 0:
                    options = {"world_size": num_ranks, "num_stages": num_stages, "chunk_size": chunk_size}
                    jobs.append(profile.job(OURS, num_layers, **options))
        return jobs

    def measure(
        self, case_profile: CaseProfile, results: Path, report: Callable[[dict[str, Any]], None]
    ) -> None:
        """Measure the profile, the morphing job and the undisturbed job, unless their results exist."""
        folder = _folder(case_profile, results)
        try:
            if not (folder / "profile").exists():
                report({"event": "build", "text": "case 7: a profile"})
                job, *_ = self.jobs(case_profile, {})
                options = {"world_size": RANKS[job.device]}
                measured = Job("profile", job.workload, options, device=job.device)
                measure_profile(measured, RUNS[case_profile.kind], folder / "profile", report)
            for name, schedule in (
                ("undisturbed", _morphs.Schedule(1, 1)),
                ("morphed", _morphs.Schedule(2, 2, CHANGES)),
            ):
                if len(_steps(folder, name)) < STEPS:
                    report({"event": "build", "text": f"case 7: the job {name}"})
                    shutil.rmtree(folder / name, ignore_errors=True)
                    _morphs.play(folder / name, schedule, STEPS)
        except (ValueError, TimeoutError) as error:
            report({"event": "warning", "text": f"case 7: {error}"})

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return the measured rows, and the step times of the schedules as the claim defines them."""
        measured = [
            replace(row, group=_group(int(job.options["num_stages"]), int(job.options["chunk_size"])))
            for job in self.jobs(case_profile, {})
            for row in points.points(METRIC, records, [job])
        ]
        if not measured:
            return []
        return [*measured, *(replace(row, metric=METRIC) for row in _schedules((CLAIMED_SEND,)))]

    def beside(self, rows: Sequence[FigureRow], case_profile: CaseProfile, results: Path) -> list[FigureRow]:
        """Return the step times predicted from the profile that measure() left, each step of both jobs, and the
        morphing job's pauses."""
        folder = _folder(case_profile, results)
        foretold: list[FigureRow] = []
        if (folder / "profile").exists():
            job, *_ = self.jobs(case_profile, {})
            foretold = _foretold(rows, RANKS[job.device], job.workload.batch_size, folder / "profile")
        return [*foretold, *_job_rows(folder, "undisturbed"), *_job_rows(folder, "morphed")]

    def kept(self, case_profile: CaseProfile, results: Path) -> list[Path]:
        folder = _folder(case_profile, results)
        return sorted([*folder.glob("profile/*"), *folder.glob("*/job/steps.jsonl")])

    def simulated(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        pauses = [row.value for row in rows if row.metric == "pause_seconds" and row.value]
        return [*_schedules(SENDS), *_trace(statistics.median(pauses) if pauses else MORPH_SECONDS)]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        return _case7_figure.figure(rows, note)


def _folder(case_profile: CaseProfile, results: Path) -> Path:
    return results.resolve() / f"case7_{case_profile.name}"


def _steps(folder: Path, name: str) -> list[dict[str, Any]]:
    return read_lines(folder / name / "job" / "steps.jsonl")


def _foretold(rows: Sequence[FigureRow], num_ranks: int, batch_size: int, profile: Path) -> list[FigureRow]:
    """Return the step times that AutoConfig predicts from a profile, of those configurations that were measured."""
    measured = {row.group: row for row in rows if row.origin == "run" and row.value}
    foretold = []
    for config in AutoConfig(num_ranks, num_ranks, batch_size, profile).table():
        row = measured.get(_group(config.num_stages, config.chunk_size))
        if row and config.num_ranks == num_ranks:
            foretold.append(
                replace(
                    SIMULATED,
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
    imported = replace(SIMULATED, origin="imported", clock="", series=name)
    steps = _steps(folder, name)
    for step in steps:
        for metric, value in (("loss", step["loss"]), ("workers", step["num_workers"])):
            yield replace(imported, metric=metric, value=float(value), x=float(step["step"]))
    for before, after in itertools.pairwise(steps):
        if before["round"] != after["round"]:
            pause_seconds = after["time"] - before["time"]
            yield replace(imported, metric="pause_seconds", value=pause_seconds, x=float(after["step"]))


def _group(num_stages: int, chunk_size: int) -> str:
    return f"{counted(num_stages, 'stage')}, micro-batches of {chunk_size}"


def _schedules(sends: Sequence[float]) -> Iterator[FigureRow]:
    """Yield a row for each schedule and each message time: the mean step time, in units of a forward pass."""
    for name in SCHEDULES:
        for send_seconds in sends:
            mean = _mean_step(name, send_seconds)
            yield replace(SIMULATED, metric="schedule_seconds", value=mean, x=send_seconds, series=name)


@functools.cache  # figures, claims and reports ask for the same mean repeatedly
def _mean_step(schedule: str, send_seconds: float) -> float:
    network = pipelines.Network(send_seconds, jitter=JITTER)
    steps = [
        pipelines.simulate_step(schedule, [SLOTS] * STAGES, MICRO_BATCHES, network, seed=seed).step_seconds
        for seed in range(SEEDS)
    ]
    return sum(steps) / SEEDS


@functools.cache
def _speed(num_machines: int) -> float:
    """Return the samples per second of the best configuration for this number of machines."""
    if not num_machines:
        return 0.0
    workload = Workload(**load(MODEL).sizes, batch_size=1)
    costs = GptCosts(workload, V100, (1, 2, 4), V100_BYTES, NETWORK)
    return BATCH / AutoConfig(num_machines, 1, BATCH, costs).get_min().step_seconds


def _trace(morph_seconds: float) -> Iterator[FigureRow]:
    """Yield rows over the trace's hours: the number of machines, then the samples per second if the job morphs at each
    change, and if it restarts.
    """
    trace = machine_trace.draw_trace(HOURS, MACHINES, THERE_HOURS, SEED)
    for change in trace:
        yield replace(SIMULATED, metric="machines", value=float(change.num_machines), x=change.seconds / 3600)
    for name, is_told, pause_seconds in (
        ("morphs", True, morph_seconds),
        ("restarts", False, RESTART_SECONDS),
    ):
        job = machine_trace.ElasticJob(_speed, machine_trace.HOUR, pause_seconds, is_told)
        spans = job.spans(trace, HOURS * machine_trace.HOUR)
        for span in spans:
            yield replace(
                SIMULATED,
                metric="trace_speed",
                value=span.samples_per_second,
                x=span.start / 3600,
                series=name,
            )
        mean = machine_trace.total_samples(spans) / (HOURS * machine_trace.HOUR)
        yield replace(SIMULATED, metric="mean_speed", value=mean, series=name)
