"""A user's layer, as a device runs it: a copy of the layer in the model, which may compute and nothing else.

A layer runs twice in a step, on a copy whose buffers never come back, and with its own parameters alone in memory. So
what it changes beside its result, or reads from elsewhere, would train otherwise than the model alone: it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from methods.sharding.unit import map_tensors
from methods.shared.module_watch import ModuleWatch, leaves_beyond

PASSED = (Tensor, int, float, str, type(None))  # what a layer may return beside tuples of these
NUM_GRAPHS = 1  # passes whose graph is searched for parameters of other layers


class PureLayer(nn.Module):
    """A user's layer. `title`: its place and class, for errors. `takes_tuple`: True: several values come as one tuple,
    as nn.Sequential passes them on; False: as arguments.

    Raises ValueError in a pass that changes what ModuleWatch compares, that reads a parameter of another layer, or that
    returns a value other than tensors.
    """

    def __init__(self, title: str, layer: nn.Module, *, takes_tuple: bool = False) -> None:
        super().__init__()
        self.title, self.layer, self.takes_tuple = title, layer, takes_tuple
        # The input is kept for the recompute, so a layer that is made to change it works on a copy.
        self.copies_input = any(getattr(module, "inplace", False) for module in layer.modules())
        self.watch: ModuleWatch | None = None
        self.num_graphs = NUM_GRAPHS

    def forward(self, *x: Any) -> Any:
        if self.watch is None:
            self.watch = ModuleWatch(self.layer)
        before = self.watch.state(x)
        inputs = map_tensors(torch.clone, x) if self.copies_input else x
        is_fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # without gradients attention has the bits that it has with them
        try:
            y = self.layer(inputs) if self.takes_tuple and len(x) > 1 else self.layer(*inputs)
        except RuntimeError as error:
            if "in-place" in str(error) or "inplace" in str(error):
                raise ValueError(
                    f"{self.title}: expected a forward pass that changes nothing, got one that changes its input or a"
                    " parameter in place; try a new tensor"
                ) from error
            raise
        finally:
            torch.backends.mha.set_fastpath_enabled(is_fast)
        if change := self.watch.change(before):
            raise ValueError(
                f"{self.title}: expected a forward pass that changes nothing, as it runs twice and on a copy, got one"
                f" that changes {change}; try to compute it anew in each pass, or to return it"
            )
        self._refuse_leaves(x, y)
        return y

    def _refuse_leaves(self, x: Any, y: Any) -> None:
        if self.num_graphs and torch.is_grad_enabled():
            self.num_graphs -= 1
            inside = {id(parameter) for parameter in self.layer.parameters()}
            if any(id(leaf) not in inside for leaf in leaves_beyond(y, x)):
                raise ValueError(
                    f"{self.title} computes with a parameter that is not one of its own; register it in this layer,"
                    " too, as a tied weight"
                )


class MiddleLayer(PureLayer):
    """A user's layer before the last one: returns a tensor, or a tuple of tensors and None."""

    def forward(self, *x: Any) -> Any:
        y = super().forward(*x)
        for part in y if isinstance(y, tuple) else (y,):
            if not isinstance(part, PASSED):
                raise ValueError(
                    f"{self.title} returns a {type(part).__name__}; expected a tensor, or a tuple of tensors, which the"
                    " next layer takes as its arguments"
                )
        return y


class LastLayer(PureLayer):
    """The last layer with the criterion: computes the loss from the layer's inputs and the targets."""

    def __init__(self, title: str, layer: nn.Module, criterion: Callable[..., Tensor], *, takes_tuple: bool) -> None:
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
