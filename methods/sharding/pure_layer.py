"""A user's layer, as a device runs it: a copy of the layer in the model, which may compute and nothing else.

A layer runs twice in a step, on a copy whose buffers never come back, and with its own parameters alone in memory. So
what it changes beside its result, or reads from elsewhere, would train otherwise than the model alone: it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from methods.sharding.unit import map_tensors
from methods.shared.module_watch import NUM_COMPARED_PASSES, ModuleWatch, byte_sum, leaves_beyond

PASSED_TYPES = (Tensor, int, float, str, type(None))  # what a layer may return beside tuples of these
NUM_GRAPHS = 1  # passes whose graph is searched for parameters of other layers
MOST_RESULTS = 8  # results that wait for their recompute, which another process may do


class PureLayer(nn.Module):
    """A user's layer. `title`: its place and class, for errors. `takes_tuple`: True: several values come as one tuple,
    as nn.Sequential passes them on; False: as arguments.

    Raises ValueError in a pass that changes what ModuleWatch compares, that reads a parameter of another layer, that
    returns a value other than tensors, or, on a CPU, another result than the pass before on the same input.
    """

    def __init__(self, title: str, layer: nn.Module, *, takes_tuple: bool = False) -> None:
        super().__init__()
        self.title, self.layer, self.takes_tuple = title, layer, takes_tuple
        # The input is kept for the recompute, so a layer that is made to change it works on a copy.
        self.copies_input = any(getattr(module, "inplace", False) for module in layer.modules())
        self.watch: ModuleWatch | None = None
        self.num_graphs, self.num_repeats = NUM_GRAPHS, NUM_COMPARED_PASSES
        # Sums of the bytes of a pass's results, by those of its input and of the parameters.
        self.results: dict[Any, list[int]] = {}

    def forward(self, *x: Any) -> Any:
        if self.watch is None:
            self.watch = ModuleWatch(self.layer)
        before = self.watch.state(x)
        try:
            y = self._call(x) if torch.is_grad_enabled() else self._call_as_with_gradients(x)
        except RuntimeError as error:
            if "in-place" in str(error) or "inplace" in str(error):
                raise ValueError(
                    f"{self.title}: expected a forward pass that changes nothing, got one that changes its input or a"
                    " parameter in place; try a new tensor"
                ) from error
            raise
        if change := self.watch.change(before):
            raise ValueError(
                f"{self.title}: expected a forward pass that changes nothing, as it runs twice and on a copy, got one"
                f" that changes {change}; try to compute it anew in each pass, or to return it"
            )
        self._refuse_leaves(x, y)
        self._refuse_other_results(x, y)
        return y

    def _call(self, x: Any) -> Any:
        inputs = map_tensors(torch.clone, x) if self.copies_input else x
        return self.layer(inputs) if self.takes_tuple and len(inputs) > 1 else self.layer(*inputs)

    def _call_as_with_gradients(self, x: Any) -> Any:
        """Call the layer as its recompute does, whose gradients decide which kernel computes; keep no graph."""
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, lambda kept: kept):
            y = self._call(map_tensors(_with_gradient, x))
        return map_tensors(Tensor.detach, y) if isinstance(y, tuple) else map_tensors(Tensor.detach, [y])[0]

    def _refuse_other_results(self, x: Any, y: Any) -> None:
        is_recompute = torch.is_grad_enabled()
        if not self.num_repeats or (not is_recompute and len(self.results) == MOST_RESULTS):
            return
        inputs = (x, list(self.layer.parameters()))
        input_sums, result_sums = _byte_sums(inputs), _byte_sums(y)
        if not is_recompute:
            self.results[tuple(input_sums)] = result_sums
            return
        self.num_repeats -= 1
        if self.results.pop(tuple(input_sums), result_sums) != result_sums:
            raise ValueError(
                f"{self.title}: expected the same result from each pass on the same input, got another from the"
                " recompute; try a layer that keeps no counts outside of modules"
            )

    def _refuse_leaves(self, x: Any, y: Any) -> None:
        if self.num_graphs and torch.is_grad_enabled():
            self.num_graphs -= 1
            own_parameters = {id(parameter) for parameter in self.layer.parameters()}
            if any(id(leaf) not in own_parameters for leaf in leaves_beyond(y, x)):
                raise ValueError(
                    f"{self.title} computes with a parameter that is not one of its own; register it in this layer,"
                    " too, as a tied weight"
                )


class MiddleLayer(PureLayer):
    """A user's layer before the last one: returns a tensor, or a tuple of tensors and None."""

    def forward(self, *x: Any) -> Any:
        y = super().forward(*x)
        for value in y if isinstance(y, tuple) else (y,):
            if not isinstance(value, PASSED_TYPES):
                raise ValueError(
                    f"{self.title} returns a {type(value).__name__}; expected a tensor, or a tuple of tensors, which"
                    " the next layer takes as its arguments"
                )
        return y


class LastLayer(PureLayer):
    """The last layer with the criterion: computes the loss from the layer's inputs and the targets."""

    def __init__(
        self, title: str, layer: nn.Module, criterion: Callable[..., Tensor], *, takes_tuple: bool
    ) -> None:
        super().__init__(title, layer, takes_tuple=takes_tuple)
        self.criterion = criterion
        self.criterion_watch: ModuleWatch | None = None

    def forward(self, *x: Any) -> Tensor:
        y = super().forward(*x[:-1])
        if isinstance(self.criterion, nn.Module) and self.criterion_watch is None:
            self.criterion_watch = ModuleWatch(self.criterion)
        before = self.criterion_watch and self.criterion_watch.state()
        loss = self.criterion(y, x[-1])
        if self.criterion_watch and before and (change := self.criterion_watch.change(before)):
            raise ValueError(
                f"expected a criterion that changes nothing, got one that changes {change}; try a function"
            )
        if leaves_beyond(loss, y):
            raise ValueError(
                "expected a criterion of the last layer's output and the targets alone, got one that computes with a"
                " parameter, whose gradient would be lost; try the optimizer's weight_decay, or requires_grad_(False)"
            )
        return loss


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _is_on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout is torch.strided


def _byte_sums(tensors: Any) -> list[Any]:
    """Return the sum of the bytes of each tensor on the CPU."""
    return [byte_sum(leaf) for leaf in tree_leaves(tensors) if _is_on_cpu(leaf)]
