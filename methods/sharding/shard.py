"""A model cut into shards: flat slabs at home, room on a device for one shard, and how a shard travels between them.

A shard is a run of layers. Its weights lie in one slab of bytes, so do its gradients and the states of its optimizer,
whichever it is; each travels by one copy. A parameter of several shards (a tied embedding) lives in the first of them:
the others borrow its weights and send their share of its gradient there, and the last backward pass that touches it
comes before its update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.devices.streams import Device
from methods.sharding.optimizer import MakeOptimizer, state_tensors

ALIGNMENT = 64  # bytes: every tensor of a slab starts where an allocation would
PARTS = ("weights", "grads", "states")  # of what is a shard's own; "borrowed" are the weights that live elsewhere

Room = Callable[[int], Tensor]  # a zeroed slab of so many bytes at home


class Version(NamedTuple):
    """How often a shard's own weights were updated, and those that it borrows."""

    own: int
    borrowed: int


class NamedLayer(NamedTuple):
    """A layer, and what the model calls each of its parameters: the same name twice is one parameter."""

    module: nn.Module
    names: dict[str, str]


class Places:
    """Where tensors of any shape and dtype lie in a slab of bytes."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Size, torch.dtype]]) -> None:
        self.num_bytes = 0
        self.spans: dict[str, tuple[int, int]] = {}
        self.kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for name, shape, dtype in tensors:
            size = shape.numel() * dtype.itemsize
            self.spans[name] = (self.num_bytes, self.num_bytes + size)
            self.kinds[name] = (shape, dtype)
            self.num_bytes += math.ceil(size / ALIGNMENT) * ALIGNMENT

    def view(self, slab: Tensor, name: str) -> Tensor:
        shape, dtype = self.kinds[name]
        start, end = self.spans[name]
        return slab[start:end].view(dtype).view(shape)


class Shard:
    """A run of layers at home. `lenders` maps the names that live in another shard to it."""

    def __init__(
        self, layers: Sequence[NamedLayer], lenders: dict[str, Shard], make_optimizer: MakeOptimizer, *, mixed: bool
    ) -> None:
        self.named, self.layers = list(layers), [layer.module for layer in layers]
        self.lenders, self.make_optimizer, self.mixed = lenders, make_optimizer, mixed
        self.name = ""
        self.sites: dict[str, list[tuple[int, str]]] = {}  # layers and their names for a parameter
        found: dict[str, nn.Parameter] = {}
        for index, layer in enumerate(layers):
            for local, name in layer.names.items():
                self.sites.setdefault(name, []).append((index, local))
                found[name] = layer.module.get_parameter(local)
        self.own = [name for name in found if name not in lenders]
        self.trained = [name for name in self.own if found[name].requires_grad]
        self.frozen = {name for name, parameter in found.items() if not parameter.requires_grad}
        # What is borrowed comes last: what is its own travels in one piece.
        columns = [(name, found[name].shape, found[name].dtype) for name in (*self.own, *lenders)]
        self.weights_at, self.own_bytes = Places(columns), Places(columns[: len(self.own)]).num_bytes
        kept = state_tensors(make_optimizer, [found[name] for name in self.trained], mixed=mixed)
        self.states_of = {name: list(states) for name, states in zip(self.trained, kept, strict=True)}
        self.states_at = Places(
            (f"{name} {key}", state.shape, state.dtype)
            for name, states in zip(self.trained, kept, strict=True)
            for key, state in states.items()
        )
        self.sums: set[str] = set()  # names whose gradient has come home from a later shard when this one's is computed
        self.parameters: dict[str, nn.Parameter] = {}
        self.masters: list[nn.Parameter] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.landed: Any = None  # when what was last sent home is there
        self.fetched: Any = None  # when what was last fetched has been read

    def num_bytes(self, part: str) -> int:
        """On a device; at home what is borrowed takes nothing."""
        return self.states_at.num_bytes if part == "states" else self.weights_at.num_bytes

    def own_size(self, part: str) -> int:
        return self.states_at.num_bytes if part == "states" else self.own_bytes

    def settle(self, room: Room, *, in_halves: bool = False) -> None:
        """Take memory at home; where batches are in halves, for a second gradient, too."""
        self.slabs = {"weights": room(max(ALIGNMENT, self.own_bytes)), "grads": room(max(ALIGNMENT, self.own_bytes))}
        self.slabs["states"] = room(max(ALIGNMENT, self.states_at.num_bytes))
        if in_halves:
            self.slabs["seconds"] = room(max(ALIGNMENT, self.own_bytes))

    def at_home(self, name: str, part: str = "weights") -> Tensor:
        """A parameter's weight or gradient at home, wherever it lives."""
        home = self.lenders.get(name, self)
        return home.weights_at.view(home.slabs[part], name)

    def states(self, slab: Tensor, name: str) -> dict[str, Tensor]:
        """The optimizer's tensors of a parameter in a slab of states, by its keys for them."""
        return {key: self.states_at.view(slab, f"{name} {key}") for key in self.states_of[name]}

    def bind(self, slab: Tensor, grads: Tensor) -> None:
        """Make the layers' parameters, and their gradients, views of two slabs of a device."""
        for name in self.sites:
            weight, grad = self.weights_at.view(slab, name), self.weights_at.view(grads, name)
            if name not in self.parameters:
                self._place(name, nn.Parameter(weight, requires_grad=name not in self.frozen))
            # The same parameter in each slot it comes to: the graph of its forward pass knows it by identity.
            self.parameters[name].data = weight
            self.parameters[name].grad = None if name in self.frozen else grad

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        self.parameters[name] = parameter
        for index, local in self.sites[name]:
            owner, _, leaf = local.rpartition(".")
            setattr(self.layers[index].get_submodule(owner), leaf, parameter)

    def release(self) -> None:
        """Leave the layers without memory, as they were before bind() gave them slabs of a device."""
        for name, parameter in list(self.parameters.items()):
            self._place(name, nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad))
        self.parameters, self.masters, self.optimizer = {}, [], None


