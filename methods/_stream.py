"""How a layer travels between host and device; when it travels is each method's own loop.

A layer at home is flat slabs: weights, gradient, fp32 master and moments. A slot is room on the device for one layer's
weights and gradient; a layer that comes to it has its parameters there. A copy is one flat transfer per direction and
visit. Three streams (compute, inbound, outbound) are ordered by events alone; host threads wait for what they need, the
launching thread only for a copy to have been queued. Slots and slabs live as long as the run, so no buffer changes
streams through an allocator.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.utils.checkpoint import checkpoint

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


class Clip:
    """The global gradient norm, of each layer's norms in the model's order, and the factor that it asks for."""

    def __init__(self, norms: list[list[Tensor]], max_norm: float) -> None:
        self.total = torch.linalg.vector_norm(torch.stack([*chain.from_iterable(norms)]))
        self.factor: Tensor | None = None
        self.host_factor: Tensor | None = None
        if max_norm:
            self.factor = torch.clamp(max_norm / (self.total + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_

    def send_home(self, device: Device) -> None:
        """Queue the copy of the factor to the host, for the updates there."""
        if self.factor is None:
            return
        done = device.compute.record_event()
        with device.streams.use(device.outbound):
            device.outbound.wait_event(done)
            self.host_factor = self.factor.to("cpu", non_blocking=True)
            self.landed = device.outbound.record_event()

    def on_host(self) -> Tensor | None:
        """The factor, waited for; None without clipping."""
        if self.host_factor is not None:
            self.landed.synchronize()
        return self.host_factor


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


class Saved(NamedTuple):
    """What a forward pass keeps: the layer's input, and its output with a graph that holds no activation."""

    x: Tensor
    y: Tensor


class Slot:
    """Room on the device for one layer's weights and gradient. A resident layer's slot is its home's own slabs."""

    def __init__(self, home: Home, *, resident: bool = False) -> None:
        self.device, self.home = home.device, home
        self.loaded: Future | None = None
        self.drained: Any = None
        if resident:
            self.weights, self.grads = home.weights, home.grads
            home.bind(self.weights, self.grads)
        else:
            self.weights = self.device.room(home.weights.numel(), home.weights.dtype, host=False)
            self.grads = self.device.room(home.grads.numel(), home.grads.dtype, host=False)

    def prefetch(self, home: Home) -> None:
        """Queue the copy of a layer's weights into this slot, after its own update and the slot's last use."""
        device, updated, used = self.device, home.updated, self.device.compute.record_event()

        def work() -> Any:
            updated.result()
            with device.streams.use(device.inbound):
                device.inbound.wait_event(used)
                self.weights.copy_(home.weights, non_blocking=True)
                return device.inbound.record_event()

        device.moved_bytes += self.weights.nbytes
        self.home, self.loaded = home, device.copier.submit(work)
        home.bind(self.weights, self.grads)

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        """The layer's output, and what its backward pass needs: only the input is kept. x: (B, T, D).

        Source: Chen et al. 2016, sublinear memory, by torch's checkpoint, which keeps the random state for dropout and
        stops the recompute where nothing more is needed.
        """
        self._arrive()
        x = x.detach().requires_grad_()
        y = checkpoint(self.home.module, x, use_reentrant=False, preserve_rng_state=self.home.has_dropout)
        return y.detach(), Saved(x, y)

    def backward(self, saved: Saved, dy: Tensor) -> Tensor:
        """Recompute the layer on its input, leave its gradient in the slot, return the input's. dy: (B, T, D)."""
        self._arrive()
        if self.drained is not None:
            # The copy home may still be reading the slot's last gradient: wait for it, not for the device.
            self.device.compute.wait_event(self.drained)
        self.grads.zero_()
        torch.autograd.backward(saved.y, dy)
        assert saved.x.grad is not None
        return saved.x.grad

    def norms(self) -> list[Tensor]:
        """The norm of each parameter's gradient, fp32, on the device."""
        return list(torch._foreach_norm(self.home.layout.views(self.grads), 2, dtype=torch.float32))

    def offload(self, home: Home) -> None:
        """Queue the copy of the slot's gradient to its home."""
        device, done = self.device, self.device.compute.record_event()
        with device.streams.use(device.outbound):
            device.outbound.wait_event(done)
            home.grads.copy_(self.grads, non_blocking=True)
            self.drained = home.landed = device.outbound.record_event()
        device.moved_bytes += self.grads.nbytes

    def wait(self) -> None:
        """Wait on the host until what this slot asked for, in either direction, has happened."""
        self.device.synchronize(*([self.loaded] if self.loaded else []))

    def _arrive(self) -> None:
        """Let compute wait for the weights; the launching thread waits only until their copy is queued."""
        if self.loaded is not None:
            self.device.compute.wait_event(self.loaded.result())
            self.loaded = None


def new_layer(workload: Workload) -> Layer:
    """A layer without memory of its own; the slot it comes to gives it some."""
    with torch.device("meta"):
        return Layer(workload)
