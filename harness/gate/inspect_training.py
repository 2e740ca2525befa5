"""Gathers the evidence of a training, small enough for a record: the kernels that ran, and how each tensor changed."""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.base.json_object import JsonObject
from harness.core.cpu_cores import available_cores, use_cores
from harness.core.job import Job, Workload
from harness.core.method import TensorState
from harness.core.record import PRODUCTS_IN
from harness.models.gpt import DTYPES, drawn_blocks

SKETCH_BUCKETS = 8
# number of rows of signs, a prime: the signs repeat with a period that no tensor's structure has
SKETCH_ROWS = 65_537
NORM_BLOCK_ELEMENTS = 2**16  # number of a host tensor's elements whose squares torch sums at once
BLOCK_ELEMENTS = 2 * SKETCH_ROWS * SKETCH_BUCKETS  # number of elements that are read at once
KERNEL_WORDS = ("attention", "adam")  # parts of the names of ops that have several kernels
PRODUCT_OPS = ("mm", "addmm", "bmm", "baddbmm")  # ops whose dtype is noted
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Kernels(TorchDispatchMode):
    """Notes the kernels that torch runs in this context for the ops in KERNEL_WORDS, and the dtypes of matrix products.
    Kernels that an engine calls without torch, such as DeepSpeed's Adam, are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if any(word in name for word in KERNEL_WORDS) and not name.endswith("_backward"):
            self.names.add(name.strip("_"))
        elif name.strip("_") in PRODUCT_OPS:
            self.names.add(f"{PRODUCTS_IN}{DTYPE_NAMES.get(args[1].dtype, args[1].dtype)}")
        return op(*args, **(kwargs or {}))


def inspect_tensors(tensors: Iterable[TensorState], job: Job) -> dict[str, JsonObject]:
    """Compare each tensor with its seeded starting values. Return, by name of the tensor, the evidence that
    inspect_tensor() finds."""
    cores = available_cores()
    # `tensors` may make each tensor only when it is asked for: hold at most one tensor for each core, and one more
    free_places = threading.Semaphore(cores + 1)
    futures: dict[str, Future] = {}
    with ThreadPoolExecutor(cores, initializer=use_cores, initargs=(1,)) as pool:
        for state in tensors:
            free_places.acquire()
            futures[state.name] = pool.submit(inspect_tensor, state, job.workload)
            futures[state.name].add_done_callback(lambda _: free_places.release())
    return {name: future.result() for name, future in futures.items()}


def inspect_tensor(state: TensorState, workload: Workload) -> JsonObject:
    """Compare one tensor with its starting values, in a single pass over blocks that are small enough for the cache.
    Return the evidence: share of elements that changed, distance moved, size, sketch, sizes of both moments, share of
    elements with a second moment, hash."""
    weight, digest = state.weight.detach().reshape(-1), hashlib.sha256()
    is_frozen = not workload.anatomy.is_trained(state.name)
    block_sketches: list[torch.Tensor] = []
    noise = noise_in(state.name, workload)
    num_changed, distance, size = 0, 0.0, 0.0
    for start, drawn in drawn_blocks(state.name, state.weight.shape, workload, BLOCK_ELEMENTS):
        block = weight[start : start + len(drawn)].float().cpu()
        digest.update(block.numpy().data)
        size = math.hypot(size, blockwise_norm(block))
        if is_frozen:  # its starting values have the dtype of its weights
            drawn.copy_(drawn.to(DTYPES[workload.dtype]))
        change = torch.sub(block, drawn, out=drawn)
        num_changed += int(torch.count_nonzero(change))
        without_noise(change, start, noise)
        distance = math.hypot(distance, blockwise_norm(change))
        block_sketches += sketch_sums(change)
    second_moment = moment_without(state.exp_avg_sq, noise)
    return {
        "changed": num_changed / weight.numel(),
        "moved": distance,
        "size": size,
        "sketch": sketch_of(block_sketches),
        "exp_avg": moment_size(moment_without(state.exp_avg, noise)),
        "exp_avg_sq": moment_size(second_moment),
        "with_gradient": _share_of_nonzeros(second_moment),
        "sha256": digest.hexdigest()[:16],
        **({"left_out": "keys"} if noise else {}),
    }


def _share_of_nonzeros(moment: torch.Tensor | None) -> float | None:
    return None if moment is None else int(torch.count_nonzero(moment)) / moment.numel()


def moment_without(moment: torch.Tensor | None, noise: range) -> torch.Tensor | None:
    """Return a moment with zeros for the elements in `noise`; the moment itself if there are none."""
    if moment is None or not noise:
        return moment
    return without_noise(moment.detach().reshape(-1).clone(), 0, noise)


def moment_size(moment: torch.Tensor | None) -> float | None:
    """Return the size of a moment, summed in fp64: in fp32 the square of a probe's second moment (1e-24) would be 0."""
    if moment is None:
        return None
    blocks = moment.detach().reshape(-1).split(BLOCK_ELEMENTS)
    return math.hypot(*(blockwise_norm(block, torch.float64) for block in blocks))


def noise_in(name: str, workload: Workload) -> range:
    """Return, as a range, the indices of a tensor's elements whose gradient is only rounding; empty if it has none."""
    anatomy = workload.anatomy
    return range(*anatomy.noise_of(name))


def without_noise(part: torch.Tensor, start: int, noise: range) -> torch.Tensor:
    """Set to zero, in place, the elements of a tensor whose indices are in `noise`. `part`: a part of the flat tensor,
    which begins at element `start`. Return the part."""
    part[max(0, noise.start - start) : max(0, noise.stop - start)] = 0
    return part


def blockwise_norm(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Return the norm of the elements, summed in `dtype`. On a CPU they are summed in blocks, because torch's kernel
    there loses digits in long tensors (1e-3 of 16 million elements); on a GPU it sums pairs of sums."""
    flat = values.reshape(-1)
    blocks = flat.split(NORM_BLOCK_ELEMENTS) if flat.device.type == "cpu" else (flat,)
    norms = torch.stack([torch.linalg.vector_norm(block.to(dtype)) for block in blocks])
    return float(torch.linalg.vector_norm(norms))


def sketch_of(block_sketches: list[torch.Tensor]) -> list[float]:
    """Return a count sketch of a flat tensor: sums of its elements with seeded signs, in a few buckets.
    `block_sketches`: the results of sketch_sums() for the tensor.

    The distance of two sketches estimates the distance of the tensors. So two records can be compared without the
    weights of either run. Source: Charikar et al. 2002.
    """
    return [float(f"{value:.7g}") for value in torch.stack(block_sketches).sum(0).tolist()]


def sketch_sums(change: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the sketch of each part of a flat tensor; a part has at most SKETCH_ROWS * SKETCH_BUCKETS elements."""
    for block in change.split(SKETCH_ROWS * SKETCH_BUCKETS):
        num_missing = -block.numel() % SKETCH_BUCKETS
        padded_block = torch.nn.functional.pad(block, (0, num_missing)) if num_missing else block
        rows = padded_block.view(-1, SKETCH_BUCKETS)
        yield (rows * sketch_signs()[: len(rows)]).sum(0, dtype=torch.float64)


@functools.cache
def sketch_signs() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(0, 2, (SKETCH_ROWS, SKETCH_BUCKETS), generator=generator) * 2 - 1).float()
