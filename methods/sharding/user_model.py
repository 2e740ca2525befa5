"""Turns a user's model into an ordered list of layers, and moves its weights to the slabs of shards on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from methods.sharding.shard import NamedLayer, Shard, settle
from methods.shared.memory_needs import aligned


class WithLoss(nn.Module):
    """The last layer with the criterion: computes the loss from the layer's inputs and the targets."""

    def __init__(self, layer: nn.Module, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.criterion = layer, criterion

    def forward(self, *x: Any) -> Tensor:
        return self.criterion(self.layer(*x[:-1]), x[-1])


def Model(model: nn.Module) -> nn.Module:
    """Return the model unchanged. Scripts for the original Hydra, which wrap a model in a class Model, can therefore
    run."""
    return model


def ordered_layers(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the model's layers in order. Raises ValueError if the model has no ordered list of layers, has parameters
    outside of this list, or has a layer that cannot be recomputed."""
    lists = [model, getattr(model, "layers", None), *model.children()]
    found: Any = next((each for each in lists if isinstance(each, nn.Sequential | nn.ModuleList)), None)
    inside = {id(parameter) for layer in found or () for parameter in layer.parameters()}
    if not found:
        raise ValueError(
            f"{name}: {type(model).__name__} has no ordered layers: use nn.Sequential, nn.ModuleList, or a module with"
            " one of these"
        )
    if any(id(parameter) not in inside for parameter in model.parameters()):
        raise ValueError(
            f"{name}: {type(model).__name__} has parameters outside of its list of layers; move them into a layer"
        )
    for index, layer in enumerate(found):
        for module in layer.modules():
            if getattr(module, "track_running_stats", False):
                raise ValueError(
                    f"{name}: layer {index} ({type(module).__name__}) keeps running statistics, which a recompute"
                    " would count twice: use track_running_stats=False, or another norm"
                )
    return list(found)


def named_layers(task: Any) -> list[NamedLayer]:
    """Return copies of the task's layers on the meta device. The copy of the last layer also computes the criterion."""
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
            own_loss = task.criterion  # a module's buffers go to the device, and a rehearsal replaces them: copy it
            own_loss = copy.deepcopy(own_loss) if isinstance(own_loss, nn.Module) else own_loss
            module, prefix = WithLoss(module, own_loss), "layer."
        found.append(NamedLayer(module, {prefix + local: names[id(p)] for local, p in own.items()}))
    return found


def bring_home(task: Any, shards: list[Shard], *, in_halves: bool) -> None:
    """Move a model's weights into slabs on the host that processes share. The model's parameters become views of the
    slabs. `in_halves`: True: also make room for the gradients of each batch's second half."""
    settle(shards, in_halves=in_halves)
    home = {name: shard for shard in shards for name in shard.own}
    for index, layer in enumerate(task.layers):
        for local, parameter in layer.named_parameters():
            name = f"{index}.{local}"
            if name in home:
                parameter.data = home[name].at_home(name).copy_(parameter.data)


def shard_sizes(shard: Shard) -> dict[str, int]:
    """Return the bytes that each parameter takes in a slot, by the parameter's name: weight, gradient and states."""
    found = {}
    for name in shard.sites:
        states = [shard.states_at.places[f"{name} {key}"] for key in shard.states_of.get(name, ())]
        weight = shard.weights_at.places[name]
        found[name] = sum(aligned(place.stop - place.start) for place in (weight, weight, *states))
    return found
