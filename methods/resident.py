"""Plain PyTorch, the whole model on the device, every layer recomputed. The reference for all other methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.core.job import Plan, Room, Workload
from harness.core.method import Method, Step, TensorState, Trained, Training
from methods.shared.memory_needs import describe, resident_plan

if TYPE_CHECKING:
    from torch import Tensor

    from harness.models.model import Model
    from methods.shared.loss_scale import LossScale
    from methods.shared.roundings import Rounding


@dataclass(frozen=True)
class Resident(Method):
    label = "Resident"
    color = "#8A8A8A"
    paper = "PyTorch, with activation recompute (Chen et al. 2016)"
    bit_exact = True
    log_dialect = "plain"
    bit_exact_in_half = True
    can_rehearse = True
    is_reference = True
    takes_config = True  # trains models that a config.json describes, too
    takes_lora = True  # trains adapters alone on frozen weights, too
    accumulates = True
    scales_loss = True

    def plan(self, workload: Workload, room: Room) -> Plan:
        return resident_plan(workload)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return describe(workload, "torch, called in this file", "torch AdamW, fused, device")

    def train(self, workload: Workload, batches, device: str) -> Training:
        model = ReferenceModel(workload, device)
        for number, (inputs, targets) in enumerate(batches, start=1):
            yield model.step(number, inputs, targets)
        return Trained(model.tensors())


class ReferenceModel:
    """A model with its optimizer. `rounding`: another way to compute the same gradients, which rounds differently;
    None: plain PyTorch's way."""

    def __init__(self, workload: Workload, device: str, rounding: Rounding | None = None) -> None:
        import torch

        from harness.models.gpt import adamw, initialize
        from harness.models.model import empty
        from methods.shared.loss_scale import LossScale

        self.workload, self.rounding = workload, rounding
        self.model = empty(workload, device)
        named = list(self.model.named_parameters())
        self.frozen = [(name, weight.data) for name, weight in named if not weight.requires_grad]
        trained = [(name, weight) for name, weight in named if weight.requires_grad]
        self.names, self.weights = zip(*trained, strict=True)
        # adapters are fp32 in any dtype of the workload, so they need no masters
        self.is_mixed = self.weights[0].dtype != torch.float32
        self.masters = list(self.weights)
        if self.is_mixed:
            self.masters = [torch.empty_like(weight, dtype=torch.float32) for weight in self.weights]
        masters = [(name, master.data) for name, master in zip(self.names, self.masters, strict=True)]
        initialize((*self.frozen, *masters), workload)
        self._copy_to_weights()
        self.optimizer = adamw(self.masters)
        self.scale = LossScale(workload)

    def step(self, number: int, inputs: Tensor, targets: Tensor) -> Step:
        import torch

        from methods.offload.clip import global_norm, norms_of

        parts = self.workload.micro_batches
        if self.rounding:
            loss = self.rounding(self._backward, inputs, targets)
        else:
            loss = self._backward(inputs, targets, parts)
        _take_gradients(self.masters, self.weights, self.scale)
        # With micro-batches or a rounding, the norm is summed in blocks.
        norm = global_norm(
            norms_of([p.grad for p in self.masters], in_blocks=parts > 1 or self.rounding is not None)
        )
        if self.workload.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(self.masters, self.workload.clip_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.workload.learning_rate_at(number)
        is_skipped = self.scale.overflows(norm)
        if not is_skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._copy_to_weights()
        return self.scale.step(loss, norm, is_skipped=is_skipped)

    def tensors(self) -> list[TensorState]:
        tensors = [TensorState(name, weight) for name, weight in self.frozen]
        for name, master in zip(self.names, self.masters, strict=True):
            state = self.optimizer.state[master]
            tensors.append(TensorState(name, master.detach(), state.get("exp_avg"), state.get("exp_avg_sq")))
        return tensors

    def _backward(self, inputs: Tensor, targets: Tensor, num_parts: int = 1) -> Tensor:
        return _backward(self.model, inputs, targets, num_parts, self.scale.value)

    def _copy_to_weights(self) -> None:
        import torch

        if self.is_mixed:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)


def _backward(model: Model, inputs: Tensor, targets: Tensor, num_parts: int, scale: float) -> Tensor:
    """Return the mean loss over micro-batches, detached. Leave the sum of all micro-batches' gradients in the
    parameters. A tied embedding's gradients are summed in the order of layer-by-layer training: first the head's
    gradients of all micro-batches, then the look-up's."""
    import torch

    if num_parts == 1:
        loss = model(inputs, targets, scale)
        loss.backward()
        return loss.detach()
    embedded = [model.embed(part) for part in inputs.chunk(num_parts)]
    is_trained = embedded[0].requires_grad
    starts = [x.detach().requires_grad_(is_trained) for x in embedded]
    total = torch.zeros((), device=inputs.device)
    for x, part in zip(starts, targets.chunk(num_parts), strict=True):
        loss = model.loss(x, part, scale) / num_parts
        loss.backward()
        total += loss.detach()
    for x, start in zip(embedded, starts, strict=True):
        if is_trained:
            x.backward(start.grad)
    return total


def _take_gradients(masters: Sequence[Tensor], weights: Sequence[Tensor], scale: LossScale) -> None:
    """Move the weights' gradients to the fp32 masters, and divide the gradients by the loss scale. If the weights are
    fp32, the masters are the weights."""
    import torch

    for master, weight in zip(masters, weights, strict=True):
        if master is not weight:
            master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
    if scale.is_used:
        torch._foreach_div_([master.grad for master in masters], scale.value)  # type: ignore[misc]
