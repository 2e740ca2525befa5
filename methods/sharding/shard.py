"""A model cut into shards. A shard's tensors live in host memory, which is the shard's home. A device has slots, each
for one shard at a time. This file has the homes, the slots and the copies between them.

A shard is a run of consecutive layers. Its weights, its gradients and its optimizer's states lie in three slabs of
bytes, and each slab is moved by one copy. A parameter of several shards, such as a tied embedding, lives in the first
of these shards. The other shards borrow the parameter's weights, and add their share of the parameter's gradient
to the gradient in the first shard's home. The first shard updates the parameter after the backward passes of all these
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.devices.streams import Device
from methods.offload.layout import Layout, install
from methods.offload.transfer import Pair, copy
from methods.sharding import optimizer
from methods.sharding.optimizer import MASTER, MakeOptimizer, States, state_tensors
from methods.shared.memory_needs import ALIGNMENT_BYTES

# The parts of a shard, each with a slab of its own. Units may also need the part "borrowed": weights that live in
# other shards.
PARTS = ("weights", "grads", "states")


class Version(NamedTuple):
    """How often weights have been updated. `home`: the number of updates of the weights that live in the shard.
    `borrowed`: the sum of the numbers of updates of the shards that lend weights to this shard."""

    home: int
    borrowed: int


class ShardLayer(NamedTuple):
    """A layer. `names`: for each parameter's name in the layer, its name in the model. Layers whose parameters have the
    same name in the model share that parameter.
    """

    module: nn.Module
    names: dict[str, str]


class Shard:
    """A run of consecutive layers whose tensors live on the host. `lenders`: for each borrowed parameter, by name, the
    shard where the parameter lives. `is_mixed`: True: the optimizer updates an fp32 master of each weight."""

    def __init__(
        self,
        layers: Sequence[ShardLayer],
        lenders: dict[str, Shard],
        make_optimizer: MakeOptimizer,
        *,
        is_mixed: bool,
    ) -> None:
        self.named_layers, self.layers = list(layers), [layer.module for layer in layers]
        self.lenders, self.make_optimizer, self.is_mixed = lenders, make_optimizer, is_mixed
        self.name = ""
        # for each parameter: the index of each of its layers, and its name in that layer
        self.sites: dict[str, list[tuple[int, str]]] = {}
        parameters: dict[str, nn.Parameter] = {}
        for index, layer in enumerate(layers):
            for local_name, name in layer.names.items():
                self.sites.setdefault(name, []).append((index, local_name))
                parameters[name] = layer.module.get_parameter(local_name)
        # names of the parameters that live in this shard
        self.home_names = [name for name in parameters if name not in lenders]
        self.trained_names = [name for name in self.home_names if parameters[name].requires_grad]
        self.frozen_names = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        # Borrowed weights come last, so that one copy moves all of the shard's own weights.
        tensors = [
            (name, parameters[name].shape, parameters[name].dtype) for name in (*self.home_names, *lenders)
        ]
        self.weight_layout, self.own_bytes = Layout(tensors), Layout(tensors[: len(self.home_names)]).numel
        trained = {name: parameters[name] for name in self.trained_names}
        kept_states = state_tensors(make_optimizer, trained, is_mixed=is_mixed)
        self.state_keys = {name: list(states) for name, states in kept_states.items()}
        self.state_layout = _state_layout(kept_states)
        self.slabs: dict[str, Tensor] = {}  # slabs on the host, one for each part
        self.summed_names: set[str] = set()  # parameters whose gradients get a share from later shards
        self.parameters: dict[str, nn.Parameter] = {}
        self.masters: list[nn.Parameter] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.offload_event: Any = None  # end of the last copy from a device to the host; None: no copy yet
        self.fetch_event: Any = None  # end of the last copy from the host to a device; None: no copy yet

    def num_bytes(self, part: str) -> int:
        """Return the bytes of a part on a device. Weights and gradients include borrowed weights."""
        return self.state_layout.numel if part == "states" else self.weight_layout.numel

    def home_bytes(self, part: str) -> int:
        """Return the bytes of a part on the host, without borrowed weights."""
        return self.state_layout.numel if part == "states" else self.own_bytes

    @property
    def slot_bytes(self) -> int:
        return sum(map(self.num_bytes, PARTS))

    def at_home(self, name: str, part: str = "weights") -> Tensor:
        """Return the view of a parameter's weight or gradient on the host: in this shard's slab or, if the parameter is
        borrowed, in the lender's slab."""
        home_shard = self.lenders.get(name, self)
        return home_shard.weight_layout.view(home_shard.slabs[part], name)

    def states(self, slab: Tensor, name: str) -> States:
        return {key: self.state_layout.view(slab, f"{name} {key}") for key in self.state_keys[name]}

    def bind(self, slab: Tensor, grads: Tensor) -> None:
        """Make the layers' parameters views of the device's slab `slab`, and their gradients views of `grads`."""
        for name in self.sites:
            weight, grad = self.weight_layout.view(slab, name), self.weight_layout.view(grads, name)
            if name not in self.parameters:
                self._place(name, nn.Parameter(weight, requires_grad=name not in self.frozen_names))
            # Keep the same parameter objects in every slot, because the graph of the forward pass refers to them.
            self.parameters[name].data = weight
            # .data has a version counter of its own, by which without_gradient() sees what a backward pass wrote.
            self.parameters[name].grad = None if name in self.frozen_names else grad.data

    def without_gradient(self) -> list[str]:
        """Return the trained parameters into whose gradients nothing was added since bind()."""
        names_and_grads = [
            (name, parameter.grad)
            for name, parameter in self.parameters.items()
            if name not in self.frozen_names
        ]
        return [name for name, grad in names_and_grads if grad is not None and not grad._version]

    def _place(self, name: str, parameter: nn.Parameter) -> None:
        self.parameters[name] = parameter
        for index, local_name in self.sites[name]:
            install(self.layers[index], local_name, parameter)

    def release(self) -> None:
        """Put the layers' parameters back on the meta device, where they were before bind(), and drop the optimizer."""
        for name, parameter in list(self.parameters.items()):
            self._place(
                name, nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            )
        self.parameters, self.masters, self.optimizer = {}, [], None

    def step(
        self, slab: Tensor, factor: Tensor | None, learning_rate: float | None, *, is_first: bool
    ) -> None:
        """Take one optimizer step, while the shard is bound to a slot. `slab`: the slot's slab of states. `factor`:
        number by which the gradients are multiplied; None: 1. `learning_rate`: the step's rate; None: the rate that the
        optimizer has.

        torch's own optimizer takes the step, on parameters of the model's shapes, so the result has the bits of a
        training without shards.
        """
        states = [self.states(slab, name) for name in self.trained_names]
        weights = [self.parameters[name] for name in self.trained_names]
        step_parameters = weights
        if self.is_mixed:
            masters = [state.pop(MASTER) for state in states]
            step_parameters = self.masters = self.masters or [nn.Parameter(master) for master in masters]
            for parameter, master, weight in zip(step_parameters, masters, weights, strict=True):
                assert weight.grad is not None
                parameter.data, parameter.grad = master, weight.grad.float()
        if factor is not None:
            torch._foreach_mul_(
                [parameter.grad for parameter in step_parameters if parameter.grad is not None], factor
            )
        self.optimizer = self.optimizer or self.make_optimizer(step_parameters)
        if learning_rate is not None:
            if len({group["lr"] for group in self.optimizer.param_groups}) > 1:
                raise ValueError(
                    "schedule: expected one learning rate for all groups of the optimizer, got several"
                )
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        optimizer.step(self.optimizer, step_parameters, states, is_first=is_first)
        if self.is_mixed:
            with torch.no_grad():
                torch._foreach_copy_([*weights], [*step_parameters])


