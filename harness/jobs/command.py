"""Makes the command line that repeats a job, and suggests command lines in place of a job that cannot fit.

Each suggested job fits by its plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from harness.base.console import counted
from harness.core import method
from harness.core.job import Budget, Job, Room, Workload, gib
from harness.core.option import options_of
from harness.core.record import Record
from harness.devices import machine, named_machines
from harness.devices.room import room_of
from harness.gate.probe import Extent, is_left_out
from harness.plan.fit import most_layers, resolve, scale_to_fit
from harness.plan.run_time import duration_text, probe_seconds, run_seconds

SIZES = ("num_layers", "hidden_size", "batch_size")  # printed first, and by a long call always
LAST = "micro_batches"  # printed after all other fields of the workload


def command(job: Job, is_short: bool = False) -> str:
    """Return the command line that makes this job; make_jobs() is the inverse.

    `is_short`: leave out the options whose value is the default.
    """
    load, budget = job.workload, job.budget
    arguments: list[Any] = ["-m", job.method, *(["--model", load.model] if load.model else [])]
    options = options_of(Workload)
    for name in (*SIZES, *(name for name in options if name not in (*SIZES, LAST)), LAST):
        is_said = name == "num_layers" or (name in SIZES and not is_short)
        if is_said or getattr(load, name) != getattr(Workload, name):
            arguments += [options[name].flag, getattr(load, name)]
    flags = method.flags()
    for name, value in job.options.items():
        is_flag = is_short and name in flags and flags[name].is_short
        arguments += [flags[name].flag, value] if is_flag else ["--option", f"{name}={value}"]
    if not is_short or job.device != usual_device(budget):
        arguments += ["--device", job.device]
    for name, option in sorted(options_of(Budget).items(), key=lambda item: "bytes" not in item[0]):
        if (limit := getattr(budget, name)) is not None:
            arguments += [option.flag, size_text(limit) if "bytes" in name else limit]
    if not is_short or (job.steps, job.warmup) != (Job.steps, Job.warmup):
        arguments += ["--steps", job.steps, "--warmup", job.warmup]
    return shlex.join(["./run.sh", *map(str, arguments)])


def usual_device(budget: Budget) -> str:
    """Return the device of a call without --device that has this budget."""
    return "sim" if budget.device_bytes and "cuda" not in machine.devices() else machine.devices()[0]


def again(record: Record, is_short: bool = False) -> str:
    """Return the command line that repeats a record's run; a record judged without a probe gets --no-probe."""
    return command(record.job, is_short) + (" --no-probe" if is_left_out(record.gate.text) else "")


