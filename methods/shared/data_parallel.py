"""Splits a batch over ranks that train one model: each rank takes an equal part, and the gradients are averaged."""

from __future__ import annotations

import dataclasses
import math

from harness.base.console import counted
from harness.core.job import Workload


def rank_part(workload: Workload, num_ranks: int) -> Workload:
    """Return the workload of one rank, whose batch is one of `num_ranks` equal parts of the batch.

    Raises ValueError if the batch does not split evenly over the ranks, if a rank's part does not split evenly into
    micro-batches, or if several ranks are asked for and the workload has dropout.
    """
    if num_ranks < 1 or workload.batch_size % num_ranks:
        counts = ", ".join(str(n) for n in range(1, workload.batch_size + 1) if workload.batch_size % n == 0)
        nearest = " or ".join(map(str, multiples(workload.batch_size, num_ranks)))
        message = f"a batch of {workload.batch_size} samples splits over {counts} ranks, not over {num_ranks}"
        raise ValueError(f"{message}; try -b {nearest}" if nearest else message)
    if workload.dropout and num_ranks > 1:
        raise ValueError(
            "dropout and --ranks exclude each other: ranks would drop other elements; try --dropout 0"
        )
    size, parts = workload.batch_size // num_ranks, workload.micro_batches
    if size % parts:
        raise ValueError(
            f"--micro-batches: expected a divisor of the {counted(size, 'sample')} of a rank, got {parts}; try"
            f" --micro-batches {math.gcd(size, parts)}"
        )
    return dataclasses.replace(workload, batch_size=size)


def multiples(number: int, divisor: int) -> list[int]:
    """Return the nearest multiples of `divisor` below and above `number`, which is not a multiple itself. Only positive
    multiples are returned."""
    below = number // divisor * divisor if divisor > 0 else 0
    return [multiple for multiple in (below, below + divisor) if multiple > 0]
