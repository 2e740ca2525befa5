"""How a layer travels between host and device; when it travels is each method's own loop.

A slot is room on the device for one layer's weights; a layer that comes to it has its parameters there. A copy is one
flat transfer per slab, direction and visit. Three streams (compute, inbound, outbound) are ordered by events
alone; host threads wait for what they need, the launching thread only for a copy to have been queued. Slots and slabs
live as long as the run, so no buffer changes streams through an allocator.

Shapes: B samples of a micro-batch, T tokens, D hidden. A layer takes all micro-batches of a step, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from methods.offload.adamw import AdamStep, Factor, State, update
from methods.streaming.layer_state import Home


class Saved(NamedTuple):
    """What a forward pass keeps: the layer's input, and its output with a graph that holds no activation."""

    x: Tensor
    y: Tensor


class Gradients:
    """Room on the device for a layer's gradient; that of a resident layer is its home's own."""

    def __init__(self, home: Home, *, resident: bool = False) -> None:
        weights = home.state.weights
        self.slab = home.grads if resident else home.device.room(weights.numel(), weights.dtype, host=False)
        self.drained: Any = None  # what was sent home from here has left


class Slot:
    """Room on the device for one layer's weights, and for its state and the gradient that it waits with where the
    device is to update it (kind S). A resident layer's slot (R) is its home's own slabs."""

    def __init__(self, home: Home, kind: str = "W") -> None:
        self.device, self.home = home.device, home
        self.copier = self.device.returner if kind == "P" else self.device.copier
        self.loaded: Future | None = None  # the copy of the weights
        self.completed: Future | None = None  # of the rest of the state
        self.sent: Any = None  # what was sent home from here has left
        self.state, self.grads = home.state, home.grads
        if kind == "S":
            self.state = State(*(slab if slab is None else self._room(slab) for slab in home.state))  # type: ignore
            self.grads = self._room(home.grads)
        self.weights = self.state.weights if kind in "RS" else self._room(home.state.weights)
        self.gradients: Gradients
        if kind == "R":
            self.gradients = Gradients(home, resident=True)
            home.bind(self.weights)

    def _room(self, slab: Tensor) -> Tensor:
        return self.device.room(slab.numel(), slab.dtype, host=False)

    def prefetch(self, home: Home) -> None:
        """Queue the copy of a layer's weights into this slot, after its own update and the slot's last use. Where the
        device owes it an update, the rest of its state comes along, and its gradient."""
        self.home = home
        home.bind(self.weights)
        self.loaded = self._fetch("weights", lambda: [(self.weights, home.state.weights)])
        if home.due is not None:
            self.completed = self._fetch(
                "state", lambda: [*_pairs(self.state, home.state)[1:], (self.grads, home.grads)]
            )

    def prefetch_state(self) -> None:
        """Queue the copy of the rest of the layer's state into this slot."""
        home = self.home
        self.completed = self._fetch("state", lambda: _pairs(self.state, home.state)[1:])

    def forward(self, xs: list[Tensor]) -> tuple[list[Tensor], list[Saved]]:
        """The layer's outputs, and what its backward pass needs: only the inputs are kept. xs: (B, T, D) each.

        Source: Chen et al. 2016, sublinear memory, by torch's checkpoint, which keeps the random state for dropout and
        stops the recompute where nothing more is needed.
        """
        self._arrive()
        kept = []
        with self.device.span("compute", "forward", self.home.prefix):
            for x in xs:
                x = x.detach().requires_grad_()
                y = checkpoint(self.home.module, x, use_reentrant=False, preserve_rng_state=self.home.has_dropout)
                kept.append(Saved(x, y))
        return [y.detach() for _, y in kept], kept

    def backward(self, kept: list[Saved], dys: list[Tensor]) -> list[Tensor]:
        """Recompute the layer on its inputs, leave the sum of its gradients in `gradients`, return the inputs'. dys:
        (B, T, D) each."""
        self._arrive()
        if self.gradients.drained is not None:
            # The copy home may still be reading the last gradient that was here: wait for it, not for the device.
            self.device.compute.wait_event(self.gradients.drained)
        dxs = []
        with self.device.span("compute", "backward", self.home.prefix):
            self.home.collect_gradients(self.gradients.slab)
            for (x, y), dy in zip(kept, dys, strict=True):
                torch.autograd.backward(y, dy)
                assert x.grad is not None
                dxs.append(x.grad)
        return dxs

    def norms(self) -> list[Tensor]:
        """The norm of each parameter's gradient, fp32, on the device."""
        with self.device.span("compute", "norm", self.home.prefix):
            return list(torch._foreach_norm(self.home.layout.views(self.gradients.slab), 2, dtype=torch.float32))

    def offload(self, home: Home) -> None:
        """Queue the copy of the gradient to its home."""
        device, done, slab = self.device, self.device.compute.record_event(), self.gradients.slab
        with device.streams.use(device.outbound):
            device.outbound.wait_event(done)
            with device.span("outbound", "gradient", home.prefix):
                home.grads.copy_(slab, non_blocking=True)
            self.gradients.drained = home.landed = device.outbound.record_event()
        device.moved_bytes += slab.nbytes

    def update(self, learning_rate: float, factor: float | None) -> None:
        """The device's Adam by the gradient that the backward pass has left; the new state goes home, as the spare one
        where there is one."""
        target = self.home.spare or self.home.state
        self._update(self.gradients.slab, self.home.next_step(learning_rate), factor, target)

    def update_due(self) -> None:
        """The device's Adam by the gradient that came along, where it owes the layer an update."""
        if self.home.due is not None:
            step, factor = self.home.due
            self.home.due = None
            self._arrive()
            self._update(self.grads, step, factor, self.home.state)

    def _update(self, grads: Tensor, step: AdamStep, factor: Factor, target: State) -> None:
        device = self.device
        if self.completed is not None:
            device.compute.wait_event(self.completed.result())
        with device.span("compute", "update", self.home.prefix):
            update(grads, self.state, self.state, self.home.chunks, step, factor)
        done = device.compute.record_event()
        with device.streams.use(device.outbound):
            device.outbound.wait_event(done)
            with device.span("outbound", "state", self.home.prefix):
                for here, there in _pairs(self.state, target):
                    there.copy_(here, non_blocking=True)
                    device.moved_bytes += here.nbytes
            self.sent = device.outbound.record_event()

    def wait(self) -> None:
        """Wait on the host until what this slot asked for, in either direction, has happened."""
        self.device.synchronize(*([self.loaded] if self.loaded else []))

    def _fetch(self, what: str, pairs: Callable[[], list[tuple[Tensor, Tensor]]]) -> Future:
        """Queue copies from home. Which of its states is in force is known when its update is over."""
        device, updated, home = self.device, self.home.updated, self.home.prefix
        # The slot's last use; what was sent home from it, which was after the layer to come was sent to its own home.
        before = (device.compute.record_event(), self.sent, self.home.landed)

        def work() -> Any:
            updated.result()
            with device.streams.use(device.inbound):
                for event in filter(None, before):
                    device.inbound.wait_event(event)
                with device.span("inbound", what, home):
                    for here, there in pairs():
                        here.copy_(there, non_blocking=True)
                return device.inbound.record_event()

        device.moved_bytes += sum(here.nbytes for here, _ in pairs())
        return self.copier.submit(work)

    def _arrive(self) -> None:
        """Let compute wait for the weights; the launching thread waits only until their copy is queued."""
        if self.loaded is not None:
            self.device.compute.wait_event(self.loaded.result())
            self.loaded = None


def _pairs(state: State, other: State) -> list[tuple[Tensor, Tensor]]:
    """The slabs of two states side by side, weights first."""
    return [(here, there) for here, there in zip(state, other, strict=True) if here is not None and there is not None]
