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
from methods.shared.memory_needs import round_up
from methods.streaming.placement.placement import num_boundaries

ALIGNMENT_BYTES = 16  # each input begins in a slot at a multiple of this many bytes


class BoundarySlot:
    """Room on the device for the inputs of one layer at a time, from all micro-batches of a step. The room grows when a
    batch needs more bytes."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self.device, self.slab = device, device.room(num_bytes, torch.uint8, host=False)
        # event: the last copy out of the slot, or into the slot, is complete; None: no copy yet
        self.copied_event: Any = None

    def take(self, num_bytes: int) -> Tensor:
        """Return the first `num_bytes` of the slot; grow the slot if it has fewer. The last copy may still read or fill
        the slot: make the compute stream wait for this copy alone."""
        if self.copied_event is not None:
            self.device.compute.wait_event(self.copied_event)
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
        self.device, self.layer_name, self.slot = slot.device, layer_name, slot
        self.below, self.goes_home = below, goes_home
        self.host_room = torch.empty(0, dtype=torch.uint8)
        # the part of the slot that the inputs fill; None: no inputs are kept
        self.kept_inputs: Tensor | None = None
        # event: the inputs are in the slot again; None: compute need not wait for the inputs
        self.returned_event: Any = None
        if goes_home:
            self._grow(num_bytes)

    def keep(self, inputs_of_micro_batches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Copy the inputs that travel into the slot, and queue their copy to the host. Return all inputs; the inputs
        that travel are now views of the slot. If torch's gradients are off, no backward pass follows, so nothing is
        kept."""
        if not torch.is_grad_enabled():
            return inputs_of_micro_batches
        inputs_that_travel = filter(_travels, chain.from_iterable(inputs_of_micro_batches))
        slot_sizes = (round_up(tensor.nbytes, ALIGNMENT_BYTES) for tensor in inputs_that_travel)
        slot_ranges = list(pairwise(accumulate(slot_sizes, initial=0)))
        self.kept_inputs = slot_room = self.slot.take(slot_ranges[-1][1] if slot_ranges else 0)
        slot_parts = iter([slot_room[start:end] for start, end in slot_ranges])
        kept_inputs = []
        for inputs in inputs_of_micro_batches:
            kept_inputs.append(
                tuple(
                    _keep_in_slot(next(slot_parts), tensor) if _travels(tensor) else tensor
                    for tensor in inputs
                )
            )
        if self.goes_home:
            self._grow(len(slot_room))
            done_event, pairs = (
                self.device.compute.record_event(),
                [(self.host_room[: len(slot_room)], slot_room)],
            )
            self.slot.copied_event = copy(
                self.device, "outbound", "boundary", self.layer_name, [done_event], pairs
            )
        return kept_inputs

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the boundary's slot."""
        return len(self.slot.slab)

    def arrive(self) -> None:
        """Make the compute stream wait until the inputs are in the slot."""
        if self.returned_event is not None:
            self.device.compute.wait_event(self.returned_event)
            self.returned_event = None

    def leave(self) -> None:
        """After the layer's backward pass, queue the copy of the next boundary from the host into this slot."""
        self.kept_inputs = None
        if self.below is not None:
            self.below.come_back()

    def come_back(self) -> None:
        """Queue the copy of the inputs from the host into the slot. Their copy to the host is complete: the compute
        stream waited for this copy before it reused the slot."""
        assert self.kept_inputs is not None
        free_event = self.device.compute.record_event()
        pairs = [(self.kept_inputs, self.host_room[: len(self.kept_inputs)])]
        self.returned_event = self.slot.copied_event = copy(
            self.device, "inbound", "boundary", self.layer_name, [free_event], pairs
        )

    def _grow(self, num_bytes: int) -> None:
        """Make the memory on the host at least `num_bytes` large."""
        if len(self.host_room) < num_bytes:
            self.device.unlock_room(self.host_room)
            del self.host_room  # free the old memory before the larger one is made
            self.host_room = self.device.room(num_bytes, torch.uint8, host=True)


def boundaries_on_host(device: Device, layer_names: Sequence[str], num_bytes: int) -> list[Boundary]:
    """Return a boundary for each of the layers of these names, bottom first. Each slot has `num_bytes` at first, and
    so has each boundary's memory on the host, if the boundary needs any."""
    slots = [BoundarySlot(device, num_bytes) for _ in range(num_boundaries(len(layer_names)))]
    boundaries: list[Boundary] = []
    for layer_index, layer_name in enumerate(layer_names):
        below = boundaries[layer_index - len(slots)] if layer_index >= len(slots) else None
        goes_home, slot = layer_index + len(slots) < len(layer_names), slots[layer_index % len(slots)]
        boundaries.append(Boundary(layer_name, slot, below, goes_home=goes_home, num_bytes=num_bytes))
    return boundaries


def _travels(x: Any) -> bool:
    """True for an input that is copied to the host: a tensor that requires a gradient, and is no parameter. Parameters
    that several layers share stay on the device."""
    return isinstance(x, Tensor) and x.requires_grad and not isinstance(x, nn.Parameter)


def _keep_in_slot(slot_part: Tensor, x: Tensor) -> Tensor:
    """Return a copy of x in this part of a slot, with x's strides if these leave no gaps. The copy is returned through
    `.data`, so that autograd does not notice when other layers overwrite the slot."""
    slot_view = slot_part[: x.nbytes].view(x.dtype)
    last_element = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    is_dense = last_element + 1 == x.numel()
    slot_view = slot_view.as_strided(x.shape, x.stride()) if is_dense else slot_view.view(x.shape)
    return slot_view.copy_(x.detach()).data.requires_grad_()
