"""The memory for the gradients of a layer's parameters: views of a slab, which the layer's backward pass fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEFT_OUTSIDE = (
    "{}: expected gradients only through the layer's arguments and results, got one through a tensor that the layer has"
    " left elsewhere, such as an auxiliary loss; try to return this tensor"
)


@dataclass
class GradientViews:
    """By a parameter's name, the memory for its gradient: a view of a slab. `is_open`: the backward pass that fills the
    slab runs."""

    views: dict[str, Tensor]
    is_open: bool


def settle_gradient(rooms: GradientViews, prefix: str, name: str, parameter: Tensor) -> None:
    """Copy a parameter's gradient, which a backward pass has just computed, to its place in the slab, unless the
    gradient is already there. Raises ValueError outside of the layer's own backward pass: the slab may be another
    layer's now."""
    if torch.is_grad_enabled():
        raise ValueError(
            "expected backward() without create_graph=True, got a backward pass to differentiate"
        )
    if not rooms.is_open:
        raise ValueError(LEFT_OUTSIDE.format(prefix.rstrip(".")))
    if parameter.grad is not None and parameter.grad is not rooms.views[name]:
        rooms.views[name].copy_(parameter.grad)
        parameter.grad = rooms.views[name]
