"""The command line that repeats a job."""

from __future__ import annotations

import shlex
from decimal import Decimal
from typing import Any

from harness.core.job import Job, Workload


def command(job: Job) -> str:
    """The call that makes this job, with its resolved options: the inverse of make_jobs()."""
    defaults, load, budget = Workload(), job.workload, job.budget
    names = {"num_layers": "-l", "hidden_size": "-h", "batch_size": "-b"}
    others = {"num_heads": "--heads", "seq_len": "--seq", "vocab_size": "--vocab", "dtype": "--dtype",
              "dropout": "--dropout", "clip_norm": "--clip", "learning_rate": "--lr", "seed": "--seed",
              "corpus": "--data", "micro_batches": "--micro-batches"}  # fmt: skip
    budgets = {"device_bytes": "--device-memory", "host_bytes": "--host-memory", "disk_bytes": "--disk-memory",
               "link_bytes_per_second": "--link"}  # fmt: skip
    words: list[Any] = ["-m", job.method]
    for name, word in {**names, **others}.items():
        if name in names or getattr(load, name) != getattr(defaults, name):
            words += [word, getattr(load, name)]
    words += [word for name, value in job.options.items() for word in ("--option", f"{name}={value}")]
    words += ["--device", job.device]
    for name, word in budgets.items():
        if getattr(budget, name) is not None:
            words += [word, f"{Decimal(getattr(budget, name)) / 1024}KiB"]  # exact: a division by a power of two
    words += ["--timeout", budget.seconds] if budget.seconds is not None else []
    words += ["--steps", job.steps, "--warmup", job.warmup]
    return shlex.join(["./run.sh", *map(str, words)])
