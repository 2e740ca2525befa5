"""The two ends of the model: the embedding, and the head with the loss. Both ends are resident on the device or, if the
device is too small for their states, at home on the host, which then updates them.

Shapes: B samples of a micro-batch, T tokens, D hidden, V vocabulary. The ends take a whole batch, and pass this rank's
part to the layers as a list of micro-batches, each a tuple of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from harness.core.job import Workload
from harness.devices.streams import Device
from harness.models.model import new_end_parts, new_ends
from methods.offload.adamw import Settings
from methods.offload.clip import Clip
from methods.offload.layout import install
from methods.shared.terms import Terms
from methods.streaming.layer_state import Home, LayerState, NamedLayer, Passed
from methods.streaming.slot import GradientRoom, Slot
from methods.streaming.starting_values import draw_states

LAST_DEADLINE = 2**30  # deadline of the ends' updates: after the deadlines of all layers


class OnDevice:
    """All parts of a model except its layers, on the device, with the methods that update rules call."""

    is_hosted = False

    def __init__(self, state: LayerState) -> None:
        self.states = [state]

    def fetch(self) -> None: ...

    def norms(self) -> list[Tensor]:
        return self.states[0].norms()

    def update(self, settings: Settings, clip: Clip) -> None:
        self.states[0].update(settings, clip.factor)


class BothEnds:
    """The passes through both ends, whose weights are on the device. `embedding` and `head` are one state if they share
    a tensor; `slab` takes the gradients of both."""

    device: Device
    embedding: LayerState
    head: LayerState
    slab: Tensor
    num_micro_batches: int

    def join(self, layers: Iterable[LayerState]) -> None:
        """Give the layers those of their parameters that live beside the ends: none."""

    def embed(self, inputs: Tensor) -> list[Passed]:
        """Embed token ids to (B, T, D); keep only the small graph of the look-up, for backward()."""
        module: Any = self.embedding.module
        with self.device.span("compute", "forward", self.embedding.prefix):
            embedded = [module.embed(micro_batch) for micro_batch in self._micro_batches(inputs)]
            # an edge keeps the graph, but not x's memory
            self.embedded = [get_gradient_edge(x) for x in embedded]
        return [(x.detach().requires_grad_(),) for x in embedded]

    def loss(self, xs: list[Passed], targets: Tensor, scale: float) -> tuple[Tensor, list[Passed]]:
        """Return the mean loss of the whole batch, detached, and the gradients of the last layer's outputs. Only the
        gradients are multiplied by the loss scale."""
        module: Any = self.head.module
        with self.device.span("compute", "loss", self.head.prefix):
            self.head.collect_gradients(self.slab)
            total_loss, dxs = torch.zeros((), device=xs[0][0].device), list[Passed]()
            for (x,), micro_batch in zip(xs, self._micro_batches(targets), strict=True):
                x = x.detach().requires_grad_()
                loss = module.loss(x, micro_batch, scale) / (
                    self.num_micro_batches * self.device.ranks.num_ranks
                )
                loss.backward()
                total_loss += loss.detach()
                assert x.grad is not None
                dxs.append((x.grad,))
            self.device.ranks.sum(total_loss)
        return total_loss, dxs

    def backward(self, dxs: list[Passed]) -> None:
        """Add the look-up's gradient to the embedding's gradient, and sum the result over ranks. The sum is the
        gradient of the whole batch."""
        with self.device.span("compute", "backward", self.embedding.prefix):
            for edge, (dx,) in zip(self.embedded, dxs, strict=True):
                torch.autograd.backward([edge], [dx])
        del self.embedded
        self.embedding.sum_gradients()

    def _micro_batches(self, batch: Tensor) -> tuple[Tensor, ...]:
        return self.device.ranks.part(batch).chunk(self.num_micro_batches)


class ResidentEnds(BothEnds, OnDevice):
    """The embedding, the final norm and the head, wholly on the device."""

    def __init__(self, device: Device, workload: Workload) -> None:
        ends = NamedLayer(new_ends(workload), workload.anatomy.ends_prefix)
        state = LayerState(device, ends, Terms.of(workload), Home(on_host=False))
        super().__init__(state)
        self.device, self.embedding, self.head, self.slab = device, state, state, state.grads
        self.num_micro_batches = workload.micro_batches
        draw_states(self.states, workload)
        state.bind(state.current.weights)


class FrozenEnds(BothEnds, OnDevice):
    """The embedding, the final norm and the head, frozen, and beside them the adapters of all layers, which are
    trained: all of it on the device."""

    def __init__(self, device: Device, workload: Workload) -> None:
        terms, anatomy = Terms.of(workload), workload.anatomy
        ends = LayerState(
            device, NamedLayer(new_ends(workload), anatomy.ends_prefix), terms, Home(on_host=False)
        )
        adapters = _module_of(anatomy.adapter_tensors(workload.num_layers))
        trained = NamedLayer(adapters, "", dtype="fp32")
        self.adapters = LayerState(device, trained, terms, Home(on_host=False))
        super().__init__(self.adapters)
        self.states.append(ends)
        self.device, self.embedding, self.head, self.slab = device, ends, ends, ends.grads
        self.num_micro_batches = workload.micro_batches
        draw_states(self.states, workload)
        for state in self.states:
            state.bind(state.current.weights)

    def join(self, layers: Iterable[LayerState]) -> None:
        """Give the layers their adapters."""
        of_layer = {layer.prefix: layer.module for layer in layers}
        for name, parameter in self.adapters.module.named_parameters():
            prefix = next(prefix for prefix in of_layer if name.startswith(prefix))
            install(of_layer[prefix], name.removeprefix(prefix), parameter)

    def embed(self, inputs: Tensor) -> list[Passed]:
        module: Any = self.embedding.module
        with self.device.span("compute", "forward", self.embedding.prefix):
            return [(module.embed(micro_batch),) for micro_batch in self._micro_batches(inputs)]

    def loss(self, xs: list[Passed], targets: Tensor, scale: float) -> tuple[Tensor, list[Passed]]:
        self.adapters.collect_gradients(self.adapters.grads)
        return super().loss(xs, targets, scale)

    def backward(self, dxs: list[Passed]) -> None:
        """Sum the adapters' gradients over ranks."""
        self.adapters.sum_gradients()


