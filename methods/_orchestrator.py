"""Hydra for models of one's own: tasks, and the orchestrator that trains them together on one device or several.

    tasks = [ModelTask("small", model, criterion, dataloader, lr=1e-3, epochs=2), ...]
    orchestrator = ModelOrchestrator(tasks, devices=["cpu", "cpu"])
    orchestrator.generate()
    report = orchestrator.train_models()

A model is an ordered list of layers: nn.Sequential, or a module that holds all its parameters in such a list named
`layers`. Afterwards it is trained, as if it had been alone.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.spec import gib
from methods._device import Device
from methods._dispatch import Dispatcher, Elsewhere, Here, Turned
from methods._partition import longest_runs
from methods._scheduler import key_of
from methods._shards import ALIGNMENT, NamedLayer, Shard, cut
from methods._turns import Task
from methods._units import INTERMEDIATES
from methods._worker import Worker


class WithLoss(nn.Module):
    """The last layer and the criterion: its inputs and the targets to the loss."""

    def __init__(self, layer: nn.Module, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.criterion = layer, criterion

    def forward(self, *x: Any) -> Tensor:
        return self.criterion(self.layer(*x[:-1]), x[-1])


@dataclass(eq=False)
class ModelTask:
    """A model, its data, and how it is to be trained.

    Raises ValueError, one line, for a model without ordered layers or words that make no sense.
    """

    name: str
    model: nn.Module
    criterion: Callable[..., Tensor]  # of the last layer's output and the targets
    dataloader: Any  # has a length, gives (inputs, targets)
    lr: float
    epochs: int = 1
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD  # of parameters and lr
    max_norm: float = 0.0  # gradients are clipped to this norm; 0: they are not
    clipping: str = "global"  # exact, by updates of their own; or "shard": each shard's by its own norm
    shards: Sequence[int] | None = None  # presharded: numbers of layers; None: as long as fits the device
    schedule: Callable[[int], float] | None = None  # learning rate of a step, counted from 1
    seed: int = 0  # of the model's own stream of random numbers, for dropout
    losses: list[float] = field(default_factory=list, init=False)
    failure: str = field(default="", init=False)  # the traceback that ended it

    def __post_init__(self) -> None:
        if self.clipping not in ("global", "shard"):
            raise ValueError(f"{self.name}: clipping is global or shard, not {self.clipping!r}")
        if self.epochs < 1:
            raise ValueError(f"{self.name}: epochs must be at least 1, not {self.epochs}")
        if not hasattr(self.dataloader, "__len__"):
            raise ValueError(f"{self.name}: its dataloader has no length, by which the longest model is known")
        self.layers = ordered_layers(self.name, self.model)
        if self.shards is not None and (sum(self.shards) != len(self.layers) or min(self.shards) < 1):
            raise ValueError(f"{self.name}: shards {list(self.shards)} are not the {len(self.layers)} layers it has")

    def batches(self) -> Iterator[tuple[Any, Any]]:
        for _ in range(self.epochs):
            yield from self.dataloader

    @property
    def update(self) -> str:
        return "now" if not self.max_norm else "later" if self.clipping == "global" else "clipped"


def ordered_layers(name: str, model: nn.Module) -> list[nn.Module]:
    """The layers in their order. Raises ValueError where the model has none, or one that cannot be recomputed."""
    found = model if isinstance(model, nn.Sequential) else getattr(model, "layers", None)
    inside = {id(parameter) for layer in found or () for parameter in layer.parameters()}
    if not isinstance(found, nn.Sequential | nn.ModuleList) or not len(found):
        raise ValueError(f"{name}: {type(model).__name__} has no ordered layers: nn.Sequential is, or a list `layers`")
    if any(id(parameter) not in inside for parameter in model.parameters()):
        raise ValueError(f"{name}: {type(model).__name__} has parameters outside of its list of layers")
    for index, layer in enumerate(found):
        for module in layer.modules():
            if getattr(module, "track_running_stats", False):
                raise ValueError(
                    f"{name}: layer {index} ({type(module).__name__}) keeps running statistics, which a recompute"
                    " would count twice: use track_running_stats=False, or another norm"
                )
    return list(found)


@dataclass
class Report:
    """What a training of several models was: seconds, their ratio to the bound, each unit as it ran."""

    summary: dict[str, float]
    timeline: list[Turned]
    failures: dict[str, str]  # by task's name the traceback that ended it


class ModelOrchestrator:
    """Trains tasks together. `devices`: names as torch has them; the same one twice is two of its processes.
    `device_memory`: bytes that a shard's two slots may take; None is whatever the largest layer needs."""

    def __init__(
        self, tasks: Sequence[ModelTask], devices: Sequence[str] = ("cpu",), *, device_memory: int | None = None,
        policy: str = "lrtf", double_buffer: bool = True, intermediates: str = "checkpointed",
    ) -> None:  # fmt: skip
        if not tasks:
            raise ValueError("no tasks: give the orchestrator at least one ModelTask")
        if not devices:
            raise ValueError("no devices: name at least one, as cpu or cuda:0")
        if intermediates not in INTERMEDIATES:
            raise ValueError(f"intermediates are {' or '.join(INTERMEDIATES)}, not {intermediates!r}")
        key_of(policy)
        self.tasks, self.devices, self.policy = list(tasks), list(devices), policy
        self.device_memory, self.double_buffer, self.intermediates = device_memory, double_buffer, intermediates
        self.models: list[list[Shard]] = []

    def generate(self) -> list[dict[str, Any]]:
        """Cut every model into shards and bring it home; for each its name, the layers of its shards, bytes at home.

        Raises ValueError naming the layer that is larger than a slot.
        """
        self.models, found = [], []
        for task in self.tasks:
            layers, optimizer = named_layers(task), functools.partial(make, task.optimizer, task.lr)
            lengths = list(task.shards) if task.shards is not None else self._lengths(task, layers, optimizer)
            shards = cut(layers, lengths, optimizer, mixed=False)
            for shard in shards:
                self._largest(task, shard)
            bring_home(task, shards)
            self.models.append(shards)
            size = sum(slab.nbytes for shard in shards for slab in shard.slabs.values())
            found.append({"name": task.name, "shards": lengths, "host_bytes": size})
        return found

    def _lengths(self, task: ModelTask, layers: list[NamedLayer], optimizer: Any) -> list[int]:
        alone = cut(layers, [1] * len(layers), optimizer, mixed=False)
        sizes = [shard_sizes(shard) for shard in alone]
        room = self._slot_bytes() if self.device_memory is not None else max(sum(each.values()) for each in sizes)
        return longest_runs(sizes, room, [f"{task.name}: layer {index}" for index in range(len(layers))])

    def _slot_bytes(self) -> int:
        assert self.device_memory is not None
        return self.device_memory // (1 + self.double_buffer)

    def _largest(self, task: ModelTask, shard: Shard) -> None:
        size = sum(shard_sizes(shard).values())
        if self.device_memory is not None and size > self._slot_bytes():
            raise ValueError(f"{task.name}: a shard needs {gib(size)}, a slot has {gib(self._slot_bytes())}")

    def train_models(self) -> Report:
        """Every model to its end; what fails ends alone. Their weights and losses are those of training it alone."""
        if not self.models:
            self.generate()
        tasks = [self._task(number, task) for number, task in enumerate(self.tasks)]
        if len(self.devices) == 1:
            with Device(self.devices[0]) as device:
                dispatcher = Dispatcher(tasks, [Here(self._worker(device), catches=True)], self.policy)
                self._follow(dispatcher)
        else:
            options = {"double_buffer": self.double_buffer, "intermediates": self.intermediates}
            norms = [task.max_norm for task in self.tasks]
            devices = [Elsewhere(make_worker, name, self.models, norms, options) for name in self.devices]
            try:
                for elsewhere in devices:
                    elsewhere.ready()
                dispatcher = Dispatcher(tasks, devices, self.policy)
                self._follow(dispatcher)
            finally:
                for elsewhere in devices:
                    elsewhere.close()
        for task, chain in zip(self.tasks, tasks, strict=True):
            task.failure = chain.failure
            if task.failure:
                print(f"{task.name} ended early: {task.failure.strip().splitlines()[-1]}", file=sys.stderr)
        failures = {task.name: task.failure for task in self.tasks if task.failure}
        return Report(dispatcher.summary(), dispatcher.timeline, failures)

    def _worker(self, device: Device) -> Worker:
        return Worker(
            device, self.models, double_buffer=self.double_buffer, intermediates=self.intermediates,
            max_norms=[task.max_norm for task in self.tasks],
        )  # fmt: skip

    def _generators(self) -> list[str]:
        """Where random numbers come from: the CPU and, for models there, the GPU."""
        return ["cpu", *(["cuda"] if any(name.startswith("cuda") for name in self.devices) else [])]

    def _follow(self, dispatcher: Dispatcher) -> None:
        for chain, step in dispatcher.run():
            self.tasks[chain.model].losses.append(step.loss.item())

    def _task(self, number: int, task: ModelTask) -> Task:
        shards = self.models[number]
        names = [name for shard in shards for name in shard.trained]
        random = [torch.Generator(device).manual_seed(task.seed).get_state() for device in self._generators()]
        return Task(
            number, shards, names, task.batches(), task.epochs * len(task.dataloader), max_norm=task.max_norm,
            update=task.update, learning_rate_at=task.schedule, random_state=(*random, None)[:2],
            keeps_graphs=self.intermediates == "saved",
        )  # fmt: skip


