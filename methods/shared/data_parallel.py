"""Splits a batch over ranks that train one model: each rank takes an equal part, and the gradients are averaged."""

from __future__ import annotations

import dataclasses
import math

from harness.base.console import counted
from harness.core.job import Workload
from harness.core.option import Option

RANKS = Option(("--ranks",), "Number of processes that train one model.")


def rank_part(workload: Workload, num_ranks: int) -> Workload:
    """Return the workload of one rank, whose batch is one of `num_ranks` equal parts of the batch.

    Raises ValueError if the batch does not split evenly over the ranks, if a rank's part does not split evenly into
    micro-batches, or if several ranks are asked for and the workload has dropout.
    """
    if num_ranks < 1 or workload.batch_size % num_ranks:
        batch_size = workload.batch_size
        divisors = [str(count) for count in range(1, batch_size + 1) if batch_size % count == 0]
        nearest = " or ".join(map(str, nearest_multiples(batch_size, num_ranks)))
        message = (
            f"a batch of {batch_size} samples splits over {', '.join(divisors)} ranks, not over {num_ranks}"
        )
        raise ValueError(f"{message}; try -b {nearest}" if nearest else message)
    if workload.dropout and num_ranks > 1:
        raise ValueError(
            "dropout and --ranks exclude each other: ranks would drop other elements; try --dropout 0"
        )
    rank_samples, micro_batches = workload.batch_size // num_ranks, workload.micro_batches
    if rank_samples % micro_batches:
        expected = f"expected a divisor of the {counted(rank_samples, 'sample')} of a rank"
        divisor = math.gcd(rank_samples, micro_batches)
        raise ValueError(f"--micro-batches: {expected}, got {micro_batches}; try --micro-batches {divisor}")
    return dataclasses.replace(workload, batch_size=rank_samples)


def nearest_multiples(number: int, divisor: int) -> list[int]:
    """Return the nearest multiples of `divisor` below and above `number`, which is not a multiple itself. Only positive
    multiples are returned."""
    below = number // divisor * divisor if divisor > 0 else 0
    return [multiple for multiple in (below, below + divisor) if multiple > 0]
