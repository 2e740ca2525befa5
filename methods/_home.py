"""A layer at home: flat slabs of weights, gradient, fp32 master and moments, and the update that they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from harness.method import TensorState
from harness.model import DTYPES, Layer, decays, initialize
from harness.spec import BETAS, EPSILON, WEIGHT_DECAY, Workload
from methods._device import Device

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

    def views(self, slab: Tensor) -> list[Tensor]:
        starts_shapes = zip(self.starts, self.shapes, strict=True)
        return [slab[start : start + shape.numel()].view(shape) for start, shape in starts_shapes]


class Home:
    """A layer where it lives: the host, or the device for what is resident. Weights and gradient in the dtype that
    travels, fp32 master (the weights themselves in fp32), AdamW's moments; and the module that computes with them."""

    def __init__(self, device: Device, module: nn.Module, prefix: str, workload: Workload, *, host: bool) -> None:
        self.device, self.module, self.layout, self.prefix = device, module, Layout(module), prefix
        self.has_dropout = workload.dropout > 0
        dtype, numel = DTYPES[workload.dtype], self.layout.numel
        self.weights = device.room(numel, dtype, host=host)
        self.grads = device.room(numel, dtype, host=host)
        self.master = self.weights if dtype == torch.float32 else device.room(numel, torch.float32, host=host)
        self.exp_avg = device.room(numel, torch.float32, host=host)
        self.exp_avg_sq = device.room(numel, torch.float32, host=host)
        self.steps = [torch.zeros((), device=self.weights.device) for _ in self.layout.names]
        self.updated: Future = Future()
        self.updated.set_result(None)
        self.landed: Any = None
        named = [prefix + name for name in self.layout.names]
        initialize(zip(named, self.layout.views(self.master), strict=True), workload)
        self.weights.copy_(self.master)

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
        """One AdamW step from this home's gradient, scaled by the clip factor; decay on matrices only.

        torch's fused kernel tensor by tensor: the very bits of torch.optim.AdamW(fused=True).
        """
        grads = self.grads.float()  # the slab itself in fp32
        if factor is not None:
            grads.mul_(factor)
        slabs = (self.master, grads, self.exp_avg, self.exp_avg_sq)
        rows = zip(self.layout.decays, *map(self.layout.views, slabs), self.steps, strict=True)
        table = list(rows)
        for decayed in (True, False):
            chosen = [row[1:] for row in table if row[0] is decayed]
            if not chosen:
                continue
            weights, gradients, exp_avgs, exp_avg_sqs, steps = (list(column) for column in zip(*chosen, strict=True))
            with torch.no_grad():
                adamw(
                    weights, gradients, exp_avgs, exp_avg_sqs, [], steps,
                    fused=True, amsgrad=False, maximize=False, beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON,
                    lr=learning_rate, weight_decay=WEIGHT_DECAY if decayed else 0.0,
                )  # fmt: skip
        if self.master is not self.weights:
            self.weights.copy_(self.master)

    def update_when_landed(self, learning_rate: float, clip: Callable[[], Tensor | None]) -> None:
        """Queue the update on the host's threads: it waits for the gradient and for the clip factor, nothing waits
        for it but the next prefetch of this layer."""
        landed = self.landed

        def work() -> None:
            landed.synchronize()
            self.update(learning_rate, clip())

        self.updated = self.device.workers.submit(work)

    def states(self) -> Iterator[TensorState]:
        columns = (self.layout.views(self.master), self.layout.views(self.exp_avg))
        for name, weight, exp_avg in zip(self.layout.names, *columns, strict=True):
            yield TensorState(self.prefix + name, weight, exp_avg)


def new_layer(workload: Workload) -> Layer:
    """A layer without memory of its own; the slot it comes to gives it some."""
    with torch.device("meta"):
        return Layer(workload)