def _state_layout(states: dict[str, States]) -> Layout:
    """Return where each parameter's states lie in a shard's slab of states."""
    return Layout(
        [
            (f"{name} {key}", tensor.shape, tensor.dtype)
            for name, tensors in states.items()
            for key, tensor in tensors.items()
        ]
    )


def cut_into_shards(
    layers: Sequence[ShardLayer], lengths: Sequence[int], make_optimizer: MakeOptimizer, *, is_mixed: bool
) -> list:
    """Cut a model into shards, and return them in order. `lengths`: the number of layers of each shard."""
    shards: list[Shard] = []
    home_shards: dict[str, Shard] = {}
    start = 0
    for length in lengths:
        run_layers = layers[start : start + length]
        names = dict.fromkeys(name for layer in run_layers for name in layer.names.values())
        lenders = {name: home_shards[name] for name in names if name in home_shards}
        shard = Shard(run_layers, lenders, make_optimizer, is_mixed=is_mixed)
        home_shards.update((name, shard) for name in names if name not in home_shards)
        for earlier in shards:
            earlier.summed_names |= earlier.sites.keys() & names
        shards.append(shard)
        start += length
    return shards


def split_shard(shards: list[Shard], index: int) -> None:
    """Replace shard `index`, which has several layers, by two shards that are as equal in bytes as possible."""
    whole = shards[index]
    sizes = [0] * len(whole.layers)
    for weight_name in whole.home_names:
        extent = whole.weight_layout.places[weight_name]
        sizes[whole.sites[weight_name][0][0]] += extent.stop - extent.start
    cut_index = min(range(1, len(sizes)), key=lambda index: max(sum(sizes[:index]), sum(sizes[index:])))
    first_half = _half(whole, whole.named_layers[:cut_index], {})
    lenders = dict.fromkeys(first_half.home_names, first_half)
    second_half = _half(whole, whole.named_layers[cut_index:], lenders)
    for part, slab in whole.slabs.items():
        middle = first_half.home_bytes(part)
        first_half.slabs[part] = slab[:middle]
        second_half.slabs[part] = slab[middle : middle + second_half.home_bytes(part)]
    second_half.summed_names = whole.summed_names & second_half.sites.keys()
    first_half.summed_names = (whole.summed_names | second_half.sites.keys()) & first_half.sites.keys()
    whole.release()
    shards[index : index + 1] = [first_half, second_half]
    for shard in shards:
        for weight_name, lender in shard.lenders.items():
            if lender is whole:
                is_in_first_half = weight_name in first_half.home_names
                shard.lenders[weight_name] = first_half if is_in_first_half else second_half


