"""Boundaries on the host: each layer's inputs, needed for the recompute, go to the host and come back while the device
computes.

The device has room for few boundaries: a ring of slots that layers use in turn. A layer copies its inputs into its
slot; while the layer computes, the inputs are copied from the slot to the host. After a layer's backward pass the next
boundary is copied back into the layer's slot, while another layer computes. The boundaries of the top layers stay in
their slots, so that nothing is copied between the forward and the backward pass.

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
        # event: the last copy out of the slot, or into the slot, is complete; None: no copy yet
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
    """The inputs of the layer `layer_name` while they wait for the backward pass. `below`: the boundary that uses the
    slot next in the backward pass; None: no boundary does. `goes_home`: True if another boundary uses the slot later in
    the forward pass, so that these inputs must be copied to the host."""

    def __init__(
        self, layer_name: str, slot: BoundarySlot, below: Boundary | None, *, goes_home: bool, num_bytes: int
    ) -> None:
        self.device, self.layer_name, self.slot, self.below, self.goes_home = (
            slot.device,
            layer_name,
            slot,
            below,
            goes_home,
        )
        self.home = torch.empty(0, dtype=torch.uint8)
        self.kept_inputs: Tensor | None = (
            None  # the part of the slot that the inputs fill; None: no inputs are kept
        )
        # event: the inputs are in the slot again; None: compute need not wait for the inputs
        self.returned: Any = None
        if goes_home:
            self._grow(num_bytes)

    def keep(self, xs: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Copy the inputs that travel into the slot, and queue their copy to the host. Return all inputs; the inputs
        that travel are now views of the slot. If torch's gradients are off, no backward pass follows, so nothing is
        kept."""
        if not torch.is_grad_enabled():
            return xs
        inputs_that_travel = filter(_travels, chain.from_iterable(xs))
        sizes = (aligned(tensor.nbytes, ALIGNED) for tensor in inputs_that_travel)
        places = list(pairwise(accumulate(sizes, initial=0)))
        self.kept_inputs = room = self.slot.take(places[-1][1] if places else 0)
        slot_parts = iter([room[start:end] for start, end in places])
        kept = [
            tuple(_kept_in_slot(next(slot_parts), tensor) if _travels(tensor) else tensor for tensor in x)
            for x in xs
        ]
        if self.goes_home:
            self._grow(len(room))
            done, pairs = self.device.compute.record_event(), [(self.home[: len(room)], room)]
            self.slot.copied = copy(self.device, "outbound", "boundary", self.layer_name, [done], pairs)
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
        """After the layer's backward pass, queue the copy of the next boundary from the host into this slot."""
        self.kept_inputs = None
        if self.below is not None:
            self.below.come_back()

    def come_back(self) -> None:
        """Queue the copy of the inputs from the host into the slot. Their copy to the host is complete: the compute
        stream waited for this copy before it reused the slot."""
        assert self.kept_inputs is not None
        free, pairs = (
            self.device.compute.record_event(),
            [(self.kept_inputs, self.home[: len(self.kept_inputs)])],
        )
        self.returned = self.slot.copied = copy(
            self.device, "inbound", "boundary", self.layer_name, [free], pairs
        )

    def _grow(self, num_bytes: int) -> None:
        """Make the memory on the host at least `num_bytes` large."""
        if len(self.home) < num_bytes:
            self.device.unlock_room(self.home)
            del self.home  # free the old memory before the larger one is made
            self.home = self.device.room(num_bytes, torch.uint8, host=True)


def boundaries_on_host(device: Device, layer_names: Sequence[str], num_bytes: int) -> list[Boundary]:
    """Return a boundary for each of the layers of these names, bottom first. Each slot has `num_bytes` at first, and
    so has each boundary's memory on the host, if the boundary needs any."""
    slots = [BoundarySlot(device, num_bytes) for _ in range(num_boundaries(len(layer_names)))]
    boundaries: list[Boundary] = []
    for place, layer_name in enumerate(layer_names):
        below = boundaries[place - len(slots)] if place >= len(slots) else None
        goes_home, slot = place + len(slots) < len(layer_names), slots[place % len(slots)]
        boundaries.append(Boundary(layer_name, slot, below, goes_home=goes_home, num_bytes=num_bytes))
    return boundaries


def _travels(x: Any) -> bool:
    """True for an input that is copied to the host: a tensor that requires a gradient, and is no parameter. Parameters
    that several layers share stay on the device."""
    return isinstance(x, Tensor) and x.requires_grad and not isinstance(x, nn.Parameter)


def _kept_in_slot(part: Tensor, x: Tensor) -> Tensor:
    """Return a copy of x in this part of a slot, with x's strides if these leave no gaps. The copy is returned through
    `.data`, so that autograd does not notice when other layers overwrite the slot."""
    room = part[: x.nbytes].view(x.dtype)
    is_dense = (
        1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) == x.numel()
    )
    room = room.as_strided(x.shape, x.stride()) if is_dense else room.view(x.shape)
    return room.copy_(x.detach()).data.requires_grad_()
