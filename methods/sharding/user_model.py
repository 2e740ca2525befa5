"""Turns a user's model into an ordered list of layers, and moves its weights to the slabs of shards on the host."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from methods.sharding.pure_layer import LastLayer, MiddleLayer, PureLayer
from methods.sharding.shard import Shard, ShardLayer, allocate_slabs
from methods.shared.memory_needs import aligned
from methods.shared.module_watch import hooks_of


def Model(model: nn.Module) -> nn.Module:
    """Return the model unchanged. Scripts for the original Hydra, which wrap a model in a class Model, can therefore
    run."""
    return model


def ordered_layers(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the model's layers in order. Raises ValueError if the model has no ordered list of layers, has parameters
    outside of this list, or has what a copy of its layers would lose."""
    layers = layer_list(model)
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    if not len(layers):
        raise ValueError(
            f"{name}: {type(model).__name__} has no ordered layers: use nn.Sequential, nn.ModuleList, or a module with"
            " one of these"
        )
    if any(id(parameter) not in inside for parameter in model.parameters()):
        raise ValueError(
            f"{name}: {type(model).__name__} has parameters outside of its list of layers; move them into a layer"
        )
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(
                    f"{name}: expected layers of Python, got layer {index} of TorchScript; try it without torch.jit"
                )
            if getattr(module, "track_running_stats", False) and module.training:
                raise ValueError(
                    f"{name}: layer {index} ({type(module).__name__}) keeps running statistics, which a recompute"
                    " would count twice: use track_running_stats=False, eval() of this module, or another norm"
                )
    _refuse_lost(name, model, layers)
    return list(layers)


def layer_list(model: nn.Module) -> nn.Sequential | nn.ModuleList:
    """Return the model's list of layers: the model, its attribute `layers`, or its first child that is a list; an empty
    list if the model has none."""
    lists = [model, getattr(model, "layers", None), *model.children()]
    return next(
        (layers for layers in lists if isinstance(layers, nn.Sequential | nn.ModuleList)), nn.ModuleList()
    )


def _refuse_lost(name: str, model: nn.Module, layers: nn.Module) -> None:
    """Raise ValueError if the model has hooks that are never called, or parameters that a copy would not have alike."""
    for module in (model, layers):
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        if any(hooks):
            raise ValueError(
                f"{name}: {type(module).__name__} has a hook, but only its layers are called; try a hook of a layer"
            )
    places = []
    for path, parameter in model.named_parameters():
        if hooks_of(parameter):
            raise ValueError(
                f"{name}: parameter {path} has a hook, which would not be called; try a hook of its layer"
            )
        # is_contiguous() would pass a channels_last weight of one channel, whose strides choose another kernel.
        if is_lazy(parameter) or parameter.stride() != torch.empty(parameter.shape, device="meta").stride():
            raise ValueError(
                f"{name}: expected contiguous parameters with a shape, got {path}; try a first forward pass, or"
                " parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)"
            )
        places.append((parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, path))
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for path, buffer in model.named_buffers():
        if buffer.numel() and buffer.untyped_storage().data_ptr() in storages:
            raise ValueError(f"{name}: buffer {path} shares the memory of a parameter; try a copy")
    for (_, stop, path), (start, _, other) in pairwise(sorted(places)):
        if start < stop:
            raise ValueError(
                f"{name}: {path} and {other} share memory but are not one parameter; try"
                " `layer.weight = other.weight`, which ties them"
            )
    for module in model.modules():
        if getattr(module, "sparse", False):
            raise ValueError(f"{name}: {type(module).__name__} makes sparse gradients; try sparse=False")


def named_layers(task: Any) -> list[ShardLayer]:
    """Return copies of the task's layers on the meta device. The copy of the last layer also computes the criterion.
    Raises ValueError if a layer cannot be copied, or holds a parameter that it does not register."""
    names: dict[int, str] = {}
    for index, layer in enumerate(task.layers):
        for local, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{index}.{local}")
    takes_tuple, named = isinstance(layer_list(task.model), nn.Sequential), []
    for index, layer in enumerate(task.layers):
        title, local = (
            f"layer {index} ({type(layer).__name__})",
            dict(layer.named_parameters(remove_duplicate=False)),
        )
        module = _without_memory(f"{task.name}: {title}", layer, [*local.values()])
        if index == len(task.layers) - 1:
            # a module's buffers go to the device, and a rehearsal replaces them: copy it
            criterion = task.criterion
            criterion = copy.deepcopy(criterion) if isinstance(criterion, nn.Module) else criterion
            copied: PureLayer = LastLayer(title, module, criterion, takes_tuple=takes_tuple)
        else:
            copied = MiddleLayer(title, module, takes_tuple=takes_tuple)
        named.append(ShardLayer(copied, {f"layer.{name}": names[id(p)] for name, p in local.items()}))
    return named


def _without_memory(title: str, layer: nn.Module, parameters: list[nn.Parameter]) -> nn.Module:
    """Return a copy of the layer with parameters on the meta device."""
    copies: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in parameters
    }
    num_parameters = len(copies)
    try:
        module = copy.deepcopy(layer, copies)
    except RuntimeError as error:
        raise ValueError(
            f"{title} cannot be copied ({' '.join(str(error).split())[:100]}); try torch.nn.utils.parametrizations"
        ) from error
    if sum(isinstance(value, nn.Parameter) for value in copies.values()) > num_parameters:
        raise ValueError(
            f"{title} holds a parameter that it does not register; try self.weight = other.weight"
        )
    return module


def bring_home(task: Any, shards: list[Shard], *, in_halves: bool) -> None:
    """Move a model's weights into slabs on the host that processes share. The model's parameters become views of the
    slabs. `in_halves`: True: also make room for the gradients of each batch's second half."""
    allocate_slabs(shards, in_halves=in_halves)
    home = {name: shard for shard in shards for name in shard.home_names}
    for index, layer in enumerate(task.layers):
        for local, parameter in layer.named_parameters():
            name = f"{index}.{local}"
            if name in home:
                parameter.data = home[name].at_home(name).copy_(parameter.data)


def shard_sizes(shard: Shard) -> dict[str, int]:
    """Return the bytes that each parameter takes in a slot, by the parameter's name: weight, gradient and states."""
    sizes = {}
    for name in shard.sites:
        states = [shard.state_layout.places[f"{name} {key}"] for key in shard.states_of.get(name, ())]
        weight = shard.weight_layout.places[name]
        sizes[name] = sum(aligned(place.stop - place.start) for place in (weight, weight, *states))
    return sizes
