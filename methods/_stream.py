"""How a layer travels between host and device; when it travels is each method's own loop.

A slot is room on the device for one layer's weights and gradient; a layer that comes to it has its parameters there. A
copy is one flat transfer per direction and visit. Three streams (compute, inbound, outbound) are ordered by events
alone; host threads wait for what they need, the launching thread only for a copy to have been queued. Slots and slabs
live as long as the run, so no buffer changes streams through an allocator.

Shapes: B samples of a micro-batch, T tokens, D hidden. A layer takes all micro-batches of a step, one after the other.
"""

from __future__ import annotations

from concurrent.futures import Future
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from methods._device import Device
from methods._home import Home


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

    def forward(self, xs: list[Tensor]) -> tuple[list[Tensor], list[Saved]]:
        """The layer's outputs, and what its backward pass needs: only the inputs are kept. xs: (B, T, D) each.

        Source: Chen et al. 2016, sublinear memory, by torch's checkpoint, which keeps the random state for dropout and
        stops the recompute where nothing more is needed.
        """
        self._arrive()
        kept = []
        for x in xs:
            x = x.detach().requires_grad_()
            y = checkpoint(self.home.module, x, use_reentrant=False, preserve_rng_state=self.home.has_dropout)
            kept.append(Saved(x, y))
        return [y.detach() for _, y in kept], kept

    def backward(self, kept: list[Saved], dys: list[Tensor]) -> list[Tensor]:
        """Recompute the layer on its inputs, leave the sum of its gradients in the slot, return the inputs'. dys:
        (B, T, D) each."""
        self._arrive()
        if self.drained is not None:
            # The copy home may still be reading the slot's last gradient: wait for it, not for the device.
            self.device.compute.wait_event(self.drained)
        self.grads.zero_()
        dxs = []
        for (x, y), dy in zip(kept, dys, strict=True):
            torch.autograd.backward(y, dy)
            assert x.grad is not None
            dxs.append(x.grad)
        return dxs

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
