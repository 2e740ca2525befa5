"""The exchange between the ranks that train one model: ranks gather the parts of a layer's weights before the layer
computes, and sum its gradients afterwards.

Every rank trains on its own part of each batch. A slab is the flat tensor of a layer's weights; every rank keeps and
updates its own part of each slab on the host. Messages go by NCCL between GPUs and by gloo between CPUs. On sim several
ranks cannot train; a rehearsal of one of them passes no messages. A single rank exchanges nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.refusals import Unavailable

T = TypeVar("T")
# torch 2.13 has renamed these two functions.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1 may let ranks on GPUs wait for each other forever: it puts gathers of weights and"
    " sums of gradients into one queue, in another order on each rank; unset this variable"
)


class Ranks:
    """The number of ranks that train one model, this process's rank number, and the calls that exchange tensors.

    The collectives of a process group must come in the same order on all ranks. Two threads call collectives: the one
    that copies weights in, and the one that computes. Their calls may interleave differently on each rank, so each
    thread has its own process group. Between GPUs the collectives of both threads may run at the same time, so a
    collective of one thread must not keep a collective of the other thread from starting.
    """

    def __init__(self, device: str, num_ranks: int = 1) -> None:
        self.num_ranks, self.rank = num_ranks, 0
        self.is_joined = num_ranks > 1 and device != "sim"
        if self.is_joined:
            if device.startswith("cuda") and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
                raise Unavailable(ONE_QUEUE)
            join_others(device)
            self.rank, self.copiers = dist.get_rank(), dist.new_group()
            # In the first collective of a group, NCCL makes the group's communicator and CUDA loads the kernels, which
            # waits for the device. So the first collective of each kind is here, in the same order on all ranks.
            slab = torch.zeros(num_ranks, device=device)
            for group in (None, self.copiers):
                dist.all_reduce(slab, group=group)
            self.gather(slab)
            self.sum_part(slab)

    def part(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's part of a slab or of a batch. The parts of all ranks are equally large."""
        return whole.chunk(self.num_ranks)[self.rank] if self.num_ranks > 1 else whole

    def gather(self, slab: Tensor) -> None:
        """Fill a slab with the parts of all other ranks; this rank's part must be in the slab already. Only the thread
        that copies weights in may call this."""
        if self.is_joined:
            all_gather(slab, self.part(slab), group=self.copiers)

    def sum_part(self, slab: Tensor) -> None:
        """Add up the slabs of all ranks, and replace this rank's part of its slab by this part of the sum. Afterwards
        the slab's other parts are undefined."""
        if self.is_joined:
            reduce_scatter(self.part(slab), slab)

    def sum(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all ranks. All ranks get bit-equal results."""
        if self.is_joined:
            dist.all_reduce(tensor)

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the tensors of all ranks together. `norm`: the norm of this rank's tensors."""
        return norm_over_ranks(norm) if self.is_joined else norm

    def gathered(self, part: Tensor) -> Tensor:
        """Return a new slab with the parts of all ranks. Only the thread that computes may call this."""
        if not self.is_joined:
            return part
        slab = torch.empty(len(part) * self.num_ranks, dtype=part.dtype, device=part.device)
        all_gather(slab, part)
        return slab

    def until_read(self, tensors: Iterable[T]) -> Iterator[T]:
        """Yield these tensors; making them may need an exchange with other ranks. Leave torch.distributed after the
        last tensor."""
        yield from tensors
        self.leave()

    def leave(self) -> None:
        if self.is_joined:
            self.is_joined = False
            leave_others()


def norm_over_ranks(norm: Tensor) -> Tensor:
    """Return the norm of the tensors of all ranks together. `norm`: the norm of this rank's tensors."""
    squared_norm = norm.square()
    dist.all_reduce(squared_norm)
    return squared_norm.sqrt_()


def join_alone(device: str) -> None:
    """Start torch.distributed for a single rank. On sim a fake backend is used, which passes no messages."""
    if device == "sim":
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 registers the backend
    backend = {"cpu": "gloo", "sim": "cpu:gloo,sim:fake", "cuda": "nccl"}[device]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def join_others(device: str) -> None:
    """Start torch.distributed for the ranks that torchrun's environment variables describe, on CPUs or GPUs."""
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")


def leave_others() -> None:
    """Leave torch.distributed. If an exception is being handled and NCCL connects several ranks, do nothing: NCCL would
    wait for the other ranks, which wait for this one."""
    is_failing = sys.exc_info()[0] is not None
    if not (is_failing and dist.get_world_size() > 1 and "nccl" in dist.get_backend_config()):
        dist.destroy_process_group()
