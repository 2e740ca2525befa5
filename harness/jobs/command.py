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

SIZE_FIELDS = ("num_layers", "hidden_size", "batch_size")  # printed first, and always in a long command
LAST_FIELD = "micro_batches"  # printed after all other fields of the workload


def command_of(job: Job, is_short: bool = False) -> str:
    """Return the command line that makes this job; make_jobs() is the inverse.

    `is_short`: leave out the options whose value is the default.
    """
    load, budget = job.workload, job.budget
    arguments: list[Any] = ["-m", job.method]
    if load.model:
        arguments += ["--model", load.model]
    workload_options = options_of(Workload)
    other_fields = [field for field in workload_options if field not in (*SIZE_FIELDS, LAST_FIELD)]
    for field in (*SIZE_FIELDS, *other_fields, LAST_FIELD):
        is_always_printed = field == "num_layers" or (field in SIZE_FIELDS and not is_short)
        if is_always_printed or getattr(load, field) != getattr(Workload, field):
            arguments += [workload_options[field].flag, getattr(load, field)]
    flags = method.flags()
    for option_name, value in job.options.items():
        if is_short and option_name in flags and flags[option_name].is_short:
            arguments += [flags[option_name].flag, value]
        else:
            arguments += ["--option", f"{option_name}={value}"]
    if not is_short or job.device != default_device(budget):
        arguments += ["--device", job.device]
    for field, option in sorted(options_of(Budget).items(), key=lambda pair: "bytes" not in pair[0]):
        if (limit := getattr(budget, field)) is not None:
            arguments += [option.flag, size_text(limit) if "bytes" in field else limit]
    if not is_short or (job.steps, job.warmup) != (Job.steps, Job.warmup):
        arguments += ["--steps", job.steps, "--warmup", job.warmup]
    return shlex.join(["./run.sh", *map(str, arguments)])


def default_device(budget: Budget) -> str:
    """Return the device of a call without --device that has this budget."""
    return "sim" if budget.device_bytes and "cuda" not in machine.devices() else machine.devices()[0]


def repeat_command(record: Record, is_short: bool = False) -> str:
    """Return the command line that repeats a record's run; a record judged without a probe gets --no-probe."""
    return command_of(record.job, is_short) + (" --no-probe" if is_left_out(record.gate.text) else "")


