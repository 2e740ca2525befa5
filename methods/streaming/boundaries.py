"""Boundaries on the host: each layer's input, which its recompute needs, goes home and comes back beside compute.

The device has room for few boundaries: a ring of slots that layers take in turn. A layer copies its input into its
slot, from where it goes home while the layer computes. In the backward pass a layer that is done leaves its slot to the
one whose boundary comes back next, while the layer between them computes. The top layers' boundaries stay in their
slots, so the turn from forward to backward brings nothing back.

Shapes: B samples of a micro-batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from harness.core.gpt import DTYPES
from harness.core.job import Workload
from harness.devices.streams import Device
from methods.offload.transfer import copy
from methods.streaming.placement import num_boundaries


class BoundarySlot:
    """Room on the device for the input of one layer at a time, all micro-batches of it."""

    def __init__(self, device: Device, numel: int, workload: Workload) -> None:
        self.slab = device.room(numel, DTYPES[workload.dtype], host=False)
        self.drained: Any = None  # event: the last boundary has gone home


class Boundary:
    """The input of the layer `of` while it waits for the backward pass. `below`: the boundary that takes the slot next
    in the backward pass. `above`: whether another takes it next in the forward pass, so that this one must go home."""

    def __init__(self, device: Device, of: str, slot: BoundarySlot, below: Boundary | None, *, above: bool) -> None:
        self.device, self.of, self.slot, self.below = device, of, slot, below
        self.home = device.room(len(slot.slab), slot.slab.dtype, host=True) if above else None
        self.returned: Any = None  # event: the boundary is in the slot again

    def keep(self, xs: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Copy the inputs, (B, T, D) each, into the slot and queue the copy home; return them in the slot."""
        if self.slot.drained is not None:
            # The copy home may still be reading the last boundary: wait for it, not for the device.
            self.device.compute.wait_event(self.slot.drained)
        parts = self.slot.slab.chunk(len(xs))
        kept: list[tuple[Any, ...]] = [(_filled(part, x),) for part, (x,) in zip(parts, xs, strict=True)]
        if self.home is not None:
            done, pairs = self.device.compute.record_event(), [(self.home, self.slot.slab)]
            self.slot.drained = copy(self.device, "outbound", "boundary", self.of, [done], pairs)
        return kept

    def arrive(self) -> None:
        """Make compute wait until the input is in the slot."""
        if self.returned is not None:
            self.device.compute.wait_event(self.returned)
            self.returned = None

    def leave(self) -> None:
        """After the backward pass, leave the slot to the boundary that is needed next, and queue its copy."""
        if self.below is not None:
            self.below.come_back()

    def come_back(self) -> None:
        """Queue the copy back. The input has arrived at home: compute waited for that before it reused the slot."""
        assert self.home is not None
        free, pairs = self.device.compute.record_event(), [(self.slot.slab, self.home)]
        self.returned = copy(self.device, "inbound", "boundary", self.of, [free], pairs)


def boundaries_on_host(device: Device, layers: Sequence[str], workload: Workload) -> list[Boundary]:
    """Return the boundaries of the layers of these names, bottom first, with their memory."""
    numel = workload.boundary_bytes // workload.weight_bytes // device.ranks.num_ranks
    slots = [BoundarySlot(device, numel, workload) for _ in range(num_boundaries(len(layers)))]
    made: list[Boundary] = []
    for place, of in enumerate(layers):
        below = made[place - len(slots)] if place >= len(slots) else None
        above = place + len(slots) < len(layers)
        made.append(Boundary(device, of, slots[place % len(slots)], below, above=above))
    return made


def _filled(part: Tensor, x: Tensor) -> Tensor:
    """Return the copy of x in this part of a slot. autograd does not see that other layers overwrite the slot: `data`
    counts its changes apart."""
    return part.view(x.shape).copy_(x.detach()).data.requires_grad_(x.requires_grad)