def cut(layers: Sequence[NamedLayer], lengths: Sequence[int], make_optimizer: MakeOptimizer, *, mixed: bool) -> list:
    """Shards of so many layers each, in the model's order."""
    shards: list[Shard] = []
    home: dict[str, Shard] = {}
    start = 0
    for length in lengths:
        run = layers[start : start + length]
        names = dict.fromkeys(name for layer in run for name in layer.names.values())
        lenders = {name: home[name] for name in names if name in home}
        shard = Shard(run, lenders, make_optimizer, mixed=mixed)
        home.update((name, shard) for name in names if name not in home)
        for earlier in shards:
            earlier.sums |= earlier.sites.keys() & names
        shards.append(shard)
        start += length
    return shards


def settle_shared(shards: Sequence[Shard], *, in_halves: bool = False) -> None:
    """Take memory at home that processes share: one piece for all."""
    parts = (*PARTS, "seconds") if in_halves else PARTS
    sizes = [max(ALIGNMENT, shard.own_size(part)) for shard in shards for part in parts]
    arena = torch.zeros(sum(sizes), dtype=torch.uint8).share_memory_()
    start = 0

    def room(num_bytes: int) -> Tensor:
        nonlocal start
        start += num_bytes
        return arena[start - num_bytes : start]

    for shard in shards:
        shard.settle(room, in_halves=in_halves)


class ShardSlot:
    """Room on a device for one shard, whichever it is: slabs as large as the largest needs."""

    def __init__(self, device: Device, shards: Sequence[Shard]) -> None:
        self.device = device
        sizes = {part: max(shard.num_bytes(part) for shard in shards) for part in PARTS}
        self.slabs = {part: device.room(max(ALIGNMENT, sizes[part]), torch.uint8, host=False) for part in PARTS}
        self.shard: Shard | None = None
        self.version = Version(-1, -1)
        self.valid: set[str] = set()  # the parts that are here as they are at home, or newer
        self.arrived: Any = None
        self.drained: Any = None

    def holds(self, shard: Shard, version: Version) -> bool:
        return self.shard is shard and self.version.own == version.own

    def prefetch(self, shard: Shard, version: Version, parts: set[str]) -> int:
        """Queue copies of what is missing here of a shard's parts, after the slot's last use; the bytes they move."""
        if not self.holds(shard, version):
            self.shard, self.version, self.valid = shard, version, set()
        if self.version.borrowed != version.borrowed:
            self.version, self.valid = version, self.valid - {"borrowed"}
        missing = parts - self.valid
        if not missing:
            return 0
        device, used, moved = self.device, self.device.compute.record_event(), 0
        with device.streams.use(device.inbound):
            for event in (used, self.drained, *(home.landed for home in (shard, *shard.lenders.values()))):
                if event is not None:
                    device.inbound.wait_event(event)
            with device.span("inbound", ", ".join(sorted(missing)), shard.name):
                for part in PARTS:
                    if part in missing:
                        size = shard.own_size(part)
                        self.slabs[part][:size].copy_(shard.slabs[part][:size], non_blocking=True)
                        moved += size
                for name in shard.lenders if "borrowed" in missing else ():
                    self.view(name).copy_(shard.at_home(name), non_blocking=True)
                    moved += self.view(name).nbytes
            self.arrived = device.inbound.record_event()
        for home in (shard, *shard.lenders.values()):
            home.fetched = self.arrived
        self.valid |= missing
        return moved

    def view(self, name: str, part: str = "weights") -> Tensor:
        assert self.shard is not None
        return self.shard.weights_at.view(self.slabs[part], name)

    def arrive(self, *, to_write: bool) -> Shard:
        """Let compute wait for what was fetched and, where it will write here, for what is still going home; bind the
        layers to this slot."""
        assert self.shard is not None
        for event in (self.arrived, self.drained if to_write else None):
            if event is not None:
                self.device.compute.wait_event(event)
        self.shard.bind(self.slabs["weights"], self.slabs["grads"])
        return self.shard

    def offload(self, parts: Iterable[str], names: Iterable[str] = (), grads: str = "grads") -> int:
        """Queue copies home: of what is the shard's own in these parts, and of the gradients of borrowed names. `grads`
        says to which slab gradients go."""
        device, shard, done, moved = self.device, self.shard, self.device.compute.record_event(), 0
        assert shard is not None
        homes = [shard, *shard.lenders.values()]
        with device.streams.use(device.outbound):
            # A copy that was fetched too early, and is of no use any more, may still be reading there.
            for event in (done, *(home.fetched for home in homes)):
                if event is not None:
                    device.outbound.wait_event(event)
            with device.span("outbound", "home", shard.name):
                for part in parts:
                    size = shard.own_size(part)
                    home_slab = shard.slabs[grads if part == "grads" else part]
                    home_slab[:size].copy_(self.slabs[part][:size], non_blocking=True)
                    moved += size
                for name in names:
                    shard.at_home(name, grads).copy_(self.view(name, "grads"), non_blocking=True)
                    moved += self.view(name, "grads").nbytes
            self.drained = device.outbound.record_event()
        for home in homes:
            home.landed = self.drained
        return moved
