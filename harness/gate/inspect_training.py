"""Gathers the evidence of a training, small enough for a record: its kernels, and the changes of each tensor."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.core.gpt import drawn_blocks
from harness.core.job import Job, Workload
from harness.core.method import TensorState

SKETCH_BUCKETS = 8
SKETCH_ROWS = 65_537  # signs repeat after a prime number of rows, so that no structure of a tensor has their period
BLOCK = 2 * SKETCH_ROWS * SKETCH_BUCKETS  # elements of one pass
TELLING = ("attention", "adam")  # names of ops that have several kernels


class Kernels(TorchDispatchMode):
    """Notes the kernels of the ops in TELLING that torch dispatches in this context; an engine's own library, such as
    DeepSpeed's Adam, does not pass here."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if any(word in name for word in TELLING) and not name.endswith("_backward"):
            self.names.add(name.strip("_"))
        return op(*args, **(kwargs or {}))


def inspect(tensors: Iterable[TensorState], job: Job) -> dict[str, dict[str, Any]]:
    """Compare each tensor with its seeded start: share of elements changed, distance moved, sizes of both moments."""
    cores = len(os.sched_getaffinity(0))
    torch.get_num_threads()  # before the threads overwrite it, as in harness/devices/streams.py
    room = threading.Semaphore(cores + 1)  # tensors may be made on demand: one for each core, and the next
    found: dict[str, Future] = {}
    with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for state in tensors:
            room.acquire()
            found[state.name] = pool.submit(look, state, job.workload)
            found[state.name].add_done_callback(lambda _: room.release())
    return {name: future.result() for name, future in found.items()}


def look(state: TensorState, workload: Workload) -> dict[str, Any]:
    """Read a tensor in one pass, in blocks that stay in the cache, by all cores."""
    weight, digest, parts = state.weight.detach().reshape(-1), hashlib.sha256(), list[torch.Tensor]()
    noise = noise_in(state.name, workload)
    changed, moved, size = 0, 0.0, 0.0
    for start, drawn in drawn_blocks(state.name, state.weight.shape, workload, BLOCK):
        here = weight[start : start + len(drawn)].float().cpu()
        digest.update(here.numpy().data)
        size = math.hypot(size, norm(here))
        change = torch.sub(here, drawn, out=drawn)
        changed += int(torch.count_nonzero(change))
        without_noise(change, start, noise)
        moved = math.hypot(moved, norm(change))
        parts += sums(change)
    return {
        "changed": changed / weight.numel(),
        "moved": moved,
        "size": size,
        "sketch": sketch(parts),
        "exp_avg": moment_size(state.exp_avg, noise),
        "exp_avg_sq": moment_size(state.exp_avg_sq, noise),
        "sha256": digest.hexdigest()[:16],
        **({"left_out": "keys"} if noise else {}),
    }


def moment_size(moment: torch.Tensor | None, noise: range) -> float | None:
    if moment is None:
        return None
    return norm(without_noise(moment.detach().reshape(-1).clone(), 0, noise) if noise else moment)


def noise_in(name: str, workload: Workload) -> range:
    """Return the elements of a tensor whose gradient is nothing but rounding."""
    anatomy = workload.anatomy
    return range(*anatomy.noise.get(anatomy.within(name), (0, 0)))


def without_noise(part: torch.Tensor, start: int, noise: range) -> torch.Tensor:
    """Zero, in place, the elements in `noise`, in a tensor's part from `start` on."""
    part[max(0, noise.start - start) : max(0, noise.stop - start)] = 0
    return part


def norm(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values.float()))


def sketch(parts: list[torch.Tensor]) -> list[float]:
    """Return a count sketch of a flat tensor, from its sums(): sums of its elements with seeded signs, in a few
    buckets.

    The distance of two sketches estimates the distance of the tensors, so two records can be compared without either
    run's weights. Source: Charikar et al. 2002.
    """
    return [float(f"{value:.7g}") for value in torch.stack(parts).sum(0).tolist()]


def sums(change: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the sketch of every SKETCH_ROWS rows of a flat tensor."""
    for block in change.split(SKETCH_ROWS * SKETCH_BUCKETS):
        short = -block.numel() % SKETCH_BUCKETS
        rows = (torch.nn.functional.pad(block, (0, short)) if short else block).view(-1, SKETCH_BUCKETS)
        yield (rows * signs()[: len(rows)]).sum(0, dtype=torch.float64)


@functools.cache
def signs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(0, 2, (SKETCH_ROWS, SKETCH_BUCKETS), generator=generator) * 2 - 1).float()
