"""A layer at home: flat slabs of weights, gradient and AdamW's state, and the update that they get there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.core.gpt import DTYPES, initialize
from harness.core.job import Workload
from harness.core.method import TensorState
from harness.devices.streams import Device
from methods.offload.adamw import AdamStep, Factor, State, chunks, joined, keep_, update
from methods.offload.layout import install, kept_dtypes, layout_of
from methods.shared.memory_needs import BLOCK, CHUNK

if TYPE_CHECKING:
    from methods.offload.clip import Clip
    from methods.streaming.disk import Shelf


class Speculation(NamedTuple):
    """An update on its way into a home's spare state: its step, its end, and whether any of it was left out."""

    step: AdamStep
    done: Future
    skipped: list[bool]


class Home:
    """A layer where it lives: the host, or the device for what is resident. Its gradient and state, weights and
    gradient in the dtype that travels; and the module that computes with them. Homes are made in the order in which a
    forward pass needs them.

    A spare state takes an update that is made ahead of the clip factor; a commit exchanges it for the one in force. A
    streamed home lies on the host and is updated by the device, in a slot; where its update need not wait, its gradient
    never comes home. With a shelf, the state but for the weights lies on the disk.
    """

    def __init__(
        self,
        device: Device,
        module: nn.Module,
        prefix: str,
        workload: Workload,
        *,
        host: bool,
        spare: bool = False,
        streamed: bool = False,
        shelf: Shelf | None = None,
    ) -> None:
        self.device, self.module, self.layout, self.prefix = device, module, layout_of(module), prefix
        self.updater = "update" if host else "compute"  # whose work update() is
        self.has_dropout = workload.dropout > 0
        self.deadline = device.next_place()
        dtype, numel = DTYPES[workload.dtype], self.layout.numel
        kept = kept_dtypes(workload, host=host)
        self.shelf, self.state = shelf, _room_for_state(device, numel, dtype, [] if shelf else kept, host=host)
        self.spare = _room_for_state(device, numel, dtype, kept, host=host) if spare else None
        sends_gradients = workload.waits_for_norm or not streamed
        self.grads = device.room(numel, dtype, host=host) if sends_gradients else torch.empty(0, dtype=dtype)
        self.num_updates = 0
        self.steps = device.room(1, torch.float32, host=False)[0] if streamed or not host else torch.zeros(())
        self.chunks = chunks(self.layout.pieces(), BLOCK if streamed or not host else CHUNK)
        self.updated: Future = Future()
        self.updated.set_result(None)
        self.speculation: Speculation | None = None
        self.due: tuple[AdamStep, Tensor | None] | None = None  # an update that the device owes, and its clip factor
        self.landed: Any = None  # the gradient is here
        self._rooms: dict[str, Tensor] = {}  # where the gradient of each parameter goes
        if shelf is None:
            self._draw(workload, self.state)
        else:
            shelf.prefix = prefix
            shelf.visit(lambda kept: self._draw(workload, self.state_of(kept))).result()

    def state_of(self, kept: list[Tensor]) -> State:
        """The state in force, with what AdamW keeps besides the weights in these slabs, which may be longer."""
        return _state(self.state.weights, [slab[: self.layout.numel] for slab in kept])

    def _draw(self, workload: Workload, state: State) -> Future:
        """Starting values, drawn where they stay or, to be split, where the first moment will be."""
        drawn = state.exp_avg if state.is_split else joined(state)
        named = [self.prefix + name for name in self.layout.names]
        initialize(zip(named, self.layout.views(drawn), strict=True), workload)
        for start in range(0, self.layout.numel, CHUNK):
            keep_(state.cut(start, start + CHUNK), drawn[start : start + CHUNK])
        if state.is_split:
            drawn.zero_()
        return self.updated

    def bind(self, weights: Tensor) -> None:
        """Make the module's parameters views of a slab on the device."""
        for name, weight in zip(self.layout.names, self.layout.views(weights), strict=True):
            parameter = self.module.get_parameter(name)
            if parameter.is_meta:
                parameter = nn.Parameter(weight)
                parameter.register_post_accumulate_grad_hook(partial(_settle, self._rooms, name))
                install(self.module, name, parameter)
            # The same parameter in each slot it comes to: the graph of its forward pass knows it by identity.
            parameter.data = weight

    def collect_gradients(self, grads: Tensor) -> None:
        """Have the backward passes to come leave the sum of their gradients in a slab on the device: of each parameter
        the first is copied there, so nothing need be cleared, and the next ones are added."""
        self._rooms.update(zip(self.layout.names, self.layout.views(grads), strict=True))
        for name in self.layout.names:
            self.module.get_parameter(name).grad = None

    def update(self, learning_rate: float, factor: Factor) -> None:
        """One AdamW step from this home's gradient, scaled by the clip factor; decay on matrices only."""
        with self.device.span(self.updater, "update", self.prefix):
            update(self.grads, self.state, self.state, self.chunks, self.next_step(learning_rate), factor)

    def update_when_landed(self, learning_rate: float, clip: Clip) -> None:
        """Queue the update on the host's threads: it waits for the gradient and for the clip factor, nothing waits
        for it but the next prefetch of this layer. A speculation that is whole is committed where the factor is 1."""
        landed, spare, ahead = self.landed, self.spare, self.speculation
        step = ahead.step if ahead else self.next_step(learning_rate)

        def begin(state: State) -> Future:
            def work(first: int, last: int) -> None:
                landed.synchronize()
                factor = clip.on_host()
                if ahead is not None and spare is not None:
                    ahead.done.result()
                    if not ahead.skipped and clip.is_one():
                        self.state, self.spare = spare, state  # every chunk comes to the same end
                        return
                with self.device.span("update", "update", self.prefix):
                    update(self.grads, state, state, self.chunks[first:last], step, factor, by_thread=True)

            # What waits for the factor shall not keep a thread from what need not.
            return self.device.workers.update(self.deadline, clip.landed or landed, len(self.chunks), work)

        self.speculation = None
        if self.shelf is None:
            self.updated = begin(self.state)
        else:
            self.updated = self.shelf.visit(lambda kept: begin(self.state_of(kept)))

    def speculate_when_landed(self, learning_rate: float, clip: Clip) -> None:
        """Queue an update into the spare state as if nothing were clipped, as long as the norm so far allows it."""
        landed, state, spare = self.landed, self.state, self.spare
        is_within, unclipped = clip.is_within(), clip.unclipped
        skipped: list[bool] = []
        assert spare is not None
        step = self.next_step(learning_rate)

        def work(first: int, last: int) -> None:
            landed.synchronize()
            if skipped or not is_within():
                skipped.append(True)
                return
            with self.device.span("update", "update ahead", self.prefix):
                update(self.grads, state, spare, self.chunks[first:last], step, unclipped, by_thread=True)

        done = self.device.workers.update(self.deadline, landed, len(self.chunks), work)
        self.speculation = Speculation(step, done, skipped)

    def drop(self, *, is_ahead: bool) -> None:
        """Leave the gradient unused, and what the host's threads, or `is_ahead` the device, have made of it."""
        self.num_updates -= is_ahead or self.speculation is not None
        if self.speculation is not None:
            self.updated, self.speculation = self.speculation.done, None

    def commit(self) -> None:
        """Put the spare state in force."""
        assert self.spare is not None
        self.state, self.spare = self.spare, self.state

    def owe(self, learning_rate: float, clip: Clip, is_ahead: bool) -> None:
        """Put in force what the device has made ahead, where the clip factor is 1; else it owes the update."""
        if is_ahead and clip.is_one():
            self.commit()
            return
        self.num_updates -= is_ahead
        self.due = self.next_step(learning_rate), clip.factor

    def next_step(self, learning_rate: float) -> AdamStep:
        self.num_updates += 1
        return AdamStep(learning_rate, self.num_updates, self.steps.fill_(self.num_updates))

    def states(self) -> Iterator[TensorState]:
        state = self.state if self.shelf is None else self.state_of(self.shelf.read())
        columns = (self.layout.views(joined(state)), self.layout.views(state.exp_avg))
        for name, weight, exp_avg in zip(self.layout.names, *columns, strict=True):
            yield TensorState(self.prefix + name, weight, exp_avg)


def _settle(rooms: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """A gradient of the parameter has just been computed, or added to the earlier ones."""
    if parameter.grad is not None and parameter.grad is not rooms[name]:
        rooms[name].copy_(parameter.grad)
        parameter.grad = rooms[name]


def _state(weights: Tensor, kept: list[Tensor]) -> State:
    return State(weights, kept[0] if len(kept) == 3 else None, *kept[-2:])


def _room_for_state(device: Device, numel: int, dtype: torch.dtype, kept: list[torch.dtype], *, host: bool) -> State:
    """On the disk nothing is kept here but the weights."""
    weights = device.room(numel, dtype, host=host)
    rooms = [device.room(numel, each, host=host) for each in kept]
    return _state(weights, rooms or [torch.empty(0), torch.empty(0)])
