"""The kinds of layers, as classes that share the methods for the parts of a step. placement/placement.py explains the
letters R, P, W, S and D of the kinds.

    fetch, fetch_state  queue the copy of the weights, or of the rest of the state, into the layer's slot
    forward, backward   compute, after the fetched weights have arrived
    send_gradient       queue the copy of the gradient home, for an update that waits for the global norm
    update_now          start the update without a norm, because nothing is clipped
    update_ahead        start an update into the spare state, as if nothing were clipped; send the gradient home
    update              start the update when the norm is known, or commit the update made ahead
    drop                skip this step's update (fp16 overflow), and discard an update made ahead

The window (window.py) gives each layer its slot, and takes the slot away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from torch import Tensor

from harness.core.job import Workload
from harness.devices.streams import Device
from harness.models.model import new_layer
from methods.offload.adamw import AdamStep, Settings
from methods.offload.clip import Clip
from methods.offload.layout import layout_of
from methods.shared.terms import Terms
from methods.streaming.boundaries import boundaries_on_host
from methods.streaming.disk import Shelf, shelves
from methods.streaming.layer_state import Home, LayerState, NamedLayer, Passed
from methods.streaming.placement.placement import BY_HOST, num_gradient_rooms
from methods.streaming.slot import GradientRoom, Slot
from methods.streaming.starting_values import draw_states


class ResidentLayer:
    """A layer of kind R: the layer is wholly on the device, and the device updates it. If updates wait for the norm,
    the layer keeps its gradient until the norm is known. Otherwise its gradient is in one of `rooms`; the layer is
    updated at once, and the next layer takes the room. A frozen layer has no gradient and no update."""

    def __init__(self, state: LayerState, rooms: Iterator[GradientRoom]) -> None:
        self.state, self.rooms = state, rooms
        state.bind(state.current.weights)

    def fetch_state(self) -> None: ...
    def send_gradient(self) -> None: ...
    def update_ahead(self, settings: Settings, clip: Clip) -> None: ...
    def drop(self) -> None: ...

    def forward(self, xs: list[Passed]) -> list[Passed]:
        return self.state.forward(xs)

    def backward(self, dxs: list[Passed]) -> list[Passed]:
        if not self.state.has_gradient and not self.state.is_frozen:
            self.gradients = next(self.rooms)
            return self.gradients.backward(self.state, dxs)
        dxs = self.state.backward(dxs, self.state.grads)
        self.state.sum_gradients()
        return dxs

    def update_now(self, settings: Settings, clip: Clip) -> None:
        if not self.state.is_frozen:
            self.state.update(settings, clip.unclipped_factor, self.gradients.slab)

    def update(self, settings: Settings, clip: Clip) -> None:
        self.state.update(settings, clip.factor)


class Hosted:
    """A layer of kind P, W or D: its weights are fetched into a slot, and the host's threads update it. A layer of
    kind D keeps its master weights and moments on the disk. Of a frozen layer nothing goes home."""

    slot: Slot

    def __init__(self, state: LayerState, rooms: Iterator[GradientRoom], copier: Any) -> None:
        self.state, self.rooms, self.copier = state, rooms, copier

    def new_slot(self, numel: int | None) -> Slot:
        return Slot(self.state, self.copier, numel=numel)

    def fetch(self, slot: Slot) -> None:
        self.slot = slot
        # A frozen layer's weights stay as they are while they wait in the slot.
        if not self.state.is_frozen or slot.held is not self.state:
            slot.prefetch(self.state)

    def fetch_state(self) -> None: ...

    def forward(self, xs: list[Passed]) -> list[Passed]:
        self.slot.arrive()
        return self.state.forward(xs)

    def backward(self, dxs: list[Passed]) -> list[Passed]:
        self.slot.arrive()
        self.gradients = next(self.rooms)
        return self.gradients.backward(self.state, dxs)

    def send_gradient(self) -> None:
        self.gradients.send_home(self.state)

    def update_now(self, settings: Settings, clip: Clip) -> None:
        self.send_gradient()
        self.update(settings, clip)

    def update_ahead(self, settings: Settings, clip: Clip) -> None:
        self.send_gradient()
        if self.state.spare is not None:
            self.state.speculate_when_landed(settings, clip)

    def update(self, settings: Settings, clip: Clip) -> None:
        self.state.update_when_landed(settings, clip)

    def drop(self) -> None:
        self.state.drop()


class Streamed:
    """A layer of kind S: its state is fetched into the slot, where the device updates it. An update that waits for the
    norm (`waiting_update`) is made before the layer's next forward pass; otherwise the update follows the backward pass
    (`has_state`)."""

    slot: Slot
    # the waiting update and its clip factor; None: no update waits
    waiting_update: tuple[AdamStep, Tensor | None] | None = None
    has_state = False  # True: the state is in the slot for this step's backward pass

    def __init__(self, state: LayerState, rooms: Iterator[GradientRoom]) -> None:
        self.state, self.rooms = state, rooms

    def new_slot(self, numel: int | None) -> Slot:
        return Slot(self.state, holds_state=True, numel=numel)

    def fetch(self, slot: Slot) -> None:
        self.slot = slot
        slot.prefetch(self.state)
        if self.waiting_update is not None:
            slot.prefetch_state(self.state, with_gradient=True)

    def fetch_state(self) -> None:
        self.slot.prefetch_state(self.state)
        self.has_state = True

    def forward(self, xs: list[Passed]) -> list[Passed]:
        self.do_waiting_update()
        self.slot.arrive()
        return self.state.forward(xs)

    def do_waiting_update(self) -> None:
        """Do the update that has waited for the norm, if there is one."""
        if self.waiting_update is not None:
            self.slot.arrive()
            self.slot.update(self.state, self.slot.grads, *self.waiting_update, self.state.current)
            self.waiting_update = None

    def backward(self, dxs: list[Passed]) -> list[Passed]:
        self.slot.arrive()
        self.gradients = next(self.rooms)
        return self.gradients.backward(self.state, dxs)

    def send_gradient(self) -> None:
        self.gradients.send_home(self.state)

    def update_now(self, settings: Settings, clip: Clip) -> None:
        target = self.state.spare or self.state.current
        self.slot.update(
            self.state, self.gradients.slab, self.state.next_step(settings), clip.unclipped_factor, target
        )

    def update_ahead(self, settings: Settings, clip: Clip) -> None:
        if self.has_state:
            self.update_now(settings, clip)
        self.send_gradient()

    def update(self, settings: Settings, clip: Clip) -> None:
        if self.has_state and clip.is_one():
            self.has_state = False
            self.state.commit()
        else:
            self.drop()
            self.waiting_update = self.state.next_step(settings), clip.factor

    def drop(self) -> None:
        self.state.num_updates -= self.has_state
        self.has_state = False


Layer = ResidentLayer | Hosted | Streamed


class LayerSource(NamedTuple):
    """The layers of a model that are to be placed, bottom first. `start` fills new states with their starting values,
    and returns these states."""

    terms: Terms
    layers: Sequence[NamedLayer]
    start: Callable[[Iterable[LayerState]], list[LayerState]]


def model_layers(workload: Workload) -> LayerSource:
    """Return the layers of the workload's model."""

    def start(states: Iterable[LayerState]) -> list[LayerState]:
        new_states = [*states]
        draw_states(new_states, workload)
        return new_states

    layers = [
        NamedLayer(new_layer(workload, i), workload.anatomy.layer_name(i)) for i in range(workload.num_layers)
    ]
    return LayerSource(Terms.of(workload), layers, start)


