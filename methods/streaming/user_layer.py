"""Makes a user's layer fit the streaming core: a module that takes tensors and returns tensors, and whose parameters
are views of a slot.

The user's parameters stay in the model, and their memory is the layer's home. While the layer computes, parameters that
are views of a slot replace the user's parameters, and autograd sees only the views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from methods.streaming.layer_state import Passed

TENSOR = object()  # marks a tensor's place in the structure of a layer's arguments or results


class Placeholders(nn.Module):
    """A module whose parameters have the shapes of the given parameters, but no memory. A parameter's name is its
    index: "0", "1"."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        for place, parameter in enumerate(parameters):
            self.register_parameter(str(place), nn.Parameter(torch.empty_like(parameter, device="meta")))


class UserLayer(Placeholders):
    """One layer of a user's model. `own`: parameters that only this layer uses. `shared`: parameters that the rest of
    the model uses, too. The layer takes the shared parameters as further tensors, after the tensors that the model
    passes."""

    def __init__(self, layer: nn.Module, own: Sequence[nn.Parameter], shared: Sequence[nn.Parameter]) -> None:
        super().__init__(own)
        self.compute = layer.forward
        self.users, self.shared = list(own), list(shared)  # plain lists, because a module does not register these
        owned = {id(parameter): str(place) for place, parameter in enumerate(own)}
        others = {id(parameter): place for place, parameter in enumerate(shared)}
        # Where the layer uses a parameter: the module, the name there, and the name in `own` or the index in `shared`.
        self.sites: list[tuple[Any, str, str | int]] = []
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    ours = owned.get(id(parameter))
                    self.sites.append((module, name, others[id(parameter)] if ours is None else ours))

    def take(self, args: tuple[Any, ...], words: Mapping[str, Any]) -> Passed:
        """Return the tensors among a call's arguments, then the shared parameters. Keep the structure of the arguments
        for forward()."""
        leaves, self.taken = tree_flatten((args, dict(words)))
        self.leaves = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return (*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *self.shared)

    def give(self, tensors: Passed) -> Any:
        """Return the structure that the layer returned, with these tensors in their places."""
        return _filled(self.returned_leaves, self.returned, iter(tensors))

    def forward(self, *tensors: Tensor) -> Passed:
        given = iter(tensors)
        args, words = _filled(self.leaves, self.taken, given)
        with self._placed([*given]):
            result = self.compute(*args, **words)
        leaves, self.returned = tree_flatten(result)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            told = f"got a {type(result).__name__} without one"
            raise ValueError(f"expected a layer to return a tensor, alone or in a tuple, list or dictionary, {told}")
        self.returned_leaves = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    @contextmanager
    def _placed(self, shared: Sequence[Tensor]) -> Iterator[None]:
        before = [module._parameters[name] for module, name, _ in self.sites]
        try:
            for module, name, ours in self.sites:
                if isinstance(ours, str):
                    setattr(module, name, self._parameters[ours])  # setattr(): recurrent modules keep lists
                else:
                    module._parameters[name] = shared[ours]
            yield
        finally:
            for (module, name, _), parameter in zip(self.sites, before, strict=True):
                setattr(module, name, parameter)


def _filled(leaves: Sequence[Any], structure: Any, tensors: Iterator[Tensor]) -> Any:
    return tree_unflatten([next(tensors) if leaf is TENSOR else leaf for leaf in leaves], structure)
