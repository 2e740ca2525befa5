"""Makes the batches of a training in this process, as a list. The worker makes the same batches."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.core.data import batches
from harness.core.job import Workload


def token_batches(workload: Workload, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return a pair (inputs, targets) for each step; both are token ids of shape (B, T)."""
    tokens = torch.from_numpy(batches(workload, steps))
    return [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in tokens]