def size_text(size: float) -> str:
    """Return a size in bytes as text, in the largest unit that gives a whole number; if there is none, in KiB. Division
    by a power of two is exact, so the text loses nothing."""
    units = [("TiB", 2**40), ("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20)]
    for unit, num_bytes in units:
        if size % num_bytes == 0:
            return f"{Decimal(size) / num_bytes}{unit}"
    return f"{Decimal(size) / 1024}KiB"


def next_calls_of(jobs: Sequence[Job], folders: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield pairs: a command to run in place of these jobs, of which none can fit, and the command's effect as text.

    For one job, yield next_calls(). For several methods at one size, each command names all methods. For several sizes,
    yield nothing.
    """
    if len(jobs) == 1:
        yield from next_calls(jobs[0], folders)
    if len(jobs) == 1 or len({job.workload for job in jobs}) > 1:
        return
    # this job has the most options; the other jobs have some of them
    longest = max(jobs, key=lambda job: len(job.options))
    all_of_them = dataclasses.replace(longest, method=",".join(job.method for job in jobs))
    with contextlib.suppress(ValueError):  # the placement is fixed, or no factor divides the sizes
        if seconds := _seconds_of_all([scale_to_fit(job, folders)[0] for job in jobs], folders):
            yield f"{command(all_of_them, is_short=True)} --scale fit", f"scaled down, {_about(seconds)}"
    depth = min(most_layers(job, room_of(job), folders) for job in jobs)
    with contextlib.suppress(ValueError):  # no layer fits, or fewer layers fit than the given window has
        load = longest.workload.at_depth(depth)
        if seconds := _seconds_of_all([dataclasses.replace(job, workload=load) for job in jobs], folders):
            smaller = dataclasses.replace(all_of_them, workload=load)
            yield (
                command(smaller, is_short=True),
                f"the largest depth that fits all of them, {_about(seconds)}",
            )


def next_calls(job: Job, folders: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield pairs of a command to run in place of the job, which does not fit, and the command's effect and duration as
    text."""
    yield from _scaled(job, folders)
    depth = most_layers(job, room_of(job), folders)
    yield from _on_disk(job, depth, folders)
    if depth:
        smaller = dataclasses.replace(job, workload=job.workload.at_depth(depth))
        if duration := minutes(smaller, folders):
            yield command(smaller, is_short=True), f"the largest depth that fits as it is; {duration}"
    if job.budget.device_bytes is None and job.budget.host_bytes is None:
        # the call gave no budget, so this machine's memory is the limit
        yield from _elsewhere(job, folders)


def _scaled(job: Job, folders: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield a call that scales the job down, if scaling makes it fit."""
    with contextlib.suppress(ValueError):  # the placement is fixed, or no factor divides the sizes
        scaled, factor = scale_to_fit(job, folders)
        if factor == 1 or not (duration := minutes(scaled, folders)):
            return
        load, budget = scaled.workload, scaled.budget
        layers = counted(load.num_layers, "layer")
        sizes = f"{layers} x {load.hidden_size}, {load.seq_len} tokens, {load.vocab_size} words"
        memories = f"{gib(budget.device_bytes or 0)} of device, {gib(budget.host_bytes or 0)} of host"
        yield (
            f"{command(job, is_short=True)} --scale fit",
            f"scaled by {factor}: {sizes}, {memories}; {duration}",
        )


def _elsewhere(job: Job, folders: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield a call that plans the job on the first machine of machines.yaml that holds it; the machine of the published
    runs comes first."""
    for name in sorted(named_machines.names(), key=lambda name: name != named_machines.PUBLISHED):
        room = named_machines.load(name).room
        if room.device_bytes and room.host_bytes and _fits(job, room, folders):
            bare = dataclasses.replace(job, budget=Budget(), device=machine.devices()[0])
            arguments = command(bare, is_short=True).removeprefix("./run.sh ")
            yield (
                f"./run.sh plan {arguments} {named_machines.options_text(name)}",
                "the plan on a machine that holds it, in a second",
            )
            return


def _on_disk(job: Job, largest_depth: int, folders: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield a call that keeps layers on the disk, if the disk lets more layers fit. The call has the job's number of
    layers or, if they do not fit, the largest number that fits. `largest_depth`: the largest number without a disk."""
    if "disk" not in method.option_names(method.load(job.method, folders)) or job.options.get("disk"):
        return
    folder = tempfile.gettempdir()
    disk_bytes = job.budget.disk_bytes or shutil.disk_usage(folder).free
    on_disk = dataclasses.replace(job, options={**job.options, "disk": folder})
    room = dataclasses.replace(room_of(on_disk), disk_bytes=disk_bytes)
    depth = min(most_layers(on_disk, room, folders), job.workload.num_layers)
    if depth > largest_depth:
        deeper = dataclasses.replace(on_disk, workload=job.workload.at_depth(depth))
        if duration := minutes(deeper, folders):
            yield command(deeper, is_short=True), f"with layers on the disk; {duration}"


def _fits(job: Job, room: Room, folders: tuple[Path, ...]) -> bool:
    with contextlib.suppress(ValueError):
        return (
            method.create(job.method, job.options, folders).plan(job.workload, room).shortfall(room) is None
        )
    return False


def minutes(job: Job, folders: tuple[Path, ...]) -> str:
    """Return, as text, how long the run, its reference and its probe take together on this machine; empty if the run
    does not fit."""
    seconds = _seconds_of_all([job], folders)
    return _about(seconds) if seconds else ""


def _about(seconds: float) -> str:
    return f"about {duration_text(seconds)}, reference and probe included"


def _seconds_of_all(jobs: Sequence[Job], folders: tuple[Path, ...]) -> float | None:
    """Return the seconds that all runs, the one reference that they share, and their probes take together; None if a
    run does not fit."""
    runs, probes = [], 0.0
    for job in jobs:
        resolved, plan, shortfall = resolve(job, folders)
        if shortfall:
            return None
        runs.append(run_seconds(resolved, plan, room_of(job).rates))
        probes += probe_seconds(resolved, runs[-1], method.load(job.method, folders), Extent())
    return max(runs) + sum(runs) + probes
