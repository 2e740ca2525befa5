"""Rehearse training for two minibatches, leaving nothing behind, to see that it fits the device.

In the second minibatch the optimizer has its states from the start. Shards that run out of memory are halved for good,
and the rehearsal is repeated. On tensors without memory the same rehearsal predicts the peak. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.devices.memory_rehearsal import without_memory
from harness.devices.streams import Device
from methods.sharding.device_process import Here
from methods.sharding.device_worker import Worker
from methods.sharding.dispatch import Dispatcher
from methods.sharding.shard import Shard
from methods.sharding.task import Task

NUM_MINIBATCHES = 2


def rehearse(make_tasks: Callable[[], list[Task]], devices: Sequence[Any], splits: list[tuple[int, int]]) -> list[Any]:
    """Run rehearsing tasks, halving shards, until all fit; returns the devices that still live.

    Raises torch.OutOfMemoryError if shards of one layer do not fit. Any other failure is left for training to report.
    """
    while True:
        tasks = make_tasks()
        dispatcher = Dispatcher(tasks, devices, splits=splits)
        for _ in dispatcher.run():
            pass
        lacking = [task for task in tasks if task.lacks_memory]
        if not lacking:
            return dispatcher.devices
        if not dispatcher.halve_all():
            raise torch.OutOfMemoryError(f"with shards of one layer: {lacking[0].failure.strip().splitlines()[-1]}")
        devices = dispatcher.devices


def rehearsing(number: int, shards: list[Shard], batch: tuple[Any, Any], **words: Any) -> Task:
    """A task that trains on one batch and sends nothing home."""
    return Task(number, shards, [], [batch] * NUM_MINIBATCHES, NUM_MINIBATCHES, rehearses=True, **words)


def foretold_bytes(
    make_models: Callable[[], list[list[Shard]]],
    batches: Sequence[tuple[Any, Any]],
    words: Sequence[dict[str, Any]],
    **options: Any,
) -> int | None:
    """Peak bytes of a device that trains these models by turns; None if their code does not run without memory.

    `make_models` cuts them anew; `words`: arguments of each model's task; `options`: arguments of the worker.
    """  # fmt: skip
    models = make_models()
    try:
        with without_memory() as tracker, Device("sim") as device:
            for shard in (shard for shards in models for shard in shards):
                shard.settle(lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
            for module in (each for shards in models for shard in shards for each in shard.layers):
                _forget_buffers(module)
            worker = Worker(device, models, keeps_random=False, **options)
            tasks = [
                rehearsing(number, shards, (_without_memory(batch[0]), _without_memory(batch[1])), **given)
                for number, (shards, batch, given) in enumerate(zip(models, batches, words, strict=True))
            ]
            for _ in Dispatcher(tasks, [Here(worker)]).run():
                pass
            return tracker.stats()["device_peak"]
    except Exception:  # users' code may read numbers that are not there
        return None


def _forget_buffers(module: nn.Module) -> None:
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            setattr(each, name, torch.zeros(buffer.shape, dtype=buffer.dtype))


def _without_memory(value: Any) -> Any:
    return torch.zeros(value.shape, dtype=value.dtype) if isinstance(value, Tensor) else value
