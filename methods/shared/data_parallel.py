"""A batch split over ranks that train one model: each takes an equal part, and the gradients are averaged."""

from __future__ import annotations

import dataclasses

from harness.core.job import Workload


def rank_part(workload: Workload, num_ranks: int) -> Workload:
    """Return the workload of one rank. Raises ValueError if the batch has no such number of equal parts, or if ranks
    would drop other elements than one process does."""
    if num_ranks < 1 or workload.batch_size % num_ranks:
        counts = ", ".join(str(n) for n in range(1, workload.batch_size + 1) if workload.batch_size % n == 0)
        raise ValueError(f"a batch of {workload.batch_size} splits over {counts} ranks, not {num_ranks}")
    if workload.dropout and num_ranks > 1:
        raise ValueError("dropout and --ranks exclude each other: each rank would drop other elements")
    return dataclasses.replace(workload, batch_size=workload.batch_size // num_ranks)
