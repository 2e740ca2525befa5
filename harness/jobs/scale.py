"""Scales an experiment down by a factor f, so that it still shows which models fit.

The number of layers stays. Width, sequence and vocabulary are divided by f, memories by f squared. The bytes of layers,
ends, activations and logits shrink by f squared, too, so a model that fits at full size also fits when scaled.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from harness.core import method
from harness.core.job import Budget, Job, Workload
from harness.devices import machine, named_machines
from harness.plan.run_time import run_seconds

MOST_SECONDS = 60.0  # most seconds that a scaled run and its reference may take together
MOST_OF_HOST = 0.5  # largest share of this machine's memory that a scaled run may take
FACTORS = (1, 2, 4, 8, 16, 32, 64)
LEAST_TOKENS, LEAST_WORDS = 16, 64


def shrunk(workload: Workload, budget: Budget, factor: int) -> tuple[Workload, Budget]:
    """Divide the workload's sizes by the factor, and the budget's memories by the factor's square.

    The hidden size stays a multiple of the number of heads. Sequence and vocabulary stay at or above LEAST_TOKENS and
    LEAST_WORDS, unless they were smaller before.
    """
    heads = workload.num_heads
    widths: dict[str, Any] = {
        "hidden_size": max(1, workload.hidden_size // factor // heads) * heads,
        "seq_len": max(min(LEAST_TOKENS, workload.seq_len), workload.seq_len // factor),
        "vocab_size": max(min(LEAST_WORDS, workload.vocab_size), workload.vocab_size // factor),
    }
    sizes = {name: getattr(budget, name) for name in ("device_bytes", "host_bytes", "disk_bytes")}
    memories: dict[str, Any] = {name: size // factor**2 for name, size in sizes.items() if size is not None}
    return dataclasses.replace(workload, **widths), dataclasses.replace(budget, **memories)


def to_fit(job: Job, folders: tuple[Path, ...] = ()) -> tuple[Job, int]:
    """Scale the job down and move it to the simulated device; return the scaled job and the factor.

    The factor is the least one of FACTORS with which the run and its reference take at most MOST_SECONDS on this
    machine; if there is none, the largest. A budget that the job lacks is taken from the published runs' machine.
    """
    published = named_machines.load(named_machines.PUBLISHED).budget_on("sim")
    limits = {
        name: size for name, size in vars(job.budget).items() if size is not None and name.endswith("_bytes")
    }
    whole = dataclasses.replace(published, rates=None, **limits, seconds=job.budget.seconds)
    assert whole.device_bytes and whole.host_bytes
    for factor in FACTORS:
        workload, budget = shrunk(job.workload, whole, factor)
        scaled = dataclasses.replace(job, workload=workload, budget=budget, device="sim")
        plan = method.create(job.method, job.options, folders).plan(workload, budget.room)
        has_room = (budget.device_bytes or 0) + (budget.host_bytes or 0) < MOST_OF_HOST * machine.host_bytes()
        if has_room and 2 * run_seconds(scaled, plan) <= MOST_SECONDS:
            break
    return scaled, factor
