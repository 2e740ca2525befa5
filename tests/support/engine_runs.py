"""What the tests of engines do in a process of its own: an engine has one start in a process, and patches torch."""

from __future__ import annotations

import collections
import sys
import threading
import weakref

import torch
import torch.distributed as dist

from harness.core import gpt
from harness.core.job import Workload
from tests.support.training import train


def distances(name: str, workload: Workload) -> tuple[dict[str, float], list[str]]:
    """How far each tensor ends from resident's after five steps, relative to how far that moved; the modules."""
    theirs, ours = (
        {state.name: state.weight.clone() for state in train(each, workload, 5).trained.tensors}
        for each in ("resident", name)
    )
    norm = torch.linalg.vector_norm
    found = {
        name: (norm(ours[name] - weight) / norm(weight - gpt.initial(name, weight.shape, workload))).item()
        for name, weight in theirs.items()
    }
    return found, sorted(sys.modules)


def loss_differences(name: str, workloads: dict[str, Workload]) -> dict[str, float]:
    """How far the losses of five steps are from resident's at most, relative, for each of the workloads."""
    return {
        of: max(
            abs(ours / theirs - 1)
            for ours, theirs in zip(*(train(each, load, 5).losses for each in (name, "resident")), strict=True)
        )
        for of, load in workloads.items()
    }


def drawn(name: str, workload: Workload) -> tuple[dict[str, int], int]:
    """How often each tensor's values are drawn by the first step, and by how many threads."""
    counts, threads, drawing = collections.Counter[str](), set[int](), gpt._drawing

    def counted(name: str, *arguments):
        counts[name] += 1
        threads.add(threading.get_ident())
        return drawing(name, *arguments)

    gpt._drawing = counted
    train(name, workload, 1)
    return dict(counts), len(threads)


def read_one_by_one(name: str, workload: Workload) -> list[object]:
    """Of the trained tensors, read in turn: if the first is still held while the second is read, if the engine is open
    then, how many are left, and if it is open in the end."""
    tensors = iter(train(name, workload, 1).trained.tensors)
    gone = weakref.ref(next(tensors).weight)
    next(tensors)
    held, is_open = gone() is not None, dist.is_initialized()
    return [held, is_open, sum(1 for _ in tensors), dist.is_initialized()]
