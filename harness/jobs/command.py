"""Makes the command line that repeats a job."""

from __future__ import annotations

import shlex
from decimal import Decimal
from typing import Any

from harness.core.job import Budget, Job, Workload
from harness.core.record import Record
from harness.devices import machine
from harness.gate.probe import LEFT_OUT

# options that have a spelling of their own, shorter than --option NAME=VALUE
SHORT = {"window_size": "-w", "placement": "--placement", "disk": "--disk"}


def command(job: Job, is_short: bool = False) -> str:
    """Return the command line that makes this job; make_jobs() is the inverse.

    `is_short`: leave out the options whose value is the default.
    """
    defaults, load, budget = Workload(), job.workload, job.budget
    names = {"num_layers": "-l", "hidden_size": "-h", "batch_size": "-b"}
    others = {
        "num_heads": "--heads",
        "seq_len": "--seq",
        "vocab_size": "--vocab",
        "dtype": "--dtype",
        "dropout": "--dropout",
        "clip_norm": "--clip",
        "learning_rate": "--lr",
        "seed": "--seed",
        "corpus": "--data",
        "weights": "--weights",
        "micro_batches": "--micro-batches",
    }
    budgets = {
        "device_bytes": "--device-memory",
        "host_bytes": "--host-memory",
        "disk_bytes": "--disk-memory",
        "link_bytes_per_second": "--link",
    }
    words: list[Any] = ["-m", job.method, *(["--model", load.model] if load.model else [])]
    for name, word in {**names, **others}.items():
        is_said = name == "num_layers" or (name in names and not is_short)
        if is_said or getattr(load, name) != getattr(defaults, name):
            words += [word, getattr(load, name)]
    spelled = SHORT if is_short else {}
    for name, value in job.options.items():
        words += [spelled[name], value] if name in spelled else ["--option", f"{name}={value}"]
    words += [] if is_short and job.device == usual_device(budget) else ["--device", job.device]
    for name, word in budgets.items():
        if getattr(budget, name) is not None:
            words += [word, size_text(getattr(budget, name))]
    words += ["--timeout", budget.seconds] if budget.seconds is not None else []
    if not is_short or (job.steps, job.warmup) != (Job.steps, Job.warmup):
        words += ["--steps", job.steps, "--warmup", job.warmup]
    return shlex.join(["./run.sh", *map(str, words)])


def usual_device(budget: Budget) -> str:
    """Return the device of a call without --device that has this budget."""
    return "sim" if budget.device_bytes and "cuda" not in machine.devices() else machine.devices()[0]


def again(record: Record, is_short: bool = False) -> str:
    """Return the command line that repeats a record's run; a record judged without a probe gets --no-probe."""
    is_unprobed = LEFT_OUT in record.gate.text
    return command(record.job, is_short) + (" --no-probe" if is_unprobed else "")


def size_text(size: float) -> str:
    """Return a size in bytes as text, in the largest unit that gives a whole number; if there is none, in KiB. Division
    by a power of two is exact, so the text loses nothing."""
    units = [("TiB", 2**40), ("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20)]
    unit, factor = next(((unit, each) for unit, each in units if size % each == 0), ("KiB", 1024))
    return f"{Decimal(size) / factor}{unit}"
