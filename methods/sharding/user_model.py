"""Turns a user's model into an ordered list of layers, checks that its own forward pass is the chain of these layers,
which is all that Hydra trains, and moves its weights to the slabs of shards on the host.

In the check a copy of the model runs on a batch, and each of its layers must be called once, in order, with the very
result of the layer before. On the meta device this takes no memory and next to no time; a model that reads values runs
on the host.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from methods.sharding.pure_layer import LastLayer, MiddleLayer, PureLayer
from methods.sharding.shard import Shard, ShardLayer, allocate_slabs
from methods.shared.memory_needs import round_up
from methods.shared.module_watch import hooks_of, random_states

# A class with one of these forward passes is not checked: the first is a chain by definition, and the second computes
# nothing.
UNCHECKED_FORWARDS = (nn.Sequential.forward, nn.Module.forward)


def Model(model: nn.Module) -> nn.Module:
    """Return the model unchanged. Scripts for the original Hydra, which wrap a model in a class Model, can therefore
    run."""
    return model


def ordered_layers(name: str, model: nn.Module) -> list[nn.Module]:
    """Return the model's layers in order. Raises ValueError if the model has no ordered list of layers, has parameters
    outside of this list, or has what a copy of its layers would lose."""
    layers = layer_list(model)
    layer_parameters = {id(parameter) for layer in layers for parameter in layer.parameters()}
    if not len(layers):
        raise ValueError(
            f"{name}: {type(model).__name__} has no ordered layers: use nn.Sequential, nn.ModuleList, or a module with"
            " one of these"
        )
    if any(id(parameter) not in layer_parameters for parameter in model.parameters()):
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
    _refuse_what_copies_lose(name, model, layers)
    return list(layers)


def layer_list(model: nn.Module) -> nn.Sequential | nn.ModuleList:
    """Return the model's list of layers: the model, its attribute `layers`, or its first child that is a list; an empty
    list if the model has none."""
    for layers in (model, getattr(model, "layers", None), *model.children()):
        if isinstance(layers, nn.Sequential | nn.ModuleList):
            return layers
    return nn.ModuleList()


def _refuse_what_copies_lose(name: str, model: nn.Module, layers: nn.Module) -> None:
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
        for local_name, parameter in layer.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), f"{index}.{local_name}")
    takes_tuple, named = isinstance(layer_list(task.model), nn.Sequential), []
    for index, layer in enumerate(task.layers):
        title = f"layer {index} ({type(layer).__name__})"
        parameters = dict(layer.named_parameters(remove_duplicate=False))
        module = _copy_without_memory(f"{task.name}: {title}", layer, [*parameters.values()])
        if index == len(task.layers) - 1:
            # a module's buffers go to the device, and a rehearsal replaces them: copy it
            criterion = task.criterion
            criterion = copy.deepcopy(criterion) if isinstance(criterion, nn.Module) else criterion
            copied: PureLayer = LastLayer(title, module, criterion, takes_tuple=takes_tuple)
        else:
            copied = MiddleLayer(title, module, takes_tuple=takes_tuple)
        model_names = {f"layer.{name}": names[id(parameter)] for name, parameter in parameters.items()}
        named.append(ShardLayer(copied, model_names))
    return named


def _copy_without_memory(title: str, layer: nn.Module, parameters: list[nn.Parameter]) -> nn.Module:
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
    home_shards = {name: shard for shard in shards for name in shard.home_names}
    for index, layer in enumerate(task.layers):
        for local_name, parameter in layer.named_parameters():
            name = f"{index}.{local_name}"
            if name in home_shards:
                parameter.data = home_shards[name].at_home(name).copy_(parameter.data)


def shard_sizes(shard: Shard) -> dict[str, int]:
    """Return the bytes that each parameter takes in a slot, by the parameter's name: weight, gradient and states."""
    sizes = {}
    for name in shard.sites:
        states = [shard.state_layout.places[f"{name} {key}"] for key in shard.state_keys.get(name, ())]
        weight = shard.weight_layout.places[name]
        sizes[name] = sum(round_up(place.stop - place.start) for place in (weight, weight, *states))
    return sizes