def _module_of(shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """Return a module whose parameters have these names, which have dots, and shapes, but no memory."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))
    return root


class HostedEnds(BothEnds):
    """Both ends at home on the host, as one part or, if the head is not tied, as two. The device has room for the
    weights and the gradient of the larger part.

    An untied head takes the embedding's slot after the look-up, whose backward pass needs no weights. The head's
    gradient goes home during the layers' backward passes. If `waits`, the device waits for every copy and every update,
    and the next step's embedding is not fetched ahead.
    """

    is_hosted = True

    def __init__(self, device: Device, workload: Workload, *, waits: bool = False) -> None:
        terms, prefix = Terms.of(workload), workload.anatomy.ends_prefix
        embedding, *untied_heads = new_end_parts(workload)
        home = Home(on_host=True)
        self.states = [LayerState(device, NamedLayer(embedding, prefix), terms, home)]
        self.states += [
            LayerState(device, NamedLayer(head, prefix), terms, home, LAST_DEADLINE) for head in untied_heads
        ]
        self.device, self.embedding, self.head, self.waits = device, self.states[0], self.states[-1], waits
        self.num_micro_batches = workload.micro_batches
        draw_states(self.states, workload)
        largest_state = max(self.states, key=lambda state: state.layout.numel)
        # A separate thread fetches the ends, as it fetches parked layers, because the next step begins with the
        # embedding.
        self.slot, self.gradients = Slot(largest_state, device.returner), GradientRoom(largest_state)
        self.slab = self.gradients.slab

    def fetch(self) -> None:
        """Queue the copy of the embedding for the next step; the copy starts when the embedding is updated."""
        self._bring(self.embedding)

    def embed(self, inputs: Tensor) -> list[Passed]:
        if self.waits:
            self.fetch()
        self.slot.arrive()
        xs = super().embed(inputs)
        if self.head is not self.embedding:
            self._bring(self.head)
        return xs

    def loss(self, xs: list[Passed], targets: Tensor, scale: float) -> tuple[Tensor, list[Passed]]:
        self.slot.arrive()
        self.gradients.await_room()
        loss_and_dxs = super().loss(xs, targets, scale)
        self.norms_of_head = []
        if self.head is not self.embedding:
            self.norms_of_head = self.head.norms()
            self._send(self.head)
        return loss_and_dxs

    def backward(self, dxs: list[Passed]) -> None:
        if self.head is not self.embedding:
            self.gradients.await_room()
            self.embedding.collect_gradients(self.slab)
        super().backward(dxs)
        self.norms_of_embedding = self.embedding.norms()
        self._send(self.embedding)

    def norms(self) -> list[Tensor]:
        return [*self.norms_of_embedding, *self.norms_of_head]

    def update(self, settings: Settings, clip: Clip) -> None:
        for state in self.states:
            state.update_when_landed(settings, clip)
            if self.waits:
                state.updated.result()

    def _bring(self, state: LayerState) -> None:
        (self.slot.load if self.waits else self.slot.prefetch)(state)

    def _send(self, state: LayerState) -> None:
        self.gradients.send_home(state)
        if self.waits:
            self.device.synchronize()


AnyEnds = OnDevice | HostedEnds


def ends_of(
    device: Device, workload: Workload, home: str | None, *, waits: bool = False
) -> ResidentEnds | FrozenEnds | HostedEnds:
    """Return the ends with their home on the host if `home` is "host"; for any other `home`, on the device. With
    adapters the ends are frozen."""
    if workload.lora:
        return FrozenEnds(device, workload)
    return HostedEnds(device, workload, waits=waits) if home == "host" else ResidentEnds(device, workload)
