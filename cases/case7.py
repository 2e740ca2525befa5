"""Varuna: pipelines on networks with jitter, and on machines that come and go.

Measured: each number of stages with each micro-batch of two ranks, beside what the event core foretells by FLOPs at one
rate, that of the first configuration; and a job that morphed, over one that nothing disturbed, where the folder
results/morphs has both (as of `./run.sh varuna launch --folder`). Simulated under a virtual clock: the three schedules
under jitter, and samples per second through a trace of machines that was drawn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cases import _case7_figure
from harness.core.job import Budget, Job, Workload
from harness.core.method import ROOT
from harness.core.named_models import load
from harness.core.rates import Rates
from harness.core.record import Record
from harness.figures import case, plot
from harness.figures.point import FigureRow
from harness.figures.profile import Profile
from harness.simulation import machine_trace, pipelines
from methods.pipeline.auto_config import AutoConfig
from methods.pipeline.gpt_profile import by_flops, stage_passes
from methods.pipeline.schedule import SCHEDULES, SLOTS, step_seconds

METRIC = "step_seconds"
METHODS = ("varuna",)
SEARCHES = ()
RUNS = {"demo": (1,), "quick": (1, 2, 4), "paper": (1, 2, 4), "fit": (1, 2, 4)}  # micro-batches
RANKS = {"cpu": 2, "cuda": 1}
# Seconds of a message, where a forward pass takes one; jitter is relative.
STAGES, MICRO_BATCHES, JITTER = 9, 64, 0.3
SENDS = (0.0, 0.25, 0.5, 0.75, 1.0)
CLAIMED_SEND = 0.5
SEEDS = 3
MORPHS = ROOT / "results" / "morphs"  # with a folder `morphed` and a folder `undisturbed`
# The trace: 355 M parameters on up to 12 machines of one V100 each, batch 256.
MODEL, MACHINES, BATCH, HOURS, THERE_HOURS, SEED = "varuna-355m", 12, 256, 60.0, 24.0, 7
V100, V100_BYTES, NETWORK = Rates(30e12), 16 * 2**30, 1.25e9
PAUSE_SECONDS = {True: 15.0, False: 300.0}  # from a change of machines until steps go on, by morphing and by restart
SIMULATED = FigureRow(
    METRIC, METHODS[0], 0, 0, None, None, valid=True, status="ok", origin="simulated", clock="virtual"
)  # fmt: skip


def profiles(used: Profile) -> tuple[Profile, ...]:
    """On a CPU without a simulated device: that has one rank only."""
    return (replace(used, device="cpu", budget=Budget()) if used.device == "sim" else used,)


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    [its] = profiles(used)
    num_ranks = RANKS[its.device]
    return [
        its.job(METHODS[0], used.common, world_size=num_ranks, num_stages=num_stages, chunk_size=chunk_size)
        for num_stages in range(1, num_ranks + 1) if num_ranks % num_stages == 0
        for chunk_size in RUNS[used.kind]
        if used.workload.batch_size * num_stages // num_ranks % chunk_size == 0
    ]  # fmt: skip


def table(records: Sequence[Record], used: Profile) -> list[FigureRow]:
    """What was measured, what was foretold, and the schedules' steps as the claim has them."""
    measured = []
    for job in jobs(used, {}):
        for row in case.rows(METRIC, [job], records):
            measured.append((job, replace(row, group=f"{job.options['num_stages']} x {job.options['chunk_size']}")))
    if not measured:
        return []
    claimed = [replace(row, metric=METRIC) for row in _schedules((CLAIMED_SEND,))]
    return [*(row for _, row in measured), *_foretold(measured), *claimed, *_losses(MORPHS)]


def _foretold(measured: Sequence[tuple[Job, FigureRow]]) -> Iterator[FigureRow]:
    """By FLOPs at the rate at which the first configuration takes what it took."""
    seconds = [_at_unit_rate(job) for job, _ in measured]
    first = measured[0][1].value
    for (_, row), each in zip(measured, seconds, strict=True):
        if first and row.value:
            yield replace(SIMULATED, metric="foretold_seconds", value=first * each / seconds[0], x=row.value,
                          group=row.group, machine=row.machine)  # fmt: skip


def _at_unit_rate(job: Job) -> float:
    stages, chunk, ranks = (int(job.options[name]) for name in ("num_stages", "chunk_size", "world_size"))
    passes = stage_passes(job.workload, stages, chunk, Rates(1.0))
    return step_seconds("varuna", [(passes, job.workload.batch_size * stages // ranks // chunk, 0.0)])[0]


def simulated(rows: Sequence[FigureRow]) -> list[FigureRow]:
    return [*_schedules(SENDS), *_trace()]


def _schedules(sends: Sequence[float]) -> Iterator[FigureRow]:
    """The mean step of each schedule, in forward passes."""
    for name in SCHEDULES:
        for send_seconds in sends:
            network = pipelines.Network(send_seconds, jitter=JITTER)
            runs = [pipelines.simulate(name, [SLOTS] * STAGES, MICRO_BATCHES, network, seed=seed).step_seconds
                    for seed in range(SEEDS)]  # fmt: skip
            yield replace(SIMULATED, metric="schedule_seconds", value=sum(runs) / SEEDS, x=send_seconds, series=name)


def _trace() -> Iterator[FigureRow]:
    """Samples per second of each span, by morphing and by restart; and the machines beneath."""
    workload = Workload(**load(MODEL).sizes, batch_size=1)
    profile = by_flops(workload, V100, (1, 2, 4), V100_BYTES, NETWORK)
    speeds = {0: 0.0}

    def speed(number: int) -> float:
        if number not in speeds:
            speeds[number] = BATCH / AutoConfig(number, 1, BATCH, profile).get_min().step_seconds
        return speeds[number]

    trace = machine_trace.synthetic(HOURS, MACHINES, THERE_HOURS, SEED)
    for change in trace:
        yield replace(SIMULATED, metric="machines", value=float(change.num_machines), x=change.seconds / 3600)
    for name, tells in (("morphs", True), ("restarts", False)):
        spans = machine_trace.through(
            trace, HOURS * machine_trace.HOUR, speed, checkpoint_seconds=machine_trace.HOUR,
            pause_seconds=PAUSE_SECONDS[tells], tells=tells,
        )  # fmt: skip
        for span in spans:
            yield replace(SIMULATED, metric="trace_speed", value=span.samples_per_second, x=span.start / 3600,
                          series=name)  # fmt: skip
        mean = machine_trace.samples(spans) / (HOURS * machine_trace.HOUR)
        yield replace(SIMULATED, metric="mean_speed", value=mean, series=name)


def _losses(folder: Path) -> Iterator[FigureRow]:
    """Each step's loss and number of workers."""
    for name in ("undisturbed", "morphed"):
        path = folder / name / "steps.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            step = json.loads(line)
            for metric, value in (("loss", step["loss"]), ("workers", step["num_workers"])):
                yield replace(SIMULATED, metric=metric, value=float(value), x=float(step["step"]), series=name,
                              origin="imported", clock="")  # fmt: skip


def figure(rows: Sequence[FigureRow], note: str) -> plot.Figure:
    return _case7_figure.figure(rows, note)