class NoChainError(ValueError):
    """A model's forward pass is no chain of its layers."""


def refuse_other_than_chain(name: str, model: nn.Module, inputs: Any) -> None:
    """Raise NoChainError if the model's forward pass on these inputs is not the chain of its layers, or if it does not
    run without a GPU."""
    if type(model).forward in UNCHECKED_FORWARDS and "forward" not in vars(model):
        return
    failure: Exception = NoChainError()
    for device in ("meta", "cpu"):
        try:
            return _LayerCalls(name, model, device).check(inputs)
        except NoChainError:
            raise
        except Exception as error:  # a user's code may raise anything, where it reads values, say
            failure = error
    raise NoChainError(
        f"{name}: the forward pass of {type(model).__name__} cannot be compared with the chain of its layers"
        f" ({type(failure).__name__}: {' '.join(str(failure).split())[:200]}); try nn.Sequential"
    ) from failure


class _LayerCalls:
    """The calls of the layers of a model's copy. `device`: meta, or cpu for the model's own parameters."""

    def __init__(self, name: str, model: nn.Module, device: str) -> None:
        self.name, self.class_name, self.device = name, type(model).__name__, device
        tensors: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        if device == "meta":
            tensors |= {id(buffer): buffer for buffer in model.buffers()}
            tensors = {key: _tensor_on_meta(tensor) for key, tensor in tensors.items()}
        self.model = copy.deepcopy(model, tensors)
        layers = layer_list(self.model)
        self.layers, self.takes_tuple = list(layers), isinstance(layers, nn.Sequential)
        for layer in set(self.layers):
            layer.register_forward_pre_hook(self._check_input, prepend=True, with_kwargs=True)
            layer.register_forward_hook(self._record_result)
        self.num_calls = 0

    def check(self, inputs: Any) -> None:
        if self.device == "meta":
            inputs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            self._remember((inputs,))
            result = self.model(inputs)
        if not any(_are_same_objects(output, self.expected_inputs) for output in ((result,), result)):
            raise self._error(f"computes after layer {self.num_calls - 1}")
        self._refuse_changes(f"after layer {self.num_calls - 1}")
        if self.num_calls < len(self.layers):
            raise self._error(f"calls {self.num_calls} of {len(self.layers)} layers")

    def _check_input(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        place = f"before layer {self.num_calls}"
        if self.num_calls == len(self.layers) or layer is not self.layers[self.num_calls]:
            raise self._error(
                f"calls a {type(layer).__name__} where layer {self.num_calls} comes in the list"
            )
        if keywords:
            raise self._error(f"gives layer {self.num_calls} {', '.join(keywords)} by name")
        is_whole = self.takes_tuple and len(self.expected_inputs) > 1
        if not _are_same_objects(
            arguments[0] if is_whole and len(arguments) == 1 else arguments, self.expected_inputs
        ):
            raise self._error(f"computes {place}")
        self._refuse_changes(place)

    def _record_result(self, layer: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        self.num_calls += 1
        self._remember(result if isinstance(result, tuple) else (result,))

    def _remember(self, expected_inputs: tuple[Any, ...]) -> None:
        """Remember what the next layer must get, and what must not change until then."""
        self.expected_inputs = expected_inputs
        self.versions = [tensor._version for tensor in _tensors_among(expected_inputs)]
        self.random = [*random_states(), torch.get_rng_state().tolist()]

    def _refuse_changes(self, place: str) -> None:
        if self.versions != [tensor._version for tensor in _tensors_among(self.expected_inputs)]:
            raise self._error(f"computes in place {place}")
        if self.random != [*random_states(), torch.get_rng_state().tolist()]:
            raise self._error(f"draws random numbers {place}")

    def _error(self, deviation: str) -> NoChainError:
        return NoChainError(
            f"{self.name}: expected a forward pass that calls the layers in order, each on the result of the one"
            f" before, but that of {self.class_name} {deviation}; try to move this into a layer"
        )


def _tensor_on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _tensors_among(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _are_same_objects(values: Any, others: Sequence[Any]) -> bool:
    return isinstance(values, tuple) and len(values) == len(others) and all(map(operator.is_, values, others))
