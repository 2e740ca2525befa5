"""Rehearses training: two minibatches, whose updates are dropped, show whether the training fits the device.

Two minibatches are needed because the optimizer makes its states in the first minibatch and has them from the start in
the second. Shards that run out of memory are halved for good, and the rehearsal is repeated. On tensors without memory
the same rehearsal predicts the peak in bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from harness.devices.memory_rehearsal import without_memory
from harness.devices.streams import Device
from methods.sharding.device_process import CallProcess, LocalDevice
from methods.sharding.device_worker import Worker, WorkerOptions
from methods.sharding.dispatch import Dispatcher
from methods.sharding.shard import Shard, allocate_slabs
from methods.sharding.task import Task, TaskSettings
from methods.sharding.unit import map_tensors

NUM_MINIBATCHES = 2


def rehearse(
    models: Sequence[list[Shard]],
    batches: Sequence[Any],
    settings: Sequence[TaskSettings],
    devices: list[Any],
) -> tuple[list[Any], list[tuple[int, int]]]:
    """Rehearse the training of all models, and halve shards until every shard fits. `batches`: one batch for each
    model.

    Return the devices whose processes still live, and the halved shards as pairs of model and index. Raises
    torch.OutOfMemoryError if shards of one layer do not fit. Any other failure is left for the training to report.
    """
    splits: list[tuple[int, int]] = []
    while True:
        dispatcher = Dispatcher(_tasks(models, batches, settings), devices, splits=splits)
        for _ in dispatcher.run():
            pass
        failed_tasks = [task for task in dispatcher.tasks if task.lacks_memory]
        if not failed_tasks:
            return dispatcher.devices, dispatcher.splits
        if not dispatcher.halve_all():
            raise torch.OutOfMemoryError(
                f"with shards of one layer: {failed_tasks[0].failure.strip().splitlines()[-1]}"
            )
        devices, splits = dispatcher.devices, dispatcher.splits


def _tasks(
    models: Sequence[list[Shard]], batches: Sequence[Any], settings: Sequence[TaskSettings]
) -> list[Task]:
    """Return a task for each model. The task trains on the model's batch NUM_MINIBATCHES times and copies nothing to
    the host."""
    tasks = []
    for number, (shards, batch, training) in enumerate(zip(models, batches, settings, strict=True)):
        rehearsal = dataclasses.replace(training, num_batches=NUM_MINIBATCHES, rehearses=True)
        tasks.append(Task(number, shards, [], [batch] * NUM_MINIBATCHES, settings=rehearsal))
    return tasks


def foretold_bytes(
    models: list[list[Shard]],
    batches: Sequence[Any],
    settings: Sequence[TaskSettings],
    options: WorkerOptions,
) -> int | None:
    """Return the predicted peak of memory, in bytes, of one device that trains these models in turns. Return None if
    the models' code does not run on tensors without memory."""
    try:
        with without_memory() as tracker, Device("sim") as device:
            all_shards = [shard for shards in models for shard in shards]
            allocate_slabs(all_shards, lambda size: torch.zeros(size, dtype=torch.uint8))
            for layer in (layer for shard in all_shards for layer in shard.layers):
                for module in layer.modules():
                    for name, buffer in module.named_buffers(recurse=False):
                        setattr(module, name, _without_memory(buffer))
            worker = Worker(device, models, dataclasses.replace(options, keeps_random=False))
            batches_without_memory = [map_tensors(_without_memory, batch) for batch in batches]
            dispatcher = Dispatcher(_tasks(models, batches_without_memory, settings), [LocalDevice(worker)])
            for _ in dispatcher.run():
                pass
            return None if any(task.failure for task in dispatcher.tasks) else tracker.stats()["device_peak"]
    except Exception:  # A user's code may raise anything where it reads values of a tensor that has none.
        return None


def foretold_elsewhere(
    models: list[list[Shard]],
    batches: Sequence[Any],
    settings: Sequence[TaskSettings],
    options: WorkerOptions,
) -> int | None:
    """Return foretold_bytes() from a process of its own. A process that foretells gives torch a device called sim, and
    can then use no GPU. Return None, too, if that process does not find the classes of the models."""
    batches_without_memory = [map_tensors(lambda tensor: tensor.to("meta"), batch) for batch in batches]
    with suppress(EOFError, TypeError):
        process = CallProcess(__name__, _foretell, models, batches_without_memory, settings, options)
        try:
            return int(process.connection.recv())
        finally:
            process.close()
    return None


def _foretell(
    connection: Connection,
    models: Any,
    batches: Any,
    settings: Sequence[TaskSettings],
    options: WorkerOptions,
) -> None:
    connection.send(foretold_bytes(models, batches, settings, options))


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