def _half(whole: Shard, layers: list[ShardLayer], lenders: dict[str, Shard]) -> Shard:
    weight_names = {weight_name for layer in layers for weight_name in layer.names.values()}
    all_lenders = {**whole.lenders, **lenders}
    lenders = {
        weight_name: all_lenders[weight_name] for weight_name in all_lenders if weight_name in weight_names
    }
    half = Shard(layers, lenders, whole.make_optimizer, is_mixed=whole.is_mixed)
    half.offload_event, half.fetch_event = whole.offload_event, whole.fetch_event
    return half


def allocate_slabs(
    shards: Sequence[Shard], new_slab: Callable[[int], Tensor] | None = None, *, in_halves: bool = False
) -> None:
    """Allocate the shards' slabs on the host. `new_slab`: a function that returns a zeroed slab of the given number of
    bytes; None: all slabs lie in one block of memory that processes share. `in_halves`: True: also allocate a slab
    "seconds", for the gradients of the second half of each batch.
    """
    parts = (*PARTS, "seconds") if in_halves else PARTS
    sizes = [max(ALIGNMENT_BYTES, shard.home_bytes(part)) for shard in shards for part in parts]
    slabs = map(new_slab, sizes) if new_slab else iter(shared_zeros(sum(sizes)).split(sizes))
    for shard in shards:
        shard.slabs = {part: next(slabs) for part in parts}


def shared_zeros(num_bytes: int) -> Tensor:
    """Return zeros in memory that processes share. Tensor.share_memory_() would copy a tensor, and so take the bytes
    twice for a moment."""
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(num_bytes))