def new_layers(
    device: Device, source: LayerSource, kinds: str, window_size: int, disk: str | None, *, speculates: bool
) -> list[Layer]:
    """Return the layers, bottom first, each of the kind that its letter in `kinds` names. `disk`: the folder for the
    states of layers of kind D; None: the system's temporary folder. `speculates`: True: make spare states for
    speculative updates. A frozen layer is of no kind with a state (with_frozen). Raises OSError if the disk has no
    room."""
    numels, waits = [layout_of(layer.module).numel for layer in source.layers], source.terms.waits_for_norm
    numels_on_disk = [numel for numel, kind in zip(numels, kinds, strict=True) if kind == "D"]
    new_shelves = shelves(
        device, len(numels_on_disk), disk, max(numels_on_disk, default=0), source.terms.dtype
    )
    states = _new_states(device, source, kinds, new_shelves, speculates=speculates)
    # a room has the size of the largest layer that uses it
    users = [state for state, kind in zip(states, kinds, strict=True) if kind != "R" or not waits]
    largest = max(users or states, key=lambda state: (not state.is_frozen, state.layout.numel))
    num_rooms = num_gradient_rooms(kinds, window_size, waits=waits)
    rooms = cycle([GradientRoom(largest) for _ in range(num_rooms)])

    def layer_of_kind(kind: str, state: LayerState) -> Layer:
        if kind == "R":
            return ResidentLayer(state, rooms)
        if kind == "S":
            return Streamed(state, rooms)
        # A separate thread fetches parked layers, so that a wait for the update of one does not delay layers of other
        # kinds.
        return Hosted(state, rooms, device.returner if kind == "P" else device.copier)

    return list(map(layer_of_kind, kinds, states))


def _new_states(
    device: Device, source: LayerSource, kinds: str, new_shelves: Iterator[Shelf], *, speculates: bool
) -> list[LayerState]:
    """Return the layers' states with their starting values. `on_disk`: gives a shelf to each layer of kind D."""

    def new_state(i: int) -> LayerState:
        home = Home(
            on_host=kinds[i] != "R",
            spare=speculates and kinds[i] in "PWS",
            streamed=kinds[i] == "S",
            has_gradient=source.terms.waits_for_norm or kinds[i] in BY_HOST,
            shelf=next(new_shelves) if kinds[i] == "D" else None,
        )
        return LayerState(device, source.layers[i], source.terms, home)

    states: dict[int, LayerState] = {}
    # Resident layers come first: their values pass through the host's memory while that memory still has room.
    for is_resident in (True, False):
        places = [i for i, kind in enumerate(kinds) if (kind == "R") is is_resident]
        states |= zip(places, source.start(new_state(i) for i in places), strict=True)
    return [states[i] for i in range(len(kinds))]


def send_boundaries_home(layers: Sequence[LayerState], num_bytes: int = 0) -> None:
    """Keep the layers' inputs on the host between forward and backward pass. `layers`: bottom first. `num_bytes`: the
    bytes of one layer's inputs; 0: unknown, so the first batch sets the size."""
    device = layers[0].device
    boundaries = boundaries_on_host(device, [layer.prefix for layer in layers], num_bytes)
    for layer, boundary in zip(layers, boundaries, strict=True):
        layer.boundary = boundary
