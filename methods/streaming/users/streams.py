"""Streams of layers for a user's model. A stream does for one layer what a method's loop over layers does in each turn.
The passes of the user's model call the stream, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from harness.core.method import Step
from harness.devices.streams import Device
from methods.offload.adamw import Settings
from methods.offload.clip import Clip
from methods.shared.loss_scale import LossScale
from methods.streaming.embedding_and_head import OnDevice
from methods.streaming.layer_kinds import LayerSource, Streamed, new_layers
from methods.streaming.layer_state import Home, LayerState, Passed
from methods.streaming.slot import GradientRoom, Slot
from methods.streaming.update_rules import DEFERRED, UpdateRule, update_at_once
from methods.streaming.window import Window


class LayerStream(Protocol):
    """Does for one layer what a method's loop over layers does in each turn. `place`: the layer's index, from 0."""

    states: list[LayerState]
    scale: LossScale
    waits: bool  # True: no update begins before finish()

    @property
    def clip(self) -> Clip:
        """Return the Clip of the last backward pass."""

    def forward(self, place: int, xs: list[Passed]) -> list[Passed]: ...
    def begin(self, settings: Settings) -> None:
        """Begin a backward pass."""

    def backward(self, place: int, dxs: list[Passed]) -> list[Passed]: ...
    def finish(self, settings: Settings) -> Step:
        """Update all layers; in fp16 skip the step if the norm is not finite. The returned Step has no
        meaningful loss.
        """

    def rewind(self) -> None:
        """Discard a forward pass that no backward pass follows."""

    def is_late(self) -> bool:
        """Return whether an update waits for its layer's next visit."""

    def settle(self) -> None:
        """Do all updates that still wait, so that each layer's home has the layer's newest state."""

    def refetch(self) -> None:
        """Fetch the prefetched layers again, because their weights at home have changed."""


class Parts(NamedTuple):
    """The arguments from which a trainer makes its LayerStream."""

    device: Device
    layers: LayerSource
    ends: LayerState
    order: Sequence[int]  # order of the gradient norms, which Clip takes


class WindowStream:
    """Computes a layer as the loop in methods/stronghold.py: layers pass through a window of slots."""

    def __init__(
        self, parts: Parts, kinds: str, window_size: int, clipping: str | None, disk: str | None
    ) -> None:
        speculates = clipping == "speculate"
        self.layers = new_layers(parts.device, parts.layers, kinds, window_size, disk, speculates=speculates)
        self.states = [layer.state for layer in self.layers]
        ends = OnDevice(parts.ends)
        self.rule = UpdateRule(parts.layers.terms, ends, self.layers, clipping, parts.order)
        self.scale = self.rule.scale
        self.waits = self.rule.usual_timing is DEFERRED
        self.window = Window(self.layers, kinds, window_size, self.rule)
        self.window.refill()

    @property
    def clip(self) -> Clip:
        return self.rule.clip

    def forward(self, place: int, xs: list[Passed]) -> list[Passed]:
        xs = self.layers[place].forward(xs)
        self.window.slide_up(self.layers[place])
        return xs

    def begin(self, settings: Settings) -> None:
        self.rule.begin(settings)

    def backward(self, place: int, dxs: list[Passed]) -> list[Passed]:
        layer = self.layers[place]
        dxs = layer.backward(dxs)
        self.rule.gradient_ready(layer)
        self.window.slide_down(layer)
        return dxs

    def finish(self, settings: Settings) -> Step:
        if self.rule.usual_timing is not DEFERRED and settings != self.rule.settings:
            raise ValueError(
                "step: expected the optimizer's settings as in the backward pass, got others; try to change them after"
                " step()"
            )
        self.rule.settings = settings
        self.rule.finish()
        self.window.refill()
        return self.rule.step(self.rule.clip.total_norm)

    def rewind(self) -> None:
        self.window.rewind()

    def is_late(self) -> bool:
        return any(isinstance(layer, Streamed) and layer.waiting_update is not None for layer in self.layers)

    def settle(self) -> None:
        self.window.settle()
        self.window.rewind()

    def refetch(self) -> None:
        self.window.refetch()


class OneLayerStream:
    """Computes a layer as the loop in methods/l2l.py: one layer at a time is on the device."""

    clip: Clip
    waits = True

    def __init__(self, parts: Parts) -> None:
        layers = parts.layers
        self.device, self.ends, self.order = parts.device, OnDevice(parts.ends), parts.order
        home = Home(on_host=True)
        self.states = layers.start(
            LayerState(parts.device, layer, layers.terms, home) for layer in layers.layers
        )
        self.max_norm, self.scale = layers.terms.clip_norm, LossScale(layers.terms)
        self.slot, self.gradients = _slot_and_room(self.states)

    def forward(self, place: int, xs: list[Passed]) -> list[Passed]:
        self.slot.load(self.states[place])
        return self.states[place].forward(xs)

    def begin(self, settings: Settings) -> None:
        self.clip = Clip(self.device, self.max_norm, self.scale, self.order)

    def backward(self, place: int, dxs: list[Passed]) -> list[Passed]:
        layer = self.states[place]
        self.slot.load(layer)
        dxs = self.gradients.backward(layer, dxs)
        self.clip.add(layer.norms())
        self.gradients.send_home(layer)
        self.device.synchronize()
        return dxs

    def finish(self, settings: Settings) -> Step:
        is_skipped = update_at_once(self.clip, self.ends, self.states, settings)
        return self.scale.step(self.clip.total_norm, self.clip.total_norm, is_skipped=is_skipped)

    def rewind(self) -> None: ...
    def is_late(self) -> bool:
        return False

    def settle(self) -> None: ...
    def refetch(self) -> None: ...


class TrialStream:
    """Runs the forward and the backward pass, one layer at a time, without updates, to measure the memory that the
    model needs beside its layers."""

    clip: Clip  # never set: a trial makes no step
    waits = False

    def __init__(self, parts: Parts) -> None:
        layers = parts.layers
        self.scale = LossScale(layers.terms)
        self.states = layers.start(
            LayerState(parts.device, layer, layers.terms, Home(on_host=True, bare=True))
            for layer in layers.layers
        )
        self.slot, self.gradients = _slot_and_room(self.states)
        planned_slabs = (
            self.slot.state.weights,
            self.gradients.slab,
            parts.ends.current.weights,
            parts.ends.grads,
        )
        # the part of the peak that a plan computes by arithmetic
        self.known_bytes = sum(slab.nbytes for slab in planned_slabs)

    def forward(self, place: int, xs: list[Passed]) -> list[Passed]:
        self.slot.load(self.states[place])
        return self.states[place].forward(xs)

    def backward(self, place: int, dxs: list[Passed]) -> list[Passed]:
        self.slot.load(self.states[place])
        return self.gradients.backward(self.states[place], dxs)

    def begin(self, settings: Settings) -> None: ...
    def finish(self, settings: Settings) -> Step:
        raise AssertionError("a trial makes no step")

    def rewind(self) -> None: ...
    def is_late(self) -> bool:
        return False

    def settle(self) -> None: ...
    def refetch(self) -> None: ...


def _slot_and_room(states: Sequence[LayerState]) -> tuple[Slot, GradientRoom]:
    """Return a slot for the largest layer, and room for the largest gradient."""
    by_size = sorted(states, key=lambda state: state.layout.numel)
    trained = [state for state in by_size if not state.is_frozen]
    return Slot(by_size[-1]), GradientRoom((trained or by_size)[-1])
