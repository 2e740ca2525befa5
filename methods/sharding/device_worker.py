"""The worker of a device: it keeps the device's slots and runs one unit at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.devices.budgets import reset_peaks
from harness.devices.streams import Device
from methods.offload.clip import clip_factor, global_norm, norms_of
from methods.offload.transfer import copy_all, num_bytes
from methods.sharding.shard import Shard, ShardSlot, Version
from methods.sharding.unit import FORWARD, RecomputeInput, Result, Tensors, Unit, map_tensors, needed_parts


@dataclass(frozen=True)
class WorkerOptions:
    """How a device runs units."""

    double_buffer: bool = True  # True: the device has a second slot, for the next unit's shard
    # checkpointed: recompute layers; saved: keep the tensors that autograd saves on the host
    intermediates: str = "checkpointed"
    keeps_random: bool = True  # True: restore the random state for a recompute
    # each model's largest norm of the gradient, where shards clip by themselves
    max_norms: Sequence[float] = ()
    # most bytes that a process may take of its device; None: no limit of its own
    device_memory: int | None = None


class Worker:
    """Runs units of models in the slots of a device."""

    def __init__(self, device: Device, models: Sequence[Sequence[Shard]], options: WorkerOptions) -> None:
        self.device, self.models, self.options = device, models, options
        self.is_cuda, self.saves = device.name.type == "cuda", options.intermediates == "saved"
        self.rehearses = False
        # Slots are made only when the first unit runs, because a unit can report a lack of memory.
        self.slots: list[ShardSlot] = []
        self.num_shards = 0  # number of shards that the slots were made for
        for layer in (layer for shard in self._shards() for layer in shard.layers):
            for module in layer.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(device.name))
        self.unit: Any = None  # the running unit; None between units
        self.slot: Any = None  # the running unit's slot; None between units
        # for each unit, by graph_key(): the graph of its forward pass, until the backward pass
        self.graphs: dict[tuple[int, int, int | None], Any] = {}

    def _shards(self) -> list[Shard]:
        return [shard for model in self.models for shard in model]

    def _fit_slots(self, rehearses: bool) -> None:
        """Make new, empty slots if this is the first unit, if shards were halved, or if a rehearsal has ended. After a
        rehearsal also count moved bytes anew and, on a GPU, memory peaks: the rehearsal may have tried larger shards.
        `rehearses`: True if the unit to run is part of a rehearsal."""
        shards, is_over = self._shards(), self.rehearses and not rehearses
        if self.num_shards != len(shards) or is_over:
            self.device.synchronize()
            for shard in shards:
                shard.release()
            self.graphs.clear()
            self.slots, self.num_shards = [], 0  # free the old slots first
            self.slots = [
                ShardSlot(self.device, shards)
                for _ in range(min(1 + self.options.double_buffer, len(shards)))
            ]
            self.num_shards = len(shards)
        if is_over:
            self.device.moved_bytes = 0
            if self.is_cuda:
                reset_peaks("cuda")
        self.rehearses = rehearses

    def prefetch(self, unit: Unit) -> None:
        """Queue copies of the parts of a shard that `unit` needs, into a slot that the running unit does not use.

        If both units have the same shard, copy only the optimizer's states, into the slot in use. If there is only one
        slot and the shards differ, copy nothing.
        """
        shard, parts = self.models[unit.model][unit.shard], needed_parts(unit)
        shard.name = f"model {unit.model} shard {unit.shard}"
        slot = self._slot_of(shard, unit.version)
        if slot is self.slot:
            parts = parts & {"states"} if slot.holds(shard, unit.version) else set()
        if parts:
            slot.prefetch(shard, unit.version, parts)

    def run(self, unit: Unit, next_unit: Unit | None = None) -> Result:
        """Run a unit and return its result. Meanwhile prefetch the shard of `next_unit`, the unit that is expected
        next; None: prefetch nothing."""
        self._fit_slots(unit.rehearses)
        self.prefetch(unit)
        self.slot = self._slot_of(self.models[unit.model][unit.shard], unit.version)
        self.unit, self.shard = unit, self.slot.arrive(to_write=unit.kind != FORWARD)
        # name of the host's slab that gets the shard's gradients
        self.gradient_slab = "seconds" if unit.batch_half else "grads"
        if next_unit is not None:
            self.prefetch(next_unit)
        # The unit runs with its model's random state. The random state of this process is restored afterwards.
        gpu_names = [self.device.name] if self.is_cuda else []
        with torch.random.fork_rng(gpu_names, enabled=self.options.keeps_random, device_type="cuda"):
            self.set_random(unit.random_state)
            result: Result = getattr(self, unit.kind)()
            random_state = self.random_state()
        self.unit = self.slot = None
        return result._replace(random_state=random_state)

    def finish(self, result: Result) -> Result:
        """Wait until the device has computed the result. Return the result with all tensors on the host, where another
        process can read them."""
        self.device.synchronize()
        (loss,) = map_tensors(Tensor.cpu, [result.loss])
        return result._replace(loss=loss, norms=result.norms and [norm.cpu() for norm in result.norms])

    def forget(self, unit: Unit) -> None:
        """Discard a failed unit's graph, and the contents of its slot."""
        if self.slot is not None:
            self.slot.shard = self.slot = self.unit = None
        self.graphs.pop(graph_key(unit), None)

    def _slot_of(self, shard: Shard, version: Version) -> ShardSlot:
        for slot in self.slots:
            if slot.holds(shard, version):
                return slot
        free = [slot for slot in self.slots if slot is not self.slot]
        # `slots` is a queue, in the order in which slots were filled. Take the first free slot and put this slot at the
        # end.
        slot = free[0] if free else self.slots[0]
        self.slots.remove(slot)
        self.slots.append(slot)
        return slot

    def random_state(self) -> Any:
        if not self.options.keeps_random:
            return None
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device.name) if self.is_cuda else None

    def set_random(self, state: Any) -> None:
        if state is None:
            return
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self.device.name)

    def to_host(self, tensors: Sequence[Any]) -> Tensors:
        """Return the tensors on the host. From a GPU, tensors are copied to page-locked memory, and the copy may still
        run when this method returns; the memory lives until the copy has ended. Tensors of a CPU are returned without a
        copy, unless they lie in the slot, as a view of a weight does: the next shard overwrites the slot.
        """
        if self.device.name.type == "cpu":
            slot = self.slot.slabs["weights"].untyped_storage()._cdata
            return map_tensors(lambda t: t.clone() if t.untyped_storage()._cdata == slot else t, tensors)
        return map_tensors(lambda t: t.to("cpu", non_blocking=self.is_cuda), tensors)

    def to_device(self, tensors: Tensors) -> Tensors:
        return map_tensors(lambda t: t.to(self.device.name, non_blocking=True), tensors)

    def _compute_span(self, work: str = "") -> Any:
        return self.device.span("compute", work or self.unit.kind, self.shard.name)

    def forward(self) -> Result:
        forward = self._forward_saved if self.saves else self._forward
        with self._compute_span():
            y, kept = zip(*map(forward, self.unit.x), strict=True)  # for each micro-batch
        if self.saves:
            self.graphs[graph_key(self.unit)] = kept
            return Result(y)
        return Result(y, [*zip(*kept, strict=True)])

    def _forward(self, host: Tensors) -> tuple[Tensors, list[RecomputeInput]]:
        """Run the forward pass of a micro-batch. Return the output, and a RecomputeInput of each layer."""
        x, recompute_inputs = self.to_device(host), []
        for layer in self.shard.layers:
            recompute_inputs.append(RecomputeInput(host, self.random_state()))
            with torch.no_grad():
                x = call_layer(layer, x)
            host = self.to_host(x)
        return host, recompute_inputs

    def loss(self) -> Result:
        """Run the last shard's forward pass, the loss, and the shard's backward pass."""
        with self._compute_span():
            self._start_gradients()
            losses, dy = zip(*map(self._loss_of_micro_batch, self.unit.x, self.unit.targets), strict=True)
        return self._end_pass(dy)._replace(loss=sum(losses))

    def _loss_of_micro_batch(self, x: Tensors, targets: Any) -> tuple[Tensor, Tensors]:
        """Run the last shard's forward pass, the loss and the backward pass of a micro-batch. Return the micro-batch's
        share of the loss, and the gradient of the shard's input, on the host. All other tensors are freed on return."""
        *below, last = self.shard.layers
        shard_input_grads: Sequence[Any]
        x, shard_input_grads = start_graph(self.to_device(x))
        (targets,) = self.to_device((targets,))
        recompute_inputs = []
        with self._saving() if self.saves else torch.no_grad():
            for layer in below:
                recompute_inputs.append(RecomputeInput(x, self.random_state()))
                x = call_layer(layer, x)
            if self.saves:
                loss = last(*x, targets)
        if not self.saves:
            x, last_input_grads = start_graph(x)
            loss = last(*x, targets)
        # The loss of the whole batch is the mean of this many losses.
        num_shares = len(self.unit.x) * (1 if self.unit.batch_half is None else 2)
        if num_shares > 1:
            loss = loss / num_shares
        random_after = self.random_state()
        loss.backward()
        if not self.saves:
            shard_input_grads = self._backward_layers(below, recompute_inputs, last_input_grads)
            self.set_random(random_after)
        return loss.detach(), self.to_host(tuple(shard_input_grads))

    def backward(self) -> Result:
        inputs, key = self.unit.recompute_inputs, graph_key(self.unit)
        kept = self.graphs.pop(key) if self.saves else zip(*inputs, strict=True)  # for each micro-batch
        with self._compute_span():
            self._start_gradients()
            dy = [*map(self._backward, kept, self.unit.dy)]
        return self._end_pass(dy)

    def _backward(self, kept: Any, dy: Tensors) -> Tensors:
        """Run the backward pass of a micro-batch. `kept`: what _forward() or _forward_saved() returned for this
        micro-batch beside the output. Return the gradient of the shard's input, on the host."""
        input_grads: Sequence[Any]
        if self.saves:
            output_edges, input_grads = kept
            differentiate(output_edges, self.to_device(dy))
        else:
            input_grads = self._backward_layers(self.shard.layers, kept, self.to_device(dy))
        return self.to_host(tuple(input_grads))

    def update(self) -> Result:
        self._step(self.unit.factor)
        return Result()

    def _backward_layers(
        self, layers: Sequence[nn.Module], recompute_inputs: Sequence[RecomputeInput], dy: Sequence[Any]
    ) -> Sequence[Any]:
        """Recompute and differentiate the layers, last to first. `recompute_inputs`: each layer's input and random
        state. Return the gradient of the first layer's input."""
        for layer, (x_kept, random_state) in zip(reversed(layers), reversed(recompute_inputs), strict=True):
            x, input_grads = start_graph(self.to_device(x_kept))
            self.set_random(random_state)
            y = call_layer(layer, x)
            differentiate([value if needs_grad(value) else None for value in y], dy)
            dy = input_grads
        return dy

    def _start_gradients(self) -> None:
        """Set the slot's gradients to zero. For a parameter that later shards share, start from the sum of gradients
        that these shards have copied to the host."""
        self.slot.slabs["grads"].zero_()
        if self.shard.summed_names:
            home_shards = [self.shard.lenders.get(name, self.shard) for name in self.shard.summed_names]
            events = [home_shard.offload_event for home_shard in home_shards]
            for event in {id(event): event for event in events if event is not None}.values():
                self.device.compute.wait_event(event)
            pairs = [
                (self.slot.view(name, "grads"), self.shard.at_home(name, self.gradient_slab))
                for name in self.shard.summed_names
            ]
            copy_all(pairs)
            self.device.moved_bytes += num_bytes(pairs)

    def _end_pass(self, dy: Sequence[Tensors]) -> Result:
        """If the update is a later unit, copy the gradients to the host; if not, update the shard now. Return the
        unit's result. `dy`: the gradients of the shard's inputs, on the host. Raises ValueError if a parameter got no
        gradient: an optimizer would leave such a parameter alone, but here the gradient is zero, and the weight would
        decay."""
        if names := self.shard.without_gradient():
            raise ValueError(
                f"expected a gradient for each parameter in each batch, got none for {', '.join(names)}; try"
                " requires_grad_(False)"
            )
        norms = norms_of(
            [self.slot.view(name, "grads") for name in self.shard.trained_names], in_blocks=len(dy) > 1
        )
        if self.unit.update == "later":
            self._offload(["grads"], self.shard.lenders)
            if self.unit.batch_half is None:
                self.slot.valid_parts.add("grads")
        else:
            factor = None
            if self.unit.update == "clipped" and norms:
                factor = clip_factor(global_norm(norms), self.options.max_norms[self.unit.model])
            self._step(factor)
            if self.shard.lenders:
                self._offload([], self.shard.lenders)
        return Result(dy, norms=norms)

    def _offload(self, parts: Sequence[str], names: Iterable[str] = ()) -> None:
        if not self.unit.rehearses:
            self.slot.offload(parts, names, self.gradient_slab)

    def _step(self, factor: Tensor | None) -> None:
        """Run one optimizer step on the shard's own parameters, with gradients times `factor` (None: 1). Copy weights
        and states to the host."""
        shard, slot = self.shard, self.slot
        if shard.trained_names:
            if factor is not None:
                factor = factor.to(self.device.name, non_blocking=True)
            with self._compute_span("update"):
                is_first = self.unit.version.home == 0
                shard.step(slot.slabs["states"], factor, self.unit.learning_rate, is_first=is_first)
            self._offload(["weights", "states"])
        slot.version = slot.version._replace(home=self.unit.version.home + 1)
        slot.valid_parts = (slot.valid_parts - {"grads"}) | {"weights", "states"}

    def _forward_saved(self, x: Tensors) -> tuple[Tensors, Any]:
        """Run the forward pass of a micro-batch and keep autograd's graph for the backward pass: the graph stays in
        this process, and the tensors that the graph saves go to the host. Return the output, and what _backward() needs
        of the graph: the output's edges, and the list that will hold the gradients of the inputs."""
        with torch.enable_grad(), self._saving():
            x, input_grads = start_graph(self.to_device(x))
            for layer in self.shard.layers:
                x = call_layer(layer, x)
            output_edges = [
                torch.autograd.graph.get_gradient_edge(value) if needs_grad(value) else None for value in x
            ]
        return self.to_host(map_tensors(Tensor.detach, x)), (output_edges, input_grads)

    def _saving(self) -> Any:
        """Return a context in which the tensors that autograd saves are kept on the host. A saved weight is not copied:
        only its position in the shard's slab is kept."""
        weights = self.slot.slabs["weights"].untyped_storage()

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata == weights._cdata:
                return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
            # A tensor that is on the host stays there, for example the random seeds of a GPU's attention kernel.
            return self.to_host((tensor,)) if tensor.device.type == self.device.name.type else tensor

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if len(packed) == 1:
                return self.to_device(packed)[0]
            dtype, shape, stride, offset = packed
            return self.slot.slabs["weights"].view(dtype).as_strided(shape, stride, offset)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _GraphStart(torch.autograd.Function):
    """The first node of a graph. The node passes the input on and, in the backward pass, keeps the input's gradient,
    but not the input. If the input were a leaf, autograd would lay out the gradient as the leaf is laid out, and
    results computed from that gradient would be rounded otherwise."""

    @staticmethod
    def forward(ctx: Any, input_grads: list[Tensor | None], anchor: Tensor, *x: Any) -> Tensors:
        ctx.input_grads = input_grads
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(value for value in x if isinstance(value, Tensor) and not has_gradient(value))
        )
        return map_tensors(lambda t: t.view_as(t), x)

    @staticmethod
    def backward(ctx: Any, *input_grads: Any) -> Any:
        ctx.input_grads[:] = input_grads
        return (None, None, *(None for _ in input_grads))


def start_graph(x: Tensors) -> tuple[Tensors, list[Tensor | None]]:
    """Return the same tensors at the start of a new graph, and a list that will hold the gradient of each tensor after
    the backward pass; None: the tensor has no gradient."""
    anchor = torch.zeros((), requires_grad=True)
    input_grads: list[Tensor | None] = [None] * len(x)
    with torch.enable_grad():
        return _GraphStart.apply(input_grads, anchor, *map_tensors(Tensor.detach, x)), input_grads


def graph_key(unit: Unit) -> tuple[int, int, int | None]:
    return unit.model, unit.shard, unit.batch_half


def differentiate(roots: Sequence[Any], dy: Sequence[Any]) -> None:
    """Run the backward pass from `roots`, tensors or edges of a graph, with the roots' gradients in `dy`. Leave out
    each pair of root and gradient in which one is None."""
    pairs = [
        (root, grad) for root, grad in zip(roots, dy, strict=True) if root is not None and grad is not None
    ]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])


def call_layer(layer: nn.Module, x: Tensors) -> Tensors:
    y = layer(*x)
    return y if isinstance(y, tuple) else (y,)


def has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
