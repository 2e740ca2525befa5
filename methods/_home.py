"""A layer at home: flat slabs of weights, gradient and AdamW's state, and the update that they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from harness.method import TensorState
from harness.model import DTYPES, Layer, decays, initialize
from harness.spec import Workload
from methods._device import Device
from methods._plans import BLOCK, CHUNK
from methods._update import AdamStep, Piece, State, chunks, joined, keep_, update

ALIGNMENT = 16  # elements: 64 bytes of fp32, so that every tensor of a slab starts where an allocation would


class Layout:
    """Where each parameter of a module lies in a flat slab."""

    def __init__(self, module: nn.Module) -> None:
        self.names, self.shapes, self.starts, self.decays = [], [], [], []
        self.numel = 0
        for name, parameter in module.named_parameters():
            self.names.append(name)
            self.shapes.append(parameter.shape)
            self.starts.append(self.numel)
            self.decays.append(decays(parameter))
            self.numel += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT

    def pieces(self) -> list[Piece]:
        ends = (start + shape.numel() for start, shape in zip(self.starts, self.shapes, strict=True))
        return [Piece(*piece) for piece in zip(self.starts, ends, self.decays, strict=True)]

    def views(self, slab: Tensor) -> list[Tensor]:
        starts_shapes = zip(self.starts, self.shapes, strict=True)
        return [slab[start : start + shape.numel()].view(shape) for start, shape in starts_shapes]


class Home:
    """A layer where it lives: the host, or the device for what is resident. Weights and gradient in the dtype that
    travels, the rest of AdamW's state; and the module that computes with them. Homes are made in the order in which a
    forward pass needs them."""

    def __init__(self, device: Device, module: nn.Module, prefix: str, workload: Workload, *, host: bool) -> None:
        self.device, self.module, self.layout, self.prefix = device, module, Layout(module), prefix
        self.has_dropout = workload.dropout > 0
        self.deadline = device.next_place()
        dtype, numel = DTYPES[workload.dtype], self.layout.numel
        self.weights = device.room(numel, dtype, host=host)
        self.grads = device.room(numel, dtype, host=host)
        half = torch.int16 if host else torch.float32
        self.master = None if dtype == torch.float32 else device.room(numel, half, host=host)
        self.exp_avg = device.room(numel, torch.float32, host=host)
        self.exp_avg_sq = device.room(numel, torch.float32, host=host)
        self.num_updates, self.steps = 0, torch.zeros((), device=self.weights.device)
        self.chunks = chunks(self.layout.pieces(), CHUNK if host else BLOCK)
        self.updated: Future = Future()
        self.updated.set_result(None)
        self.landed: Any = None
        self._draw(workload)

    @property
    def state(self) -> State:
        return State(self.weights, self.master, self.exp_avg, self.exp_avg_sq)

    def _draw(self, workload: Workload) -> None:
        """Starting values, drawn where they stay or, to be split, where the first moment will be."""
        state = self.state
        drawn = state.exp_avg if state.is_split else joined(state)
        named = [self.prefix + name for name in self.layout.names]
        initialize(zip(named, self.layout.views(drawn), strict=True), workload)
        for start in range(0, self.layout.numel, CHUNK):
            keep_(state.cut(start, start + CHUNK), drawn[start : start + CHUNK])
        if state.is_split:
            drawn.zero_()

    def bind(self, weights: Tensor, grads: Tensor) -> None:
        """Make the module's parameters and their gradients views of two slabs on the device."""
        views = zip(self.layout.names, self.layout.views(weights), self.layout.views(grads), strict=True)
        for name, weight, grad in views:
            parameter = self.module.get_parameter(name)
            if parameter.is_meta:
                owner, _, leaf = name.rpartition(".")
                parameter = nn.Parameter(weight)
                setattr(self.module.get_submodule(owner), leaf, parameter)
            # The same parameter in each slot it comes to: the graph of its forward pass knows it by identity.
            parameter.data, parameter.grad = weight, grad

    def update(self, learning_rate: float, factor: Tensor | None) -> None:
        """One AdamW step from this home's gradient, scaled by the clip factor; decay on matrices only."""
        update(self.grads, self.state, self.state, self.chunks, self._next_step(learning_rate), factor)

    def update_when_landed(self, learning_rate: float, clip: Callable[[], Tensor | None]) -> None:
        """Queue the update on the host's threads: it waits for the gradient and for the clip factor, nothing waits
        for it but the next prefetch of this layer."""
        landed, state, step = self.landed, self.state, self._next_step(learning_rate)

        def work(first: int, last: int) -> None:
            landed.synchronize()
            update(self.grads, state, state, self.chunks[first:last], step, clip())

        self.updated = self.device.workers.update(self.deadline, landed, len(self.chunks), work)

    def _next_step(self, learning_rate: float) -> AdamStep:
        self.num_updates += 1
        return AdamStep(learning_rate, self.num_updates, self.steps.fill_(self.num_updates))

    def states(self) -> Iterator[TensorState]:
        columns = (self.layout.views(joined(self.state)), self.layout.views(self.exp_avg))
        for name, weight, exp_avg in zip(self.layout.names, *columns, strict=True):
            yield TensorState(self.prefix + name, weight, exp_avg)


def new_layer(workload: Workload) -> Layer:
    """A layer without memory of its own; the slot it comes to gives it some."""
    with torch.device("meta"):
        return Layer(workload)
