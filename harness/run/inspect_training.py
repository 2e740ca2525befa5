"""Evidence of a training, small enough for a record: its kernels, and what became of each tensor."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.core.gpt import initial
from harness.core.job import Job
from harness.core.method import TensorState

SKETCH_BUCKETS = 8
SKETCH_ROWS = 65_537  # signs repeat after a prime number of rows: no structure of a tensor has that period
WORKERS = 4  # each holds one tensor's change: a bound on the inspection's own memory
TELLING = ("attention", "adam")  # ops that have several kernels


class Kernels(TorchDispatchMode):
    """Kernels of the telling ops that torch dispatches while this is entered; not those of an engine's own library,
    such as DeepSpeed's Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        if any(word in name for word in TELLING) and not name.endswith("_backward"):
            self.names.add(name.strip("_"))
        return op(*args, **(kwargs or {}))


def inspect(tensors: Iterable[TensorState], job: Job) -> dict[str, dict[str, Any]]:
    """Each tensor against its seeded start: share of elements changed, distance moved, size of the first moment."""

    def look(state: TensorState) -> dict[str, Any]:
        weight = state.weight.detach().float().cpu().contiguous()
        start = initial(state.name, weight.shape, job.workload)
        change = torch.sub(weight, start, out=start)
        return {
            "changed": torch.count_nonzero(change).item() / change.numel(),
            "moved": torch.linalg.vector_norm(change).item(),
            "size": torch.linalg.vector_norm(weight).item(),
            "sketch": sketch(change.flatten()),
            "exp_avg": None if state.exp_avg is None else torch.linalg.vector_norm(state.exp_avg.float()).item(),
            "sha256": hashlib.sha256(weight.flatten().numpy().data).hexdigest()[:16],
        }

    found: dict[str, dict[str, Any]] = {}
    waiting = iter(tensors)  # some are made on demand: never more than WORKERS at once
    with ThreadPoolExecutor(WORKERS) as pool:
        while states := list(itertools.islice(waiting, WORKERS)):
            found |= zip([state.name for state in states], pool.map(look, states), strict=True)
    return found


def sketch(change: torch.Tensor) -> list[float]:
    """A count sketch of a flat tensor: sums of its elements with seeded signs, in a few buckets.

    The distance of two sketches estimates the distance of the tensors, so that two records can be compared without
    either run's weights. Source: Charikar et al. 2002.
    """
    rows = min(-(-change.numel() // SKETCH_BUCKETS), SKETCH_ROWS)
    signs = torch.randint(0, 2, (rows, SKETCH_BUCKETS), generator=torch.Generator().manual_seed(1)) * 2 - 1
    parts = []
    for block in change.split(SKETCH_ROWS * SKETCH_BUCKETS):
        padded = torch.nn.functional.pad(block, (0, -block.numel() % SKETCH_BUCKETS)).view(-1, SKETCH_BUCKETS)
        parts.append((padded * signs[: len(padded)]).sum(0, dtype=torch.float64))
    return [float(f"{value:.7g}") for value in torch.stack(parts).sum(0).tolist()]
