"""Defines a unit: the forward pass, the backward pass or the update of one shard.

A unit reads its arguments and the shard's slabs on the host. A unit writes to the host only at its end, so a failed
unit can be repeated on any device. With intermediates `checkpointed` the host keeps each layer's input and the random
state before the layer, and the backward unit recomputes the layer. With `saved` the host keeps the tensors that
autograd saves; weights are not among these tensors, because the backward unit finds them in the shard's slot.

The boundary between two layers is a tuple of tensors. A unit takes one micro-batch after the other through its shard
and sums their gradients, so the shard is fetched once for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_map

from methods.sharding.shard import Version

Tensors = tuple[Any, ...]
# Kinds of units. The papers call the first three F, FB and B; the fourth is the optimizer's update.
FORWARD, LOSS, BACKWARD, UPDATE = "forward", "loss", "backward", "update"
INTERMEDIATES = ("checkpointed", "saved")


class RecomputeInput(NamedTuple):
    """What a recompute of a layer needs: the layer's input, and the random state before its forward pass."""

    x: Tensors
    random_state: Any


class Unit(NamedTuple):
    """One unit and its arguments. `x` and `dy`: for each micro-batch, the tensors that enter the shard in the forward
    pass, and the gradients that enter it in the backward pass. All tensors are on the host."""

    model: int
    shard: int
    kind: str
    version: Version
    x: Sequence[Tensors] = ()
    targets: Sequence[Any] = ()  # of each micro-batch
    dy: Sequence[Tensors] = ()
    recompute_inputs: Any = None  # for a backward unit: for each layer, a RecomputeInput of each micro-batch
    random_state: Any = None  # the model's random state; None: the process's own is used
    factor: Tensor | None = None  # clip factor of the update; None: no clipping
    learning_rate: float | None = None  # learning rate of the update; None: the rate that the optimizer has
    # later: the update is a unit of its own. now: the update is part of the backward unit. clipped: like now, with the
    # gradients clipped by the shard's norm.
    update: str = "later"
    rehearses: bool = False  # True: the unit copies nothing to the host's slabs
    # number of the half of the batch, 0 or 1; each half has a host slab for its gradients; None: the whole batch
    batch_half: int | None = None


class Result(NamedTuple):
    """A unit's result. The model's next unit needs it. Loss and norms are on the device until Worker.finish()
    copies them; other tensors are on the host."""

    # for each micro-batch: the output of a forward pass, or the gradient of the input from a backward pass
    y: Sequence[Tensors] = ()
    recompute_inputs: Any = None  # of a forward unit: for each layer, a RecomputeInput of each micro-batch
    random_state: Any = None
    loss: Tensor | None = None
    # gradient norms of the shard's trained parameters, fp32; None: no gradient
    norms: list[Tensor] | None = None


def needed_parts(unit: Unit) -> set[str]:
    """Return the parts of a shard that a unit needs on the device: names of PARTS, or "borrowed"."""
    if unit.kind == UPDATE:
        return {"weights", "grads", "states"}
    computes = {"weights", "borrowed"}
    return computes if unit.kind == FORWARD or unit.update == "later" else computes | {"states"}


def map_tensors(function: Callable[[Tensor], Any], values: Iterable[Any]) -> Tensors:
    """Return the values as a tuple, with the function applied to each tensor, also to tensors in lists and dicts."""
    return tuple(_map_value(function, value) for value in values)


def _map_value(function: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if value is None:  # at once, without a walk through a tree
        return None
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)
