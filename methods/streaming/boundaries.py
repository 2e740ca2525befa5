"""Boundaries on the host: each layer's inputs, which its recompute needs, go home and come back beside compute.

The device has room for few boundaries: a ring of slots that layers take in turn. A layer copies its inputs into its
slot, from where they go home while the layer computes. In the backward pass a layer that is done leaves its slot to the
one whose boundary comes back next, while the layer between them computes. The top layers' boundaries stay in their
slots, so the turn from forward to backward brings nothing back.

Of a micro-batch, what travels is the inputs that require a gradient; a user's model may hand each layer others, such as
masks, which it keeps itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from harness.devices.streams import Device
from methods.offload.transfer import copy
from methods.streaming.placement import num_boundaries

ALIGNED = 16  # bytes at whose multiples an input begins in a slot


class BoundarySlot:
    """Room on the device for the inputs of one layer at a time, all micro-batches of it: bytes, more of them once a
    batch needs more."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.device, self.slab = device, device.room(num_bytes, torch.uint8, host=False)
        self.copied: Any = None  # event: the last copy out of the slot, or into it, is done

    def take(self, num_bytes: int) -> Tensor:
        """Return this much of the slot. The last copy may still be reading or filling it: compute waits for that, not
        for the device."""
        if self.copied is not None:
            self.device.compute.wait_event(self.copied)
        if len(self.slab) < num_bytes:
            del self.slab  # before the larger one is made
            self.slab = self.device.room(num_bytes, torch.uint8, host=False)
        return self.slab[:num_bytes]


class Boundary:
    """The inputs of the layer `of` while they wait for the backward pass. `below`: the boundary that takes the slot
    next in the backward pass. `above`: whether another takes it next in the forward pass, so that this one must go
    home."""

    def __init__(
        self, device: Device, of: str, slot: BoundarySlot, below: Boundary | None, *, above: bool, num_bytes: int
    ) -> None:  # fmt: skip
        self.device, self.of, self.slot, self.below, self.above = device, of, slot, below, above
        self.home = torch.empty(0, dtype=torch.uint8)
        self.kept: Tensor | None = None  # the part of the slot that the inputs fill
        self.returned: Any = None  # event: the inputs are in the slot again
        if above:
            self._grow(num_bytes)

    def keep(self, xs: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Copy the inputs that travel into the slot and queue the copy home; return all inputs, those in the slot. With
        gradients off no backward pass follows, and nothing is kept."""
        if not torch.is_grad_enabled():
            return xs
        sizes = (-(-each.nbytes // ALIGNED) * ALIGNED for x in xs for each in x if _travels(each))
        places = list(pairwise(accumulate(sizes, initial=0)))
        self.kept = room = self.slot.take(places[-1][1] if places else 0)
        parts = iter([room[start:end] for start, end in places])
        kept = [tuple(_filled(next(parts), each) if _travels(each) else each for each in x) for x in xs]
        if self.above:
            self._grow(len(room))
            done, pairs = self.device.compute.record_event(), [(self.home[: len(room)], room)]
            self.slot.copied = copy(self.device, "outbound", "boundary", self.of, [done], pairs)
        return kept

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its slot."""
        return len(self.slot.slab)

    def arrive(self) -> None:
        """Make compute wait until the inputs are in the slot."""
        if self.returned is not None:
            self.device.compute.wait_event(self.returned)
            self.returned = None

    def leave(self) -> None:
        """After the backward pass, leave the slot to the boundary that is needed next, and queue its copy."""
        self.kept = None
        if self.below is not None:
            self.below.come_back()

    def come_back(self) -> None:
        """Queue the copy back. The inputs have arrived at home: compute waited for that before it reused the slot."""
        assert self.kept is not None
        free, pairs = self.device.compute.record_event(), [(self.kept, self.home[: len(self.kept)])]
        self.returned = self.slot.copied = copy(self.device, "inbound", "boundary", self.of, [free], pairs)

    def _grow(self, num_bytes: int) -> None:
        """Make the home at least as large."""
        if len(self.home) < num_bytes:
            self.device.unlock_room(self.home)
            del self.home  # before the larger one is made
            self.home = self.device.room(num_bytes, torch.uint8, host=True)


def boundaries_on_host(device: Device, layers: Sequence[str], num_bytes: int) -> list[Boundary]:
    """Return the boundaries of the layers of these names, bottom first, each with memory of `num_bytes`."""
    slots = [BoundarySlot(device, num_bytes) for _ in range(num_boundaries(len(layers)))]
    made: list[Boundary] = []
    for place, of in enumerate(layers):
        below = made[place - len(slots)] if place >= len(slots) else None
        above, slot = place + len(slots) < len(layers), slots[place % len(slots)]
        made.append(Boundary(device, of, slot, below, above=above, num_bytes=num_bytes))
    return made


def _travels(x: Any) -> bool:
    """True for an input that only this layer keeps; parameters that several layers share stay where they are."""
    return isinstance(x, Tensor) and x.requires_grad and not isinstance(x, nn.Parameter)


def _filled(part: Tensor, x: Tensor) -> Tensor:
    """Return the copy of x in this part of a slot; with its strides, if they leave no gaps. autograd does not see that
    other layers overwrite the slot: `data` counts its changes apart."""
    room = part[: x.nbytes].view(x.dtype)
    is_dense = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) == x.numel()
    room = room.as_strided(x.shape, x.stride()) if is_dense else room.view(x.shape)
    return room.copy_(x.detach()).data.requires_grad_()