def make(optimizer: Callable[..., torch.optim.Optimizer], lr: float, parameters: Any) -> torch.optim.Optimizer:
    return optimizer(parameters, lr=lr)


def make_worker(name: str, models: list[list[Shard]], max_norms: list[float], options: dict[str, Any]) -> Worker:
    """In the process of a device."""
    return Worker(Device(name), models, max_norms=max_norms, **options)


def named_layers(task: ModelTask) -> list[NamedLayer]:
    """The task's layers without their memory, the criterion in the last one."""
    names: dict[int, str] = {}
    for index, layer in enumerate(task.layers):
        for local, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{index}.{local}")
    found = []
    for index, layer in enumerate(task.layers):
        own = dict(layer.named_parameters(remove_duplicate=False))
        empty: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad) for p in own.values()
        }
        module, prefix = copy.deepcopy(layer, empty), ""
        if index == len(task.layers) - 1:
            module, prefix = WithLoss(module, task.criterion), "layer."
        found.append(NamedLayer(module, {prefix + local: names[id(p)] for local, p in own.items()}))
    return found


def bring_home(task: ModelTask, shards: list[Shard]) -> None:
    """Move a model's weights into slabs that processes share; the model itself stays a view of them."""
    sizes = [max(ALIGNMENT, shard.own_size(part)) for shard in shards for part in ("weights", "grads", "states")]
    arena = torch.zeros(sum(sizes), dtype=torch.uint8).share_memory_()
    start = 0

    def room(num_bytes: int) -> Tensor:
        nonlocal start
        start += num_bytes
        return arena[start - num_bytes : start]

    for shard in shards:
        shard.settle(room)
    home = {name: shard for shard in shards for name in shard.own}
    for index, layer in enumerate(task.layers):
        for local, parameter in layer.named_parameters():
            name = f"{index}.{local}"
            if name in home:
                view = home[name].at_home(name)
                with torch.no_grad():
                    view.copy_(parameter)
                parameter.data = view


def shard_sizes(shard: Shard) -> dict[str, int]:
    """Bytes in a slot by name: weight, gradient, states."""
    found = {}
    for name in shard.sites:
        start, end = shard.weights_at.spans[name]
        size = -(-(end - start) // ALIGNMENT) * ALIGNMENT * 2
        for key in shard.states_of.get(name, ()):
            start, end = shard.states_at.spans[f"{name} {key}"]
            size += -(-(end - start) // ALIGNMENT) * ALIGNMENT
        found[name] = size
    return found
