"""Checks that a model's own forward pass is the chain of its layers, which is all that Hydra trains.

A copy of the model runs on a batch, and each of its layers must be called once, in order, with the very result of the
layer before. On the meta device this takes no memory and next to no time; a model that reads values runs on the host.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from methods.sharding.user_model import layer_list
from methods.shared.module_watch import random_states

# A class with one of these forward passes is not checked: the first is a chain by definition, and the second computes
# nothing.
UNCHECKED_FORWARDS = (nn.Sequential.forward, nn.Module.forward)


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
            return _Calls(name, model, device).check(inputs)
        except NoChainError:
            raise
        except Exception as error:  # a user's code may raise anything, where it reads values, say
            failure = error
    raise NoChainError(
        f"{name}: the forward pass of {type(model).__name__} cannot be compared with the chain of its layers"
        f" ({type(failure).__name__}: {' '.join(str(failure).split())[:200]}); try nn.Sequential"
    ) from failure


class _Calls:
    """The calls of the layers of a model's copy. `device`: meta, or cpu for the model's own parameters."""

    def __init__(self, name: str, model: nn.Module, device: str) -> None:
        self.name, self.class_name, self.device = name, type(model).__name__, device
        tensors: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
        if device == "meta":
            tensors |= {id(buffer): buffer for buffer in model.buffers()}
            tensors = {key: _on_meta(tensor) for key, tensor in tensors.items()}
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
        if not _same((result,), self.expected_inputs) and not _same(result, self.expected_inputs):
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
        if not _same(arguments[0] if is_whole and len(arguments) == 1 else arguments, self.expected_inputs):
            raise self._error(f"computes {place}")
        self._refuse_changes(place)

    def _record_result(self, layer: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        self.num_calls += 1
        self._remember(result if isinstance(result, tuple) else (result,))

    def _remember(self, expected_inputs: tuple[Any, ...]) -> None:
        """Remember what the next layer must get, and what must not change until then."""
        self.expected_inputs = expected_inputs
        self.versions = [tensor._version for tensor in _tensors(expected_inputs)]
        self.random = [*random_states(), torch.get_rng_state().tolist()]

    def _refuse_changes(self, place: str) -> None:
        if self.versions != [tensor._version for tensor in _tensors(self.expected_inputs)]:
            raise self._error(f"computes in place {place}")
        if self.random != [*random_states(), torch.get_rng_state().tolist()]:
            raise self._error(f"draws random numbers {place}")

    def _error(self, deviation: str) -> NoChainError:
        return NoChainError(
            f"{self.name}: expected a forward pass that calls the layers in order, each on the result of the one"
            f" before, but that of {self.class_name} {deviation}; try to move this into a layer"
        )


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _same(values: Any, others: Sequence[Any]) -> bool:
    return isinstance(values, tuple) and len(values) == len(others) and all(map(operator.is_, values, others))
