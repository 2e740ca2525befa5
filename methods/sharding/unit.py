"""What a device does for a model in one turn: the forward pass, the backward pass or the update of one shard.

A unit is a function of the shard at home and of what it is given; it writes home at its end only, so one that failed
can be repeated, there or elsewhere. `checkpointed` keeps of a forward pass the input of each layer and the random state
before it, on the host, and recomputes the layer. `saved` keeps what autograd saves, on the host as well; weights are
no part of that: they are found again in whichever slot the shard will lie.

Boundaries between layers are tuples of tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from methods.sharding.shard import Version

Tensors = tuple[Any, ...]
FORWARD, LOSS, BACKWARD, UPDATE = "forward", "loss", "backward", "update"  # the papers' F, FB, B; and the optimizer's
INTERMEDIATES = ("checkpointed", "saved")


class Kept(NamedTuple):
    """Of one layer's forward pass: its input, and the random state before it."""

    x: Tensors
    random: Any


class Unit(NamedTuple):
    """One turn: which shard of which model, what is done, and with what. Tensors on the host."""

    model: int
    shard: int
    kind: str
    version: Version
    x: Tensors = ()
    targets: Any = None
    dy: Tensors = ()
    kept: Any = None  # of the forward pass
    random: Any = None  # the model's random state
    factor: Tensor | None = None  # by which gradients are scaled before the update
    learning_rate: float | None = None  # None leaves the optimizer's own
    update: str = "later"  # or "now": with the backward pass; or "clipped": by the shard's own norm
    rehearses: bool = False  # nothing goes home: it is done to see whether it fits
    part: int | None = None  # 0 or 1: of a batch in two halves, whose gradients go home to slabs of their own


class Result(NamedTuple):
    """What a unit leaves for the model's next one. Tensors on the host; loss and norms on the device."""

    y: Tensors = ()  # a forward pass's output, a backward pass's gradient of the input
    kept: Any = None
    random: Any = None
    loss: Tensor | None = None
    norms: list[Tensor] | None = None  # of the gradient of each of the shard's trained parameters, fp32


def parts_of(unit: Unit) -> set[str]:
    """What of a shard a unit needs on the device."""
    if unit.kind == UPDATE:
        return {"weights", "grads", "states"}
    computes = {"weights", "borrowed"}
    return computes if unit.kind == FORWARD or unit.update == "later" else computes | {"states"}


def map_tensor(value: Any, function: Any) -> Any:
    return function(value) if isinstance(value, Tensor) else value
