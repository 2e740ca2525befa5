"""How a device runs one unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from methods.offload.clip import clip_factor, global_norm, norms_of
from methods.offload.transfer import copy_all, num_bytes
from methods.sharding.shard import Shard, ShardSlot
from methods.sharding.unit import Kept, Result, Tensors, Unit, map_tensor


class Turn:
    """One unit, with its shard in its slot."""

    def __init__(self, worker: Any, slot: ShardSlot, shard: Shard, unit: Unit) -> None:
        self.worker, self.slot, self.shard, self.unit = worker, slot, shard, unit
        self.home = "seconds" if unit.part else "grads"  # the slab at home for its gradients

    def _span(self, work: str = "") -> Any:
        return self.worker.device.span("compute", work or self.unit.kind, self.shard.name)

    def forward(self) -> Result:
        worker = self.worker
        if worker.saves:
            return self._forward_saved()
        host, x, kept = self.unit.x, worker.to_device(self.unit.x), []
        with self._span():
            for layer in self.shard.layers:
                kept.append(Kept(host, worker.random_state()))
                with torch.no_grad():
                    x = call(layer, x)
                host = worker.to_host(x)
        return Result(host, kept)

    def loss(self) -> Result:
        """The forward pass, the loss, and the backward pass of all layers."""
        with self._span():
            loss, dy = self._loss()
        return self._end(dy)._replace(loss=loss.detach())

    def _loss(self) -> tuple[Tensor, Tensors]:
        worker, (*below, last) = self.worker, self.shard.layers
        start = x = leaves(worker.to_device(self.unit.x))
        (targets,) = worker.to_device((self.unit.targets,))
        self._start_gradients()
        kept = []
        with self._saving() if worker.saves else torch.no_grad():
            for layer in below:
                kept.append(Kept(x, worker.random_state()))
                x = call(layer, x)
            if worker.saves:
                loss = self._share(last(*x, targets))
        if not worker.saves:
            x = leaves(x)
            loss = self._share(last(*x, targets))
        after = worker.random_state()
        loss.backward()
        dy = tuple(map(gradient, start))
        if not worker.saves:
            dy = self._down(below, kept, tuple(map(gradient, x)))
            worker.set_random(after)
        return loss, dy

    def _share(self, loss: Tensor) -> Tensor:
        """The part's share of the whole batch's loss."""
        return loss if self.unit.part is None else loss / 2

    def backward(self) -> Result:
        with self._span():
            self._start_gradients()
            dy = self.worker.to_device(self.unit.dy)
            dx = self._backward_saved(dy) if self.worker.saves else self._down(self.shard.layers, self.unit.kept, dy)
        return self._end(dx)

    def update(self) -> Result:
        self._step(self.unit.factor)
        return Result()

    def _down(self, layers: Sequence[nn.Module], kept: list[Kept], dy: Tensors) -> Tensors:
        """Recompute and differentiate layer by layer, last to first."""
        for layer, (x_kept, random) in zip(reversed(layers), reversed(kept), strict=True):
            x = leaves(self.worker.to_device(x_kept))
            self.worker.set_random(random)
            y = call(layer, x)
            pairs = [(part, grad) for part, grad in zip(y, dy, strict=True) if part.requires_grad and grad is not None]
            if pairs:
                torch.autograd.backward([part for part, _ in pairs], [grad for _, grad in pairs])
            dy = tuple(gradient(part) for part in x)
        return dy

    def _start_gradients(self) -> None:
        """Zeros, plus the gradients that later shards have sent home for shared parameters."""
        self.slot.slabs["grads"].zero_()
        if self.shard.sums:
            homes = [self.shard.lenders.get(name, self.shard) for name in self.shard.sums]
            for event in {id(home.landed): home.landed for home in homes if home.landed is not None}.values():
                self.worker.device.compute.wait_event(event)
            pairs = [(self.slot.view(name, "grads"), self.shard.at_home(name, self.home)) for name in self.shard.sums]
            copy_all(pairs)
            self.worker.device.moved_bytes += num_bytes(pairs)

    def _end(self, dy: Tensors) -> Result:
        """Send the complete gradients home, or update by them at once."""
        norms = norms_of([self.slot.view(name, "grads") for name in self.shard.trained])
        if self.unit.update == "later":
            self._offload(["grads"], self.shard.lenders)
            if self.unit.part is None:
                self.slot.valid.add("grads")
        else:
            factor = None
            if self.unit.update == "clipped" and norms:
                factor = clip_factor(global_norm(norms), self.worker.max_norms[self.unit.model])
            self._step(factor)
            if self.shard.lenders:
                self._offload([], self.shard.lenders)
        return Result(self.worker.to_host(dy), norms=norms)

    def _offload(self, parts: Sequence[str], names: Iterable[str] = ()) -> None:
        if not self.unit.rehearses:
            self.slot.offload(parts, names, self.home)

    def _step(self, factor: Tensor | None) -> None:
        """One optimizer step on the shard's own parameters; sends weights and states home."""
        shard, slot = self.shard, self.slot
        if shard.trained:
            if factor is not None:
                (factor,) = self.worker.to_device((factor,))
            with self._span("update"):
                is_first = self.unit.version.own == 0
                shard.step(slot.slabs["states"], factor, self.unit.learning_rate, is_first=is_first)
            self._offload(["weights", "states"])
        slot.version = slot.version._replace(own=self.unit.version.own + 1)
        slot.valid = (slot.valid - {"grads"}) | {"weights", "states"}

    def _forward_saved(self) -> Result:
        """Keep the graph in this process until the shard's backward pass, its tensors on the host."""
        inputs: list[Tensor | None] = []
        anchor = torch.zeros((), device=self.worker.device.name, requires_grad=True)
        with torch.enable_grad(), self._saving(), self._span():
            x = _Start.apply(inputs, anchor, *self.worker.to_device(self.unit.x))
            for layer in self.shard.layers:
                x = call(layer, x)
            edges = [torch.autograd.graph.get_gradient_edge(part) if part.requires_grad else None for part in x]
        self.worker.graphs[self.unit.model, self.unit.shard, self.unit.part] = (edges, inputs)
        return Result(self.worker.to_host(tuple(part.detach() for part in x)))

    def _backward_saved(self, dy: Tensors) -> Tensors:
        edges, inputs = self.worker.graphs.pop((self.unit.model, self.unit.shard, self.unit.part))
        pairs = [(edge, grad) for edge, grad in zip(edges, dy, strict=True) if edge is not None and grad is not None]
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
        return tuple(inputs)

    def _saving(self) -> Any:
        """Keep the tensors that autograd saves on the host; of a weight only its place in the shard's slab."""
        worker, weights = self.worker, self.slot.slabs["weights"].untyped_storage()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata == weights._cdata:
                return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
            return worker.to_host((tensor,))

        def unpack(packed: Any) -> Tensor:
            if len(packed) == 1:
                return worker.to_device(packed)[0]
            assert worker.busy is not None
            dtype, shape, stride, offset = packed
            return worker.busy.slabs["weights"].view(dtype).as_strided(shape, stride, offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Start(torch.autograd.Function):
    """The start of a saved graph: passes the input through, and keeps its gradient but not the input."""

    @staticmethod
    def forward(ctx: Any, inputs: list[Tensor | None], anchor: Tensor, *x: Any) -> Tensors:
        ctx.inputs = inputs
        ctx.mark_non_differentiable(*(part for part in x if isinstance(part, Tensor) and not part.is_floating_point()))
        return tuple(map_tensor(part, lambda t: t.view_as(t)) for part in x)

    @staticmethod
    def backward(ctx: Any, *dx: Any) -> Any:
        ctx.inputs.extend(dx)
        return (None, None, *(None for _ in dx))


def call(layer: nn.Module, x: Tensors) -> Tensors:
    y = layer(*x)
    return y if isinstance(y, tuple) else (y,)


def leaves(x: Tensors) -> Tensors:
    """The same tensors as leaves of a new graph, with gradients if they are floating point."""
    return tuple(map_tensor(part, lambda t: t.detach().requires_grad_(t.is_floating_point())) for part in x)


def gradient(x: Any) -> Tensor | None:
    return x.grad if isinstance(x, Tensor) else None
