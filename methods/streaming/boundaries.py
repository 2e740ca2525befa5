"""Boundaries on the host: each layer's inputs, needed for the recompute, go to the host and come back while the device
computes.

The device has room for few boundaries: a ring of slots that layers take in turn. A layer copies its inputs into its
slot; from the slot a copy goes home to the host while the layer computes. In the backward pass, a layer that is done
leaves its slot to the boundary that comes back next, while another layer computes. The top layers' boundaries stay in
their slots, so the turn from forward to backward brings nothing back.

Only inputs that require a gradient travel. A user's model may give a layer other inputs, such as masks, which the model
keeps itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from harness.devices.streams import Device
from methods.offload.transfer import copy
from methods.shared.memory_needs import aligned
from methods.streaming.placement.placement import num_boundaries

ALIGNED = 16  # each input begins in a slot at a multiple of this many bytes


class BoundarySlot:
    """Room on the device for the inputs of one layer at a time, from all micro-batches of a step. The room grows when a
    batch needs more bytes."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.device, self.slab = device, device.room(num_bytes, torch.uint8, host=False)
        # event at the end of the last copy out of the slot or into the slot; None: no copy yet
        self.copied: Any = None

    def take(self, num_bytes: int) -> Tensor:
        """Return the first `num_bytes` of the slot; grow the slot if it has fewer. The last copy may still read or fill
        the slot: make the compute stream wait for this copy alone."""
        if self.copied is not None:
            self.device.compute.wait_event(self.copied)
        if len(self.slab) < num_bytes:
            del self.slab  # frees the old memory first, unless another layer's inputs are in it
            self.slab = self.device.room(num_bytes, torch.uint8, host=False)
        return self.slab[:num_bytes]


class Boundary:
    """The inputs of the layer `of` while they wait for the backward pass. `below`: the boundary that takes the slot
    next in the backward pass; None: no boundary takes it. `above`: True if another boundary takes the slot in the
    forward pass, so that these inputs must go home to the host."""

    def __init__(
        self, of: str, slot: BoundarySlot, below: Boundary | None, *, above: bool, num_bytes: int
    ) -> None:
        self.device, self.of, self.slot, self.below, self.above = slot.device, of, slot, below, above
        self.home = torch.empty(0, dtype=torch.uint8)
        self.kept: Tensor | None = None  # the part of the slot that the inputs fill; None: no inputs are kept
        # event: the inputs are in the slot again; None: compute need not wait for the inputs
        self.returned: Any = None
        if above:
            self._grow(num_bytes)

    def keep(self, xs: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Copy the inputs that travel into the slot, and queue their copy to the host. Return all inputs; the inputs
        that travel are now views of the slot. If torch's gradients are off, no backward pass follows, so nothing is
        kept."""
        if not torch.is_grad_enabled():
            return xs
        travelling = filter(_travels, chain.from_iterable(xs))
        sizes = (aligned(tensor.nbytes, ALIGNED) for tensor in travelling)
        places = list(pairwise(accumulate(sizes, initial=0)))
        self.kept = room = self.slot.take(places[-1][1] if places else 0)
        parts = iter([room[start:end] for start, end in places])
        kept = [
            tuple(_kept_in_slot(next(parts), tensor) if _travels(tensor) else tensor for tensor in x)
            for x in xs
        ]
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
        """Make the compute stream wait until the inputs are in the slot."""
        if self.returned is not None:
            self.device.compute.wait_event(self.returned)
            self.returned = None

    def leave(self) -> None:
        """After the layer's backward pass, leave the slot to the next boundary, and queue that boundary's copy back."""
        self.kept = None
        if self.below is not None:
            self.below.come_back()

    def come_back(self) -> None:
        """Queue the copy of the inputs from home into the slot. The inputs have reached home: the compute stream waited
        for their copy before it reused the slot."""
        assert self.kept is not None
        free, pairs = self.device.compute.record_event(), [(self.kept, self.home[: len(self.kept)])]
        self.returned = self.slot.copied = copy(self.device, "inbound", "boundary", self.of, [free], pairs)

    def _grow(self, num_bytes: int) -> None:
        """Make the memory at home at least `num_bytes` large."""
        if len(self.home) < num_bytes:
            self.device.unlock_room(self.home)
            del self.home  # free the old memory before the larger one is made
            self.home = self.device.room(num_bytes, torch.uint8, host=True)


def boundaries_on_host(device: Device, layers: Sequence[str], num_bytes: int) -> list[Boundary]:
    """Return a boundary for each of the layers of these names, bottom first. Each slot, and each home that is needed,
    has `num_bytes` at first."""
    slots = [BoundarySlot(device, num_bytes) for _ in range(num_boundaries(len(layers)))]
    boundaries: list[Boundary] = []
    for place, of in enumerate(layers):
        below = boundaries[place - len(slots)] if place >= len(slots) else None
        above, slot = place + len(slots) < len(layers), slots[place % len(slots)]
        boundaries.append(Boundary(of, slot, below, above=above, num_bytes=num_bytes))
    return boundaries


def _travels(x: Any) -> bool:
    """True for an input that goes home: a tensor that requires a gradient, and is no parameter. Parameters that several
    layers share stay on the device."""
    return isinstance(x, Tensor) and x.requires_grad and not isinstance(x, nn.Parameter)


def _kept_in_slot(part: Tensor, x: Tensor) -> Tensor:
    """Return a copy of x in this part of a slot, with x's strides if they leave no gaps. The copy is returned through
    `.data`, so that autograd does not notice when other layers overwrite the slot."""
    room = part[: x.nbytes].view(x.dtype)
    is_dense = (
        1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) == x.numel()
    )
    room = room.as_strided(x.shape, x.stride()) if is_dense else room.view(x.shape)
    return room.copy_(x.detach()).data.requires_grad_()
