"""Boundaries on the host: each layer's inputs, needed for the recompute, go to the host and come back while the device
computes.

The device has room for few boundaries: a ring of slots that layers take in turn. A layer copies its inputs into its
slot; from there they go home while the layer computes. In the backward pass, a layer that is done leaves its slot to
the boundary that comes back next, while another layer computes. The top layers' boundaries stay in their slots, so the
turn from forward to backward brings nothing back.

Only inputs that require a gradient travel. A user's model may give a layer other inputs, such as masks, which the model
keeps itself.
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

ALIGNED = 16  # each input begins in a slot at a multiple of this many bytes


class BoundarySlot:
    """Room on the device for the inputs of one layer at a time, from all micro-batches of a step. The room grows when a
    batch needs more bytes."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.device, self.slab = device, device.room(num_bytes, torch.uint8, host=False)
        self.copied: Any = None  # event: the last copy out of the slot, or into it, is done

    def take(self, num_bytes: int) -> Tensor:
        """Return the first `num_bytes` of the slot; grow the slot if it has fewer. The last copy may still read or fill
        the slot: compute waits for this copy, not for the device."""
        if self.copied is not None:
            self.device.compute.wait_event(self.copied)
        if len(self.slab) < num_bytes:
            del self.slab  # before the larger one is made
            self.slab = self.device.room(num_bytes, torch.uint8, host=False)
        return self.slab[:num_bytes]


class Boundary:
    """The inputs of the layer `of` while they wait for the backward pass. `below`: the boundary that takes the slot
    next in the backward pass. `above`: True if another boundary takes the slot in the forward pass, so that this one
    must go home."""

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
        """Copy the inputs that travel into the slot, and queue the copy home. Return all inputs; those that travel are
        views of the slot. With gradients off no backward pass follows, and nothing is kept."""
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
        """Return the bytes of the boundary's slot."""
        return len(self.slot.slab)

    def arrive(self) -> None:
        """Make compute wait until the inputs are in the slot."""
        if self.returned is not None:
            self.device.compute.wait_event(self.returned)
            self.returned = None

    def leave(self) -> None:
        """Leave the slot, after the backward pass, to the next boundary, and queue the copy of that boundary."""
        self.kept = None
        if self.below is not None:
            self.below.come_back()

    def come_back(self) -> None:
        """Queue the copy back. The inputs have arrived at home: compute waited for their arrival before it reused the
        slot."""
        assert self.kept is not None
        free, pairs = self.device.compute.record_event(), [(self.kept, self.home[: len(self.kept)])]
        self.returned = self.slot.copied = copy(self.device, "inbound", "boundary", self.of, [free], pairs)

    def _grow(self, num_bytes: int) -> None:
        """Make the home at least this large."""
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
    """Return a copy of x in this part of a slot, with x's strides if they leave no gaps. `data` counts its changes
    apart, so autograd does not see that other layers overwrite the slot."""
    room = part[: x.nbytes].view(x.dtype)
    is_dense = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) == x.numel()
    room = room.as_strided(x.shape, x.stride()) if is_dense else room.view(x.shape)
    return room.copy_(x.detach()).data.requires_grad_()
