"""What the ranks of one training exchange: parts of weights on the way in, sums of gradients on the way out.

Every rank trains on its part of each batch, and keeps and updates its part of each slab at home. The same calls pass
messages by NCCL between GPUs and by gloo between CPUs; on sim a rank is rehearsed, which passes none. A rank alone
exchanges nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Read = TypeVar("Read")
# torch 2.13 has renamed both.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks:
    """The ranks that train one model, and this one's number among them.

    Collectives must come in the same order on all ranks. The thread that copies weights in and the computing thread
    each have an order of their own, so they have a process group each.
    """

    def __init__(self, device: str, num_ranks: int = 1) -> None:
        self.num_ranks, self.rank = num_ranks, 0
        self.is_joined = num_ranks > 1 and device != "sim"
        if self.is_joined:
            join_others(device)
            self.rank, self.copiers = dist.get_rank(), dist.new_group()

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a slab or of a batch, which divide into equal parts."""
        return whole.chunk(self.num_ranks)[self.rank] if self.num_ranks > 1 else whole

    def gather(self, slab: Tensor) -> None:
        """Fill a slab of which this rank's part is in its place with the parts of the others. The copiers' order."""
        if self.is_joined:
            all_gather(slab, self.part(slab), group=self.copiers)

    def sum_part(self, slab: Tensor) -> None:
        """Leave in this rank's part of the slab the sum over all ranks; the rest is lost."""
        if self.is_joined:
            reduce_scatter(self.part(slab), slab)

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks, whose bits are the same on all."""
        if self.is_joined:
            dist.all_reduce(tensor)

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm of what all ranks have, by the norm of this rank's."""
        if not self.is_joined:
            return own
        square = own.square()
        self.sum(square)
        return square.sqrt_()

    def gathered(self, part: Tensor) -> Tensor:
        """Return a new slab of all ranks' parts. The computing thread's order."""
        if not self.is_joined:
            return part
        slab = torch.empty(len(part) * self.num_ranks, dtype=part.dtype, device=part.device)
        all_gather(slab, part)
        return slab

    def until_read(self, tensors: Iterable[Read]) -> Iterator[Read]:
        """Yield what all ranks gather one by one, then leave the others."""
        yield from tensors
        self.leave()

    def leave(self) -> None:
        if self.is_joined:
            self.is_joined = False
            leave_others()


def join_alone(device: str) -> None:
    """Start torch.distributed for a single rank; on sim it passes no messages."""
    if device == "sim":
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 registers the backend
    backend = {"cpu": "gloo", "sim": "cpu:gloo,sim:fake", "cuda": "nccl"}[device]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def join_others(device: str) -> None:
    """Start torch.distributed for the ranks that torchrun's variables name; sim passes no messages."""
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")


def leave_others() -> None:
    """Leave torch.distributed. A rank between GPUs that fails, whose exception is on its way, only ends: NCCL would
    wait for the others, which wait for this rank."""
    is_failing = sys.exc_info()[0] is not None
    if not (is_failing and dist.get_world_size() > 1 and "nccl" in dist.get_backend_config()):
        dist.destroy_process_group()
