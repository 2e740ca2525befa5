"""What a layer does in a step, by its kind: R, P, W, S and D of placement.py as objects with the same verbs.

    fetch, fetch_state  queue the copy of its weights, or of the rest of its state, into its slot
    forward, backward   compute, after what was fetched has arrived
    send_gradient       queue the copy of its gradient home: the update waits for the global norm
    update_now          start the update: nothing is clipped, no norm is waited for
    update_ahead        the same into the spare state, as if nothing were clipped, and send the gradient home
    update              after the norm is known: start the update, or commit what was made ahead of it
    drop                skip this step's update (fp16 overflow), and discard what was made ahead of it

The window (window.py) gives a layer its slot and takes it away.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import Any

from torch import Tensor

from harness.core.job import Workload
from harness.devices.streams import Device
from methods.offload.adamw import AdamStep
from methods.offload.clip import Clip
from methods.offload.layout import new_layer
from methods.streaming.disk import shelves
from methods.streaming.layer_state import LayerState, draw
from methods.streaming.placement import num_gradients
from methods.streaming.slot import GradientRoom, Slot


class ResidentLayer:
    """R: a layer wholly on the device, updated there after the norm is known."""

    def __init__(self, state: LayerState) -> None:
        self.state = state
        state.bind(state.current.weights)

    def fetch_state(self) -> None: ...
    def send_gradient(self) -> None: ...
    def update_now(self, learning_rate: float, clip: Clip) -> None: ...
    def update_ahead(self, learning_rate: float, clip: Clip) -> None: ...
    def drop(self) -> None: ...

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return self.state.forward(xs)

    def backward(self, dxs: list[Tensor]) -> list[Tensor]:
        return self.state.backward(dxs, self.state.grads)

    def update(self, learning_rate: float, clip: Clip) -> None:
        self.state.update(learning_rate, clip.factor)


class Hosted:
    """P, W, D: weights in a slot, updated by the host's threads; D keeps the rest of its state on the disk."""

    slot: Slot

    def __init__(self, state: LayerState, rooms: Iterator[GradientRoom], copier: Any) -> None:
        self.state, self.rooms, self.copier = state, rooms, copier

    def new_slot(self) -> Slot:
        return Slot(self.state, self.copier)

    def fetch(self, slot: Slot) -> None:
        self.slot = slot
        slot.prefetch(self.state)

    def fetch_state(self) -> None: ...

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        self.slot.arrive()
        return self.state.forward(xs)

    def backward(self, dxs: list[Tensor]) -> list[Tensor]:
        self.slot.arrive()
        self.gradients = next(self.rooms)
        return self.gradients.backward(self.state, dxs)

    def send_gradient(self) -> None:
        self.gradients.send_home(self.state)

    def update_now(self, learning_rate: float, clip: Clip) -> None:
        self.send_gradient()
        self.update(learning_rate, clip)

    def update_ahead(self, learning_rate: float, clip: Clip) -> None:
        self.send_gradient()
        if self.state.spare is not None:
            self.state.speculate_when_landed(learning_rate, clip)

    def update(self, learning_rate: float, clip: Clip) -> None:
        self.state.update_when_landed(learning_rate, clip)

    def drop(self) -> None:
        self.state.drop()


class Streamed:
    """S: brings its state to the slot, so that the device updates it: before the forward pass if the update has waited
    for the norm (`due`), else after the backward pass (`has_state`)."""

    slot: Slot
    due: tuple[AdamStep, Tensor | None] | None = None  # a waiting update, and its clip factor
    has_state = False  # True: the state is in the slot for this step's backward pass

    def __init__(self, state: LayerState, rooms: Iterator[GradientRoom]) -> None:
        self.state, self.rooms = state, rooms

    def new_slot(self) -> Slot:
        return Slot(self.state, whole=True)

    def fetch(self, slot: Slot) -> None:
        self.slot = slot
        slot.prefetch(self.state)
        if self.due is not None:
            slot.prefetch_state(self.state, with_gradient=True)

    def fetch_state(self) -> None:
        self.slot.prefetch_state(self.state)
        self.has_state = True

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        self.update_due()
        self.slot.arrive()
        return self.state.forward(xs)

    def update_due(self) -> None:
        """Make the update that has waited for the norm, if there is one."""
        if self.due is not None:
            self.slot.arrive()
            self.slot.update(self.state, self.slot.grads, *self.due, self.state.current)
            self.due = None

    def backward(self, dxs: list[Tensor]) -> list[Tensor]:
        self.slot.arrive()
        self.gradients = next(self.rooms)
        return self.gradients.backward(self.state, dxs)

    def send_gradient(self) -> None:
        self.gradients.send_home(self.state)

    def update_now(self, learning_rate: float, clip: Clip) -> None:
        target = self.state.spare or self.state.current
        self.slot.update(self.state, self.gradients.slab, self.state.next_step(learning_rate), clip.unclipped, target)

    def update_ahead(self, learning_rate: float, clip: Clip) -> None:
        if self.has_state:
            self.update_now(learning_rate, clip)
        self.send_gradient()

    def update(self, learning_rate: float, clip: Clip) -> None:
        if self.has_state and clip.is_one():
            self.has_state = False
            self.state.commit()
        else:
            self.drop()
            self.due = self.state.next_step(learning_rate), clip.factor

    def drop(self) -> None:
        self.state.num_updates -= self.has_state
        self.has_state = False


Layer = ResidentLayer | Hosted | Streamed


def new_layers(
    device: Device, workload: Workload, kinds: str, window_size: int, disk: str | None, *, speculates: bool
) -> list[Layer]:
    """Return the layers of a placement, bottom first. Raises OSError if the disk has no room."""
    on_disk = shelves(device, kinds.count("D"), disk, workload)

    def new_state(i: int, kind: str) -> LayerState:
        spare, shelf = speculates and kind in "PWS", next(on_disk) if kind == "D" else None
        place: dict[str, Any] = {"host": kind != "R", "spare": spare, "streamed": kind == "S", "shelf": shelf}
        return LayerState(device, new_layer(workload), f"layers.{i}.", workload, **place)

    found: dict[int, LayerState] = {}
    for is_resident in (True, False):  # resident layers first: their values pass through the host while it has room
        some = {i: new_state(i, kind) for i, kind in enumerate(kinds) if (kind == "R") is is_resident}
        draw([*some.values()], workload)
        found |= some
    states = [found[i] for i in range(len(kinds))]
    rooms = cycle([GradientRoom(states[0]) for _ in range(num_gradients(kinds, window_size))])

    def of_kind(kind: str, state: LayerState) -> Layer:
        if kind == "R":
            return ResidentLayer(state)
        if kind == "S":
            return Streamed(state, rooms)
        # Parked layers wait for their updates in a thread of their own, because travelling layers must not wait behind
        # them.
        return Hosted(state, rooms, device.returner if kind == "P" else device.copier)

    return list(map(of_kind, kinds, states))
