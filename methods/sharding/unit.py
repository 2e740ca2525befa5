"""A unit: the forward pass, the backward pass or the update of one shard.

A unit reads its arguments and the shard at home, and writes home only at its end, so a failed unit can be repeated on
any device. With `checkpointed` the host keeps each layer's input and the random state before the layer, which is
recomputed. With `saved` the host keeps the tensors that autograd saves, except the weights, which the backward pass
finds in the shard's slot.

Boundaries between layers are tuples of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from methods.sharding.shard import Version

Tensors = tuple[Any, ...]
# The papers call the first three F, FB and B; the fourth is the optimizer's update.
FORWARD, LOSS, BACKWARD, UPDATE = "forward", "loss", "backward", "update"
INTERMEDIATES = ("checkpointed", "saved")


class Kept(NamedTuple):
    """A layer's input in the forward pass, and the random state before it."""

    x: Tensors
    random: Any


class Unit(NamedTuple):
    """One unit and its arguments. Tensors are on the host."""

    model: int
    shard: int
    kind: str
    version: Version
    x: Tensors = ()
    targets: Any = None
    dy: Tensors = ()
    kept: Any = None  # Kept of each layer, from the forward pass
    random: Any = None  # the model's random state
    factor: Tensor | None = None  # clip factor of the update
    learning_rate: float | None = None  # None: the learning rate that the optimizer has
    update: str = "later"  # later: a unit of its own; now: in the backward unit; clipped: as now, by the shard's norm
    rehearses: bool = False  # True: copies nothing home
    part: int | None = None  # half of the batch, 0 or 1, with its own slab of gradients at home; None: the whole batch


class Result(NamedTuple):
    """A unit's result, for the model's next unit. Loss and norms are on the device, other tensors on the host."""

    y: Tensors = ()  # output of a forward pass, or the input's gradient of a backward pass
    kept: Any = None
    random: Any = None
    loss: Tensor | None = None
    norms: list[Tensor] | None = None  # gradient norms of the shard's trained parameters, fp32


def parts_of(unit: Unit) -> set[str]:
    """Return the parts of its shard that a unit needs on the device."""
    if unit.kind == UPDATE:
        return {"weights", "grads", "states"}
    computes = {"weights", "borrowed"}
    return computes if unit.kind == FORWARD or unit.update == "later" else computes | {"states"}


def map_tensors(function: Callable[[Tensor], Any], values: Iterable[Any]) -> Tensors:
    """Apply the function to tensors; other values stay as they are."""
    return tuple(function(value) if isinstance(value, Tensor) else value for value in values)