class ShardSlot:
    """Device memory for one shard at a time. The slot has a slab for each part, as large as the largest slab of this
    part among the shards."""

    def __init__(self, device: Device, shards: Sequence[Shard]) -> None:
        self.device = device
        sizes = {part: max(shard.num_bytes(part) for shard in shards) for part in PARTS}
        self.slabs = {
            part: device.room(max(ALIGNMENT_BYTES, sizes[part]), torch.uint8, host=False) for part in PARTS
        }
        self.shard: Shard | None = None
        self.version = Version(-1, -1)
        self.valid_parts: set[str] = set()  # parts whose values here are at least as new as the host's values
        self.arrival_event: Any = None  # event at the end of the last copy into the slot; None: no copy yet
        self.drain_event: Any = None  # event at the end of the last copy out of the slot; None: no copy yet

    def holds(self, shard: Shard, version: Version) -> bool:
        return self.shard is shard and self.version.home == version.home

    def prefetch(self, shard: Shard, version: Version, parts: set[str]) -> None:
        """Queue the copies of the parts of the shard that the slot lacks. The copies begin after the slot's last
        use."""
        if not self.holds(shard, version):
            self.shard, self.version, self.valid_parts = shard, version, set()
        if self.version.borrowed != version.borrowed:
            self.version, self.valid_parts = version, self.valid_parts - {"borrowed"}
        missing = parts - self.valid_parts
        if not missing:
            return
        last_use, homes = self.device.compute.record_event(), (shard, *shard.lenders.values())
        events_before = (last_use, self.drain_event, *(home.offload_event for home in homes))
        pairs = [self._home_pair(part, part) for part in PARTS if part in missing]
        if "borrowed" in missing:
            pairs += [(self.view(name), shard.at_home(name)) for name in shard.lenders]
        self.arrival_event = copy(
            self.device, "inbound", ", ".join(sorted(missing)), shard.name, events_before, pairs
        )
        for home in homes:
            home.fetch_event = self.arrival_event
        self.valid_parts |= missing

    def _home_pair(self, part: str, home_part: str) -> Pair:
        """Return the slot's slab of a part and the host's slab of `home_part`, both without borrowed weights."""
        assert self.shard is not None
        size = self.shard.home_bytes(part)
        return self.slabs[part][:size], self.shard.slabs[home_part][:size]

    def view(self, name: str, part: str = "weights") -> Tensor:
        assert self.shard is not None
        return self.shard.weight_layout.view(self.slabs[part], name)

    def arrive(self, *, to_write: bool) -> Shard:
        """Make the compute stream wait for the copies into the slot. With `to_write`, also wait for the copies out of
        the slot. Bind the shard's layers to the slot, and return the shard.
        """
        assert self.shard is not None
        for event in (self.arrival_event, self.drain_event if to_write else None):
            if event is not None:
                self.device.compute.wait_event(event)
        self.shard.bind(self.slabs["weights"], self.slabs["grads"])
        return self.shard

    def offload(self, parts: Iterable[str], names: Iterable[str] = (), grads: str = "grads") -> None:
        """Queue copies from the slot to the host: of the given parts, and of the gradients of the borrowed parameters
        `names`. `grads`: key of the host slab that gets gradients.
        """
        shard, compute_end = self.shard, self.device.compute.record_event()
        assert shard is not None
        homes = (shard, *shard.lenders.values())
        # A prefetch that began before this update may still be reading the slabs on the host, though it is useless now.
        events_before = (compute_end, *(home.fetch_event for home in homes))
        slab_pairs = [self._home_pair(part, grads if part == "grads" else part) for part in parts]
        borrowed_pairs = [(self.view(name, "grads"), shard.at_home(name, grads)) for name in names]
        pairs = [(host, device) for device, host in (*slab_pairs, *borrowed_pairs)]
        self.drain_event = copy(self.device, "outbound", "home", shard.name, events_before, pairs)
        for home in homes:
            home.offload_event = self.drain_event
