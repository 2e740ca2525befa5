"""What the tests of engines do in a process of its own: an engine has one start in a process, and patches torch."""

from __future__ import annotations

import collections
import queue
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from harness.core.job import Room, Workload
from harness.models import gpt
from methods.engines import deepspeed, deepspeed_config
from methods.engines.deepspeed_method import DeepSpeedMethod
from methods.superoffload import SuperOffload
from tests.support.training import TrainingResult, train


def distances(name: str, workload: Workload) -> tuple[dict[str, float], list[str]]:
    """How far each tensor ends from resident's after five steps, relative to how far that moved; the modules."""
    sys.modules.pop("torch.distributed.fsdp", None)  # transformers, with which a fork begins, has imported it
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


def differences(name: str, workloads: dict[str, Workload]) -> dict[str, float]:
    """How far the losses and gradient norms of five steps are from resident's at most, relative, for each of the
    workloads."""
    found = {}
    for of, load in workloads.items():
        ours, theirs = (train(each, load, 5) for each in (name, "resident"))
        pairs = zip(ours.losses + ours.grad_norms, theirs.losses + theirs.grad_norms, strict=True)
        found[of] = max(abs(one / other - 1) for one, other in pairs)
    return found


def drawn(name: str, workload: Workload) -> tuple[dict[str, int], int]:
    """How often each tensor's values are drawn by the first step, and by how many threads. The first thread waits for
    another one: alone it may have drawn all tensors before a second one starts."""
    counts, threads, drawing = collections.Counter[str](), set[int](), gpt._drawing
    has_several = threading.Event()

    def counted(name: str, *arguments):
        is_first, counts[name] = not counts, counts[name] + 1
        threads.add(threading.get_ident())
        if len(threads) > 1:
            has_several.set()
        if is_first:
            has_several.wait()
        return drawing(name, *arguments)

    with mock.patch.multiple(gpt, _drawing=counted, available_cores=lambda: 2):
        # on one core, one thread draws all
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


class SuperOffloadRun(NamedTuple):
    """Five steps of SuperOffload beside resident's."""

    losses: list[list[float]]  # its own, resident's
    apart: list[float]  # how far each weight and moment ends from resident's, relative to that
    numels: list[list[int]]  # of its sub-groups, as they are and as they are planned
    device_bytes: list[int]  # of the state that stays on the device, as it is and as it is planned


def superoffload_beside_resident(workload: Workload) -> SuperOffloadRun:
    ours, numels, device_bytes = _superoffload(workload)
    theirs = train("resident", workload, 5)
    known = {state.name: state[1:] for state in theirs.trained.tensors}
    norm = torch.linalg.vector_norm
    apart = [
        (norm(mine - value) / norm(value)).item()
        for state in ours.trained.tensors
        for mine, value in zip(state[1:], known[state.name], strict=True)
    ]
    return SuperOffloadRun([ours.losses, theirs.losses], apart, numels, device_bytes)


def superoffloads_locked_numels() -> list[int]:
    """Elements of each tensor whose pages SuperOffload's optimizer process locks, if it is told to."""
    deepspeed.import_deepspeed("cpu")
    from deepspeed.accelerator import get_accelerator

    locked: list[int] = []

    def lock(self: object, numel: int, **words: object) -> torch.Tensor:
        locked.append(numel)
        return torch.empty(numel)

    tasks, results = queue.SimpleQueue[None](), queue.SimpleQueue[object]()
    for _ in range(2):  # it ends, and its answer is read
        tasks.put(None)
    group = {"lr": 0.5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    with mock.patch.object(type(get_accelerator()), "pin_empty", lock):
        deepspeed.superoffload_worker(tasks, results, [group], 16, True)
    return locked


def _superoffload(workload: Workload) -> tuple[TrainingResult, list[list[int]], list[int]]:
    """Train by the real one, where "cpu:0", whose memory is the host's, stands for the GPU. It has more than ten
    sub-groups, so it updates the first there."""
    deepspeed.import_deepspeed("cpu")
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.superoffload import superoffload_stage3

    deepspeed.use_built_kernel_in_superoffload()
    accelerator, stream = get_accelerator(), SimpleNamespace(synchronize=lambda: None)
    optimizers: list[Any] = []

    class SeenOptimizer(superoffload_stage3.SuperOffloadOptimizer_Stage3):
        def __init__(self, *arguments: Any, **words: Any) -> None:
            super().__init__(*arguments, **words)
            optimizers.append(self)

    with (
        mock.patch.object(superoffload_stage3, "_validate_superoffload_accelerator", lambda: None),
        mock.patch.object(superoffload_stage3, "SuperOffloadOptimizer_Stage3", SeenOptimizer),
        mock.patch.object(type(accelerator), "current_stream", lambda self: stream),
        mock.patch.object(accelerator, "_name", "cpu:0"),
        mock.patch.object(deepspeed_config, "SUB_GROUP_PARAMS", workload.hidden_size**2),
        mock.patch.object(SuperOffload, "train", DeepSpeedMethod.train),
    ):
        trained = train("superoffload", workload, 5)
        numels = [[flat.numel() for flat in optimizers[0].fp32_partitioned_groups_flat]]
        numels.append(deepspeed_config.sub_group_numels(workload))
        kept = sum(
            numels[0][number] for number, name in optimizers[0].subgroup_to_device.items() if name != "cpu"
        )
        return trained, numels, [16 * kept, SuperOffload().plan(workload, Room()).device["optimizer"]]