def size_text(num_bytes: float) -> str:
    """Return a size in bytes as text, in the largest unit that gives a whole number; if there is none, in KiB. Division
    by a power of two is exact, so the text loses nothing."""
    units = [("TiB", 2**40), ("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20)]
    for unit, unit_bytes in units:
        if num_bytes % unit_bytes == 0:
            return f"{Decimal(num_bytes) / unit_bytes}{unit}"
    return f"{Decimal(num_bytes) / 1024}KiB"


def suggest_commands(jobs: Sequence[Job], folders: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield pairs: a command to run in place of these jobs, of which none can fit, and the command's effect as text.

    For one job, yield the pairs of suggest_commands_of_job(). For several methods at one size, each command names all
    methods. For several sizes, yield nothing.
    """
    if len(jobs) == 1:
        yield from suggest_commands_of_job(jobs[0], folders)
    if len(jobs) == 1 or len({job.workload for job in jobs}) > 1:
        return
    # this job has the most options; the other jobs have some of them
    longest = max(jobs, key=lambda job: len(job.options))
    all_methods = dataclasses.replace(longest, method=",".join(job.method for job in jobs))
    with contextlib.suppress(ValueError):  # the placement is fixed, or no factor divides the sizes
        if seconds := _seconds_of_all([scale_to_fit(job, folders)[0] for job in jobs], folders):
            yield (
                f"{command_of(all_methods, is_short=True)} --scale fit",
                f"scaled down, {_estimate_text(seconds)}",
            )
    depth = min(most_layers(job, room_of(job), folders) for job in jobs)
    with contextlib.suppress(ValueError):  # no layer fits, or fewer layers fit than the given window has
        load = longest.workload.at_depth(depth)
        if seconds := _seconds_of_all([dataclasses.replace(job, workload=load) for job in jobs], folders):
            smaller = dataclasses.replace(all_methods, workload=load)
            yield (
                command_of(smaller, is_short=True),
                f"the largest depth that fits all of them, {_estimate_text(seconds)}",
            )


def suggest_commands_of_job(job: Job, folders: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield pairs of a command to run in place of the job, which does not fit, and the command's effect and duration as
    text."""
    yield from _suggest_scaled(job, folders)
    depth = most_layers(job, room_of(job), folders)
    yield from _suggest_disk(job, depth, folders)
    if depth:
        smaller = dataclasses.replace(job, workload=job.workload.at_depth(depth))
        if duration := total_duration_text(smaller, folders):
            yield command_of(smaller, is_short=True), f"the largest depth that fits as it is; {duration}"
    if job.budget.device_bytes is None and job.budget.host_bytes is None:
        # the call gave no budget, so this machine's memory is the limit
        yield from _suggest_machine(job, folders)


def _suggest_scaled(job: Job, folders: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield a call that scales the job down, if scaling makes it fit."""
    with contextlib.suppress(ValueError):  # the placement is fixed, or no factor divides the sizes
        scaled, factor = scale_to_fit(job, folders)
        if factor == 1 or not (duration := total_duration_text(scaled, folders)):
            return
        load, budget = scaled.workload, scaled.budget
        layers = counted(load.num_layers, "layer")
        sizes = f"{layers} x {load.hidden_size}, {load.seq_len} tokens, {load.vocab_size} words"
        memories = f"{gib(budget.device_bytes or 0)} of device, {gib(budget.host_bytes or 0)} of host"
        yield (
            f"{command_of(job, is_short=True)} --scale fit",
            f"scaled by {factor}: {sizes}, {memories}; {duration}",
        )


def _suggest_machine(job: Job, folders: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Yield a call that plans the job on the first machine of machines.yaml that holds it; the machine of the published
    runs comes first."""
    machine_names = sorted(named_machines.names(), key=lambda name: name != named_machines.PUBLISHED)
    for machine_name in machine_names:
        room = named_machines.load(machine_name).room
        if room.device_bytes and room.host_bytes and _fits_room(job, room, folders):
            unlimited = dataclasses.replace(job, budget=Budget(), device=machine.devices()[0])
            arguments = command_of(unlimited, is_short=True).removeprefix("./run.sh ")
            yield (
                f"./run.sh plan {arguments} {named_machines.options_text(machine_name)}",
                "the plan on a machine that holds it, in a second",
            )
            return


def _suggest_disk(job: Job, largest_depth: int, folders: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
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
        if duration := total_duration_text(deeper, folders):
            yield command_of(deeper, is_short=True), f"with layers on the disk; {duration}"


def _fits_room(job: Job, room: Room, folders: tuple[Path, ...]) -> bool:
    with contextlib.suppress(ValueError):
        plan = method.create(job.method, job.options, folders).plan(job.workload, room)
        return plan.shortfall(room) is None
    return False


def total_duration_text(job: Job, folders: tuple[Path, ...]) -> str:
    """Return, as text, how long the run, its reference and its probe take together on this machine; empty if the run
    does not fit."""
    seconds = _seconds_of_all([job], folders)
    return _estimate_text(seconds) if seconds else ""


def _estimate_text(seconds: float) -> str:
    return f"about {duration_text(seconds)}, reference and probe included"


def _seconds_of_all(jobs: Sequence[Job], folders: tuple[Path, ...]) -> float | None:
    """Return the seconds that all runs, the one reference that they share, and their probes take together; None if a
    run does not fit."""
    seconds_of_runs, seconds_of_probes = [], 0.0
    for job in jobs:
        planned_job, plan, shortfall = resolve(job, folders)
        if shortfall:
            return None
        seconds_of_runs.append(run_seconds(planned_job, plan, room_of(job).rates))
        seconds_of_probes += probe_seconds(
            planned_job, seconds_of_runs[-1], method.load(job.method, folders), Extent()
        )
    return max(seconds_of_runs) + sum(seconds_of_runs) + seconds_of_probes
