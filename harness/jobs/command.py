"""Makes the command line that repeats a job."""

from __future__ import annotations

import shlex
from decimal import Decimal
from typing import Any

from harness.core import method
from harness.core.job import Budget, Job, Workload
from harness.core.option import options_of
from harness.core.record import Record
from harness.devices import machine
from harness.gate.probe import is_left_out

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
