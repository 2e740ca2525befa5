"""Hydra for users' models: ModelTask describes one model's training; ModelOrchestrator trains several tasks together,
on one or more devices.

    tasks = [ModelTask("small", model, criterion, dataloader, lr=1e-3, epochs=2), ...]
    orchestrator = ModelOrchestrator(tasks, devices=["cpu", "cpu"])
    orchestrator.generate()
    report = orchestrator.train_models()

A model is an ordered list of layers: nn.Sequential, nn.ModuleList, or a module that holds all its parameters in one of
these. Each model gets the same trained weights as if it were trained alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.job import Budget, gib
from harness.devices import cuda_budget
from harness.devices.budgets import capped
from harness.devices.room import room_within
from harness.devices.streams import Device
from methods.sharding.device_process import LocalDevice, lock_slabs, start_processes
from methods.sharding.device_worker import Worker, WorkerOptions
from methods.sharding.dispatch import Dispatcher, TimelineUnit
from methods.sharding.partition import Sizes, longest_runs, run_sizes
from methods.sharding.rehearsal import foretold_bytes, foretold_elsewhere, rehearse
from methods.sharding.scheduler import policy_key
from methods.sharding.shard import Shard, cut_into_shards
from methods.sharding.task import FirstHalf, Task, TaskSettings
from methods.sharding.unit import INTERMEDIATES
from methods.sharding.user_model import (
    bring_home,
    named_layers,
    ordered_layers,
    refuse_other_than_chain,
    shard_sizes,
)
from methods.shared.module_watch import ModuleState, ModuleWatch

SECONDS_BETWEEN_LINES = 10.0  # seconds between two lines of progress


@dataclass(eq=False)
class ModelTask:
    """A model, its data, and how to train it. Raises ValueError if the model has no ordered list of layers, or if an
    argument is invalid."""

    name: str
    model: nn.Module
    criterion: Callable[..., Tensor]  # computes the loss from the last layer's output and the targets
    dataloader: Any  # must have a length, and yield pairs (inputs, targets)
    lr: float
    epochs: int = 1
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD  # called with parameters and lr
    max_norm: float = 0.0  # gradients are clipped to this norm; 0: no clipping
    # global: clip by the norm of all gradients; shard: clip each shard by its own norm
    clipping: str = "global"
    shards: Sequence[int] | None = None  # number of layers of each shard; None: as many as fit the device
    # learning rate of a step, counted from 1; None: always `lr`
    schedule: Callable[[int], float] | None = None
    seed: int = 0  # seed of the model's own random numbers, for dropout
    losses: list[float] = field(default_factory=list, init=False)
    # set by first_batch(): the first batch, and an iterator over the later ones
    started_loader: Any = field(default=None, init=False)
    failure: str = field(default="", init=False)  # the traceback that ended the task; "": it did not fail

    def __post_init__(self) -> None:
        if self.clipping not in ("global", "shard"):
            raise ValueError(f"{self.name}: clipping: expected global or shard, got {self.clipping!r}")
        if self.epochs < 1:
            raise ValueError(f"{self.name}: epochs: expected at least 1, got {self.epochs}")
        if not hasattr(self.dataloader, "__len__"):
            raise ValueError(
                f"{self.name}: expected a dataloader with a length, which scheduling needs, got none"
            )
        self.layers = ordered_layers(self.name, self.model)
        if self.shards is not None and (sum(self.shards) != len(self.layers) or min(self.shards) < 1):
            raise ValueError(
                f"{self.name}: expected shards that sum to {len(self.layers)} layers, got {list(self.shards)}"
            )

    def first_batch(self) -> Sequence[Any]:
        """Return the first batch; batches() will still yield it. Raises ValueError if the dataloader is empty."""
        if self.started_loader is None:
            later_batches = iter(self.dataloader)
            self.started_loader = next(later_batches, None), later_batches
        if self.started_loader[0] is None:
            raise ValueError(f"{self.name}: expected batches from the dataloader, got none")
        if not isinstance(self.started_loader[0], tuple | list) or len(self.started_loader[0]) != 2:
            raise ValueError(
                f"{self.name}: expected batches that are pairs of inputs and targets, got a"
                f" {type(self.started_loader[0]).__name__}; try (batch, batch[...])"
            )
        return self.started_loader[0]

    def batches(self) -> Iterator[tuple[Any, Any]]:
        for _ in range(self.epochs):
            (*first_batches, later_batches) = self.started_loader or (iter(self.dataloader),)
            self.started_loader = None
            yield from itertools.chain(first_batches, later_batches)

    @property
    def settings(self) -> list[Any]:
        """Return what the task was given, by which a change is seen."""
        return [getattr(self, argument.name) for argument in fields(self) if argument.init]

    @property
    def num_batches(self) -> int:
        return self.epochs * len(self.dataloader)

    @property
    def update(self) -> str:
        """How shards are updated: later, now or clipped, as class Unit says."""
        if not self.max_norm:
            return "now"
        return "later" if self.clipping == "global" else "clipped"


def _names_itself(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ModelTask.__init__ so that the name may be left out, as in the documentation of the original Hydra:
    ModelTask(model, criterion, dataloader, lr, epochs). Such a task is called "model 0", "model 1" and so on.
    """
    numbers = itertools.count()

    @functools.wraps(init)
    def with_name(self: ModelTask, *args: Any, **settings: Any) -> None:
        if args and isinstance(args[0], nn.Module):
            args = (f"model {next(numbers)}", *args)
        if "partitioner" in settings:
            raise ValueError(
                "partitioner: expected shards=[2, 4], the number of layers of each shard, got a partitioner"
            )
        init(self, *args, **settings)

    return with_name


