"""Exchange between the ranks of one training: ranks gather parts of weights on the way in, and sum gradients on the way
out.

Every rank trains on its part of each batch. Of each slab, the flat tensor of a layer's weights, every rank keeps and
updates its part on the host. The same calls pass messages by NCCL between GPUs and by gloo between CPUs. On sim a rank
is only rehearsed, and passes no messages; a single rank exchanges nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.unavailable import Unavailable

Read = TypeVar("Read")
# torch 2.13 has renamed both functions.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 may let ranks on GPUs wait for each other forever: it puts gathers of weights and"
    " sums of gradients into one queue, in another order on each rank; unset this variable"
)


class Ranks:
    """The ranks that train one model, and the number of this process's rank.

    Collectives must come in the same order on all ranks. The thread that copies weights in and the computing thread
    each have their own order, and so their own process group. Between GPUs the collectives of both threads may run at
    once, in another order on each rank, so a collective of one thread must not keep one of the other from starting.
    """

    def __init__(self, device: str, num_ranks: int = 1) -> None:
        self.num_ranks, self.rank = num_ranks, 0
        self.is_joined = num_ranks > 1 and device != "sim"
        if self.is_joined:
            if device.startswith("cuda") and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
                raise Unavailable(ONE_QUEUE)
            join_others(device)
            self.rank, self.copiers = dist.get_rank(), dist.new_group()
            # NCCL makes a group's communicator, and CUDA loads its kernels, in the first collective, which waits for
            # the device: all ranks do this here in the same order.
            for group in (None, self.copiers):
                dist.all_reduce(torch.zeros(1, device=device), group=group)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a slab or of a batch; all parts are equally large."""
        return whole.chunk(self.num_ranks)[self.rank] if self.num_ranks > 1 else whole

    def gather(self, slab: Tensor) -> None:
        """Fill a slab, which holds this rank's part, with the other ranks' parts. Only the thread that copies in calls
        this."""
        if self.is_joined:
            all_gather(slab, self.part(slab), group=self.copiers)

    def sum_part(self, slab: Tensor) -> None:
        """Replace this rank's part of the slab by the sum over all ranks; the slab's other parts are undefined."""
        if self.is_joined:
            reduce_scatter(self.part(slab), slab)

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks; all ranks get the same bits."""
        if self.is_joined:
            dist.all_reduce(tensor)

    def norm(self, own: Tensor) -> Tensor:
        """Return the norm over all ranks' tensors. `own`: the norm of this rank's tensors."""
        if not self.is_joined:
            return own
        square = own.square()
        self.sum(square)
        return square.sqrt_()

    def gathered(self, part: Tensor) -> Tensor:
        """Return a new slab of all ranks' parts. Only the thread that computes calls this."""
        if not self.is_joined:
            return part
        slab = torch.empty(len(part) * self.num_ranks, dtype=part.dtype, device=part.device)
        all_gather(slab, part)
        return slab

    def until_read(self, tensors: Iterable[Read]) -> Iterator[Read]:
        """Yield these tensors, which all ranks gather one by one; then leave torch.distributed."""
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
    """Leave torch.distributed. On a GPU's rank do nothing while an exception passes, because NCCL would wait for the
    other ranks, which wait for this rank."""
    is_failing = sys.exc_info()[0] is not None
    if not (is_failing and dist.get_world_size() > 1 and "nccl" in dist.get_backend_config()):
        dist.destroy_process_group()
