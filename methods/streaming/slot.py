"""Room on the device for a layer whose home is the host or the disk, and the copies into and out of this room. The
training methods decide when a copy starts.

A slab is copied as one flat transfer. Only events order the three streams (compute, inbound,
outbound). The launching thread waits only until a copy is queued. Slots and slabs live as long as the run, so torch's
allocator never gives their memory to another stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from methods.offload.adamw import AdamStep, Factor
from methods.offload.state import State
from methods.offload.transfer import Pair, copy, copy_all, num_bytes, queue
from methods.shared.memory_needs import shared_numel
from methods.streaming.layer_state import LayerState, Passed


class Slot:
    """Room on the device for one layer's weights. If `holds_state`, the slot also holds the rest of the state and a
    gradient, so that the device can update the layer. `numel`: elements of the largest layer that the slot will hold;
    None: `layer` is the largest."""

    held: LayerState | None = (
        None  # the layer whose weights are, or come, into the slot; None: these may be old
    )

    def __init__(
        self, layer: LayerState, copier: Any = None, *, holds_state: bool = False, numel: int | None = None
    ) -> None:
        self.device, self.copier = layer.device, copier or layer.device.copier
        self.loaded: Future | None = None  # future of the weights' copy; None: no copy under way
        # future of the copy of the rest of the state; None: no such copy
        self.completed: Future | None = None
        self.sent: Any = None  # event: the updated state has left the slot; None: no update yet
        weights, *other_slabs = layer.current
        rooms = [
            None if slab is None or not holds_state else _room(layer, slab, numel) for slab in other_slabs
        ]
        self.state = State(_room(layer, weights, numel), *rooms)  # type: ignore[arg-type]
        self.grads = _room(layer, layer.grads, numel) if holds_state and len(layer.grads) else layer.grads

    def prefetch(self, layer: LayerState) -> None:
        """Queue the copy of the layer's weights into this slot, after the layer's update and the slot's last use."""
        layer.bind(self.state.weights)
        self.held = layer
        slab, ranks = self.state.weights[: layer.whole_numel], self.device.ranks
        self.loaded = self._fetch(
            layer, "weights", lambda: self._pairs(layer)[:1], lambda: ranks.gather(slab)
        )

    def prefetch_state(self, layer: LayerState, *, with_gradient: bool = False) -> None:
        """Queue the copies of the rest of the layer's state and, if the update has waited for the norm
        (`with_gradient`), of the gradient."""
        gradient_pairs = [(self.grads[: len(layer.grads)], layer.grads)] if with_gradient else []
        self.completed = self._fetch(layer, "state", lambda: [*self._pairs(layer)[1:], *gradient_pairs])

    def arrive(self) -> None:
        """Make the compute stream wait for the weights. The launching thread waits only until their copy is queued."""
        if self.loaded is not None:
            self.device.compute.wait_event(self.loaded.result())
            self.loaded = None

    def load(self, layer: LayerState) -> None:
        """Copy the layer's weights into this slot; make the compute stream and the host wait for the copy."""
        self.prefetch(layer)
        self.arrive()
        self.device.synchronize()

    def update(self, layer: LayerState, grads: Tensor, step: AdamStep, factor: Factor, target: State) -> None:
        """Run the device's AdamW on the state in this slot, and queue the copy of the new state home, into `target`."""
        if self.completed is not None:
            self.device.compute.wait_event(self.completed.result())
        with self.device.span("compute", "update", layer.prefix):
            layer.adamw(grads, self.state, self.state, layer.chunks, step, factor)
        done = self.device.compute.record_event()
        home = [(home_slab, slot_slab) for slot_slab, home_slab in self._pairs(layer, target)]
        self.sent = copy(self.device, "outbound", "state", layer.prefix, [done], home)

    def _pairs(self, layer: LayerState, home: State | None = None) -> list[Pair]:
        """Return pairs of slabs, weights first: this rank's part of a slab in this slot, and the same slab in `home`
        (None: the layer's current state)."""
        in_slot = self.state.cut(layer.first, layer.first + len(layer.current.weights))
        pairs = zip(in_slot, home or layer.current, strict=True)
        return [(slot, home) for slot, home in pairs if slot is not None and home is not None]

    def _fetch(
        self,
        layer: LayerState,
        what: str,
        pairs: Callable[[], list[Pair]],
        complete: Callable[[], None] | None = None,
    ) -> Future:
        """Queue copies from home, then a call of complete(). pairs() is called only after the layer's update has ended,
        because the update decides which of two states is current."""
        device, updated = self.device, layer.updated
        # Wait for the slot's last use, for the last copy out of this slot, and for the copy of this layer's gradient to
        # its home.
        events_before = (device.compute.record_event(), self.sent, layer.landed)

        def copy_from_home() -> None:
            copy_all(pairs())
            if complete is not None:
                complete()

        def work() -> Any:
            updated.result()
            return queue(device, "inbound", what, layer.prefix, events_before, copy_from_home)[1]

        device.moved_bytes += num_bytes(pairs())
        return self.copier.submit(work)


class GradientRoom:
    """Room on the device for one layer's gradient on its way home. `numel`: elements of the largest layer that will use
    this room; None: `layer` is the largest. If `layer` is frozen, no layer has a gradient, and this is no room."""

    def __init__(self, layer: LayerState, numel: int | None = None) -> None:
        weights = layer.current.weights
        self.device, self.slab = (
            layer.device,
            layer.grads if layer.is_frozen else _room(layer, weights, numel),
        )
        self.drained: Any = None  # event: the last gradient has left this room; None: no gradient was sent

    def backward(self, layer: LayerState, dys: list[Passed]) -> list[Passed]:
        """Run a layer's backward pass, and leave the parameters' gradients in this room. If the layer `adds` to earlier
        gradients, fetch the earlier gradients first. A frozen layer leaves none."""
        if layer.is_frozen:
            return layer.backward(dys, self.slab)
        self.await_room()
        if layer.adds:
            # await_room() covers the earlier gradient, too: it went home before the last gradient left this room.
            free, pairs = self.device.compute.record_event(), [(self.slab[: len(layer.grads)], layer.grads)]
            earlier = copy(self.device, "inbound", "gradient", layer.prefix, [free], pairs)
            self.device.compute.wait_event(earlier)
        dxs = layer.backward(dys, self.slab)
        layer.sum_gradients()
        return dxs

    def await_room(self) -> None:
        """Make the compute stream wait until the last gradient has left: the copy home may still be reading this
        room."""
        if self.drained is not None:
            self.device.compute.wait_event(self.drained)

    def send_home(self, layer: LayerState) -> None:
        """Queue the copy of the gradient home, if the layer has one."""
        if layer.is_frozen:
            return
        part = self.slab[layer.first : layer.first + len(layer.grads)]
        done, pairs = self.device.compute.record_event(), [(layer.grads, part)]
        self.drained = layer.landed = copy(self.device, "outbound", "gradient", layer.prefix, [done], pairs)


def _room(layer: LayerState, slab: Tensor, numel: int | None) -> Tensor:
    """Return room on the device for a whole slab, even if the layer's home has only this rank's part. `numel`: elements
    of the largest layer in this room; None: `layer` is the largest."""
    padded_numel = shared_numel(numel, layer.device.ranks.num_ranks) if numel else layer.whole_numel
    return layer.device.room(padded_numel, slab.dtype, host=False)