ModelTask.__init__ = _names_itself(ModelTask.__init__)  # type: ignore[method-assign]


@dataclass
class Report:
    """The report on a training of several models. `summary`: the figures of Dispatcher.summary(): makespans in
    seconds, their ratio, and the devices' utilization. `timeline`: all units that ran."""

    summary: dict[str, float]
    timeline: list[TimelineUnit]
    failures: dict[str, str]  # the traceback of each task that failed, by the task's name


class ModelOrchestrator:
    """Trains tasks together.

    `devices`: torch's names, such as cuda:0. A device that is named twice gets two processes. None: all GPUs, or the
    CPU if there are none.
    `device_memory`: bytes that training may take on each device, on a GPU with the context and the allocator's reserve
    (harness/devices/cuda_budget.py); None: shards are cut no larger than the largest layer.
    `policy`: which waiting model a free device takes: the one with the longest remaining time (`lrtf`), with the
    shortest (`srtf`), the one that waits longest (`fifo`), or a random one (`random`).
    `double_buffer`: True: each device has a second slot, into which the next shard is prefetched.
    `intermediates`: `checkpointed`: recompute each layer in the backward pass; `saved`: keep its tensors on the host.
    `hybrid`: True: if there are more devices than models, split the longest model's batches over two devices. The
    result is bit-equal to training on two micro-batches with half the criterion of each, so the criterion must be a
    mean over the samples.
    `verbose`, an attribute: 0: print no progress.
    """

    def __init__(
        self,
        tasks: Sequence[ModelTask],
        devices: Sequence[str] | None = None,
        *,
        device_memory: int | None = None,
        policy: str = "lrtf",
        double_buffer: bool = True,
        intermediates: str = "checkpointed",
        hybrid: bool = False,
    ) -> None:
        if not tasks:
            raise ValueError("no tasks: give the orchestrator at least one ModelTask")
        if devices is None:
            devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
        if not devices:
            raise ValueError("no devices: name at least one, such as cpu or cuda:0")
        if intermediates not in INTERMEDIATES:
            raise ValueError(f"intermediates: expected {' or '.join(INTERMEDIATES)}, got {intermediates!r}")
        policy_key(policy)
        self.verbose = 1
        self.tasks, self.devices, self.policy, self.hybrid = list(tasks), list(devices), policy, hybrid
        self.device_memory, self.num_slots = device_memory, 1 + double_buffer
        self.models: list[list[Shard]] = []
        # the models' states at the end of generate()
        self.watches: list[tuple[ModuleWatch, ModuleState]] = []
        self.options = WorkerOptions(double_buffer, intermediates)
        self._read_settings()

    def _read_settings(self) -> None:
        """Read the tasks, which a script may still change before the training."""
        self.settings = [task.settings for task in self.tasks]
        max_norms = [task.max_norm for task in self.tasks]
        self.options = dataclasses.replace(self.options, max_norms=max_norms)
        keeps_graphs = self.options.intermediates == "saved"
        self.trainings = [
            TaskSettings(task.max_norm, task.update, keeps_graphs=keeps_graphs) for task in self.tasks
        ]
        for task in self.tasks:
            task.layers = ordered_layers(task.name, task.model)

    @property
    def buffer(self) -> None:
        """An attribute of the original Hydra: memory for a second shard, which users set by trial. This attribute has
        no effect here."""
        return None

    @buffer.setter
    def buffer(self, size: int | None) -> None:
        if size is not None:
            print(
                f"buffer={size} is not used: shards are cut so that two of them fit device_memory; give that instead",
                file=sys.stderr,
            )

    @property
    def CACHE_SYSTEM(self) -> bool:
        """True if there is a double buffer. The original Hydra documents this flag; setting it has no effect here."""
        return self.options.double_buffer

    @CACHE_SYSTEM.setter
    def CACHE_SYSTEM(self, is_on: bool) -> None:
        instead = f"ModelOrchestrator(tasks, double_buffer={bool(is_on)})"
        print(f"CACHE_SYSTEM={is_on} is not used: {instead} replaces it", file=sys.stderr)

    def generate(self) -> list[dict[str, Any]]:
        """Cut every model into shards and move the shards' weights to slabs on the host. Return, for each model, its
        name, the number of layers of each shard, and its bytes on the host.

        Raises ValueError if a layer does not fit the device (the error names the layer and, if known, the smallest
        feasible memory), or if torch does not see a GPU that `devices` names.
        """
        for name in self.devices:
            kind, index = name.partition(":")[::2]
            if kind == "cuda" and int(index or 0) >= (num_visible := torch.cuda.device_count()):
                raise ValueError(
                    f"devices: expected one of the {num_visible} GPUs that torch sees, got {name}; try cpu"
                )
        self._read_settings()
        self.models = self._cut(self._lengths())
        rows = []
        self.halved_model = self._longest_model()
        for number, (task, shards) in enumerate(zip(self.tasks, self.models, strict=True)):
            bring_home(task, shards, in_halves=number == self.halved_model)
            host_bytes = sum(slab.nbytes for shard in shards for slab in shard.slabs.values())
            lengths = [len(shard.layers) for shard in shards]
            rows.append({"name": task.name, "shards": lengths, "host_bytes": host_bytes})
        watches = [ModuleWatch(task.model, 0, with_hooks=True) for task in self.tasks]
        self.watches = [(watch, watch.state()) for watch in watches]
        return rows

    def _longest_model(self) -> int | None:
        """Return the index of the model whose batches are halved: the model that trains longest, judged by its bytes of
        weights times its number of batches. Return None without `hybrid`, if there are not more devices than models, or
        if every model clips shard by shard."""
        if not self.hybrid or len(self.tasks) >= len(self.devices):
            return None
        splittable = [number for number, task in enumerate(self.tasks) if task.update != "clipped"]
        model_bytes = [sum(shard.num_bytes("weights") for shard in shards) for shards in self.models]

        def work(number: int) -> int:
            return model_bytes[number] * self.tasks[number].num_batches

        return max(splittable, key=work, default=None)

    def _cut(self, lengths: Sequence[Sequence[int]]) -> list[list[Shard]]:
        """Return each model's shards. `lengths`: for each model, the number of layers of each shard."""
        models = []
        for task, model_lengths in zip(self.tasks, lengths, strict=True):
            make_optimizer = functools.partial(task.optimizer, lr=task.lr)
            models.append(cut_into_shards(named_layers(task), model_lengths, make_optimizer, is_mixed=False))
        return models

    def _lengths(self) -> list[list[int]]:
        """Return, for each model, the number of layers of each shard.

        A task may give these numbers. If it does not, its shards are as long as possible while the predicted memory
        peak fits the device. One limit of bytes holds for the shards of all models.
        """
        single_layers = self._cut([[1] * len(task.layers) for task in self.tasks])
        layer_sizes = [[shard_sizes(shard) for shard in shards] for shards in single_layers]
        if self.device_memory is None:
            rooms = [max(sum(sizes.values()) for sizes in layers) for layers in layer_sizes]
            return self._lengths_within(layer_sizes, rooms)
        names = [f"{task.name}: layer {index}" for task in self.tasks for index in range(len(task.layers))]
        layer_bytes = [sum(sizes.values()) for layers in layer_sizes for sizes in layers]
        least_bytes, largest_layer = max(zip(layer_bytes, names, strict=True))
        memory = room_within(Budget(self.device_memory), "cuda" if self._on_gpu else "cpu").device_bytes
        assert memory is not None

        def lengths_in_room(room_bytes: int) -> list[list[int]]:
            return self._lengths_within(layer_sizes, [room_bytes] * len(self.tasks))

        peak_bytes = self._foretold_bytes(lengths_in_room(least_bytes))
        needs = f"{largest_layer} needs {gib(least_bytes)} ({least_bytes} bytes) by itself"
        if peak_bytes is None:  # unknown: the model's code does not run on tensors without memory
            room_bytes = memory // self.num_slots
            if least_bytes <= room_bytes:
                return lengths_in_room(room_bytes)
            raise ValueError(f"{needs}, got room for {gib(room_bytes)} in each of {self.num_slots} slots")
        if peak_bytes > memory:
            raise ValueError(
                f"{needs} in each of {self.num_slots} slots: {self._smallest_memory(peak_bytes)}"
            )
        rooms = sorted({least_bytes}.union(*map(run_sizes, layer_sizes)))
        rooms = rooms[rooms.index(least_bytes) :]

        def exceeds_memory(room_bytes: int) -> bool:
            return (self._foretold_bytes(lengths_in_room(room_bytes)) or memory + 1) > memory

        return lengths_in_room(rooms[bisect_right(rooms, False, lo=1, key=exceeds_memory) - 1])

    def _lengths_within(self, layer_sizes: list[list[Sizes]], rooms: Sequence[int]) -> list[list[int]]:
        """Return each model's numbers of layers. `layer_sizes`: for each model, the sizes of its layers. `rooms`: for
        each model, the most bytes of a shard."""
        lengths = []
        for task, sizes, room_bytes in zip(self.tasks, layer_sizes, rooms, strict=True):
            lengths.append(list(task.shards) if task.shards else longest_runs(sizes, room_bytes))
        return lengths

    def _smallest_memory(self, peak_bytes: int) -> str:
        """Describe the smallest device_memory in which training peaks at `peak_bytes`, for an error."""
        smallest = peak_bytes
        if self._on_gpu:
            smallest = cuda_budget.budget_bytes(peak_bytes, cuda_budget.context_bytes())
        return (
            "with the tensors of a unit's computation, the smallest feasible device_memory is"
            f" {smallest} bytes ({gib(smallest)}), not {self.device_memory}"
        )

    @property
    def _on_gpu(self) -> bool:
        return any(name.startswith("cuda") for name in self.devices)

    def _foretold_bytes(self, lengths: list[list[int]]) -> int | None:
        models, batches = self._cut(lengths), [task.first_batch() for task in self.tasks]
        if self._on_gpu:
            return foretold_elsewhere(models, batches, self.trainings, self.options)
        return foretold_bytes(models, batches, self.trainings, self.options)

    def train_models(self) -> Report:
        """Train every model to its end. A model gets the same weights and losses as if it were trained alone. A failure
        ends only the model that failed.

        If `device_memory` is given and a device is no CPU, the training is rehearsed first, and shards that do not fit
        are halved. Raises torch.OutOfMemoryError if a shard of a single layer does not fit, and ValueError if a model's
        forward pass is not the chain of its layers.
        """
        if not self.models or self._are_changed():
            self.generate()
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ValueError(
                "expected train_models() outside of autocast, got it within; try autocast in the layers"
            )
        for task in self.tasks:
            refuse_other_than_chain(task.name, task.model, task.first_batch()[0])
        with ExitStack() as stack:
            if len(self.devices) == 1:
                device = stack.enter_context(Device(self.devices[0]))
                stack.enter_context(capped(device.name, self.device_memory))
                lock_slabs(device, self.models)
                devices: list[Any] = [LocalDevice(Worker(device, self.models, self.options))]
            else:
                options = dataclasses.replace(self.options, device_memory=self.device_memory)
                devices = start_processes(self.devices, self.models, options, stack)
            splits: list[tuple[int, int]] = []
            if self.device_memory is not None and any(not name.startswith("cpu") for name in self.devices):
                batches = [task.first_batch() for task in self.tasks]
                devices, splits = rehearse(self.models, batches, self.trainings, devices)
            chain_tasks = list(map(self._chain, range(len(self.tasks))))
            dispatcher = Dispatcher(chain_tasks, devices, self.policy, splits=splits)
            print_progress = _Progress(self.tasks)
            for chain, step in dispatcher.run():
                self.tasks[chain.model].losses.append(step.loss.item())
                if self.verbose:
                    print_progress(self.tasks[chain.model])
        return Report(dispatcher.summary(), dispatcher.timeline, self._failures(chain_tasks))

    def _failures(self, chain_tasks: Sequence[Task]) -> dict[str, str]:
        """Return the traceback of each model that failed, by name, and print its last line."""
        for task, chain in zip(self.tasks, chain_tasks, strict=True):
            task.failure = chain.failure
            if task.failure:
                print(f"{task.name} ended early: {task.failure.strip().splitlines()[-1]}", file=sys.stderr)
        return {task.name: task.failure for task in self.tasks if task.failure}

    def _are_changed(self) -> bool:
        """Return whether a script has changed a model or a task since generate(), which copied them."""
        return self.settings != [task.settings for task in self.tasks] or any(
            watch.change(before) for watch, before in self.watches
        )

    def _chain(self, number: int) -> Task:
        """Return the Task that makes the units of model `number`."""
        task, shards = self.tasks[number], self.models[number]
        names = [name for shard in shards for name in shard.trained_names]
        settings = dataclasses.replace(
            self.trainings[number],
            learning_rate_at=task.schedule,
            random_state=self._random(task.seed),
            num_batches=task.num_batches,
        )
        arguments = (number, shards, names, task.batches())
        if number == self.halved_model:
            return FirstHalf(*arguments, second_random=self._random(task.seed + 1), settings=settings)
        return Task(*arguments, settings=settings)

    def _random(self, seed: int) -> Any:
        """Return the random state that `seed` gives: the CPU's state and the GPU's state (None if there are no GPUs).

        The GPU's state is composed here byte by byte, of the seed and an offset of 0. torch's own generator would make
        a CUDA context for this process, whose memory another process needs.
        """
        gpu_state = None
        if self._on_gpu:
            gpu_state = torch.frombuffer(
                bytearray((seed % 2**64).to_bytes(8, "little") + bytes(8)), dtype=torch.uint8
            )
        return torch.Generator().manual_seed(seed).get_state(), gpu_state


class _Progress:
    """Prints a line of progress every SECONDS_BETWEEN_LINES, and one at the end: the number of steps of all models, and
    the loss of the model that took the last step."""

    def __init__(self, tasks: Sequence[ModelTask]) -> None:
        self.tasks, self.last_line = tasks, time.monotonic()

    def __call__(self, last_task: ModelTask) -> None:
        num_steps = sum(len(task.losses) for task in self.tasks)
        num_batches = sum(task.num_batches for task in self.tasks)
        if num_steps == num_batches or time.monotonic() > self.last_line + SECONDS_BETWEEN_LINES:
            self.last_line = time.monotonic()
            losses = last_task.losses
            last_step = f"{last_task.name} {len(losses)} of {last_task.num_batches}, loss {losses[-1]:.4g}"
            print(
                f"{num_steps} of {num_batches} steps of {len(self.tasks)} models; {last_step}",
                file=sys.stderr,
                flush=True,
            )
