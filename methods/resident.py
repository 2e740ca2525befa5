"""Everything on the device: plain PyTorch, every layer recomputed. The reference for all other methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.core.job import Budget, Plan, Workload
from harness.core.method import TensorState, Trained, Training
from methods.shared.memory_needs import describe, resident_plan

if TYPE_CHECKING:
    from torch import Tensor

    from harness.core.gpt import GPT
    from methods.shared.loss_scale import LossScale


@dataclass(frozen=True)
class Resident:
    label = "Resident"
    color = "#8A8A8A"
    paper = "PyTorch, with activation recompute (Chen et al. 2016)"
    bit_exact = True
    bit_exact_in_half = True
    can_rehearse = True
    is_reference = True
    accumulates = True
    scales_loss = True

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        return resident_plan(workload)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return describe(workload, "torch, called in this file", "torch AdamW, fused, device")

    def train(self, workload: Workload, batches, device: str) -> Training:
        import torch

        from harness.core.gpt import adamw, empty, initialize
        from methods.offload.clip import global_norm, norms_of
        from methods.shared.loss_scale import LossScale

        model = empty(workload, device)
        names, weights = zip(*model.named_parameters(), strict=True)
        mixed = workload.dtype != "fp32"
        masters = list(weights)
        if mixed:
            masters = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        initialize(((name, master.data) for name, master in zip(names, masters, strict=True)), workload)
        if mixed:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        optimizer = adamw(masters)
        scale = LossScale(workload)
        for step, (inputs, targets) in enumerate(batches, start=1):
            loss = _backward(model, inputs, targets, workload.micro_batches, scale.value)
            _take_gradients(masters, weights, scale)
            # In parts a norm is summed in parts, too: to the gate's probe that is rounding.
            norm = global_norm(norms_of([p.grad for p in masters], in_blocks=workload.micro_batches > 1))
            if workload.clip_norm:
                torch.nn.utils.clip_grads_with_norm_(masters, workload.clip_norm, norm)
            for group in optimizer.param_groups:
                group["lr"] = workload.learning_rate_at(step)
            is_skipped = scale.overflows(norm)
            if not is_skipped:
                optimizer.step()
            optimizer.zero_grad()
            if mixed:
                with torch.no_grad():
                    torch._foreach_copy_(weights, masters)
            yield scale.step(loss, norm, is_skipped=is_skipped)
        columns = [(name, p, optimizer.state[p]) for name, p in zip(names, masters, strict=True)]
        return Trained([
            TensorState(name, p.detach(), state.get("exp_avg"), state.get("exp_avg_sq")) for name, p, state in columns
        ])  # fmt: skip


def _backward(model: GPT, inputs: Tensor, targets: Tensor, num_parts: int, scale: float) -> Tensor:
    """Return the mean loss over micro-batches, detached; leave the sum of their gradients. The gradients of the tied
    embedding are summed in the order of layer-by-layer training: first all of the head's, then all of the look-up's."""
    import torch

    if num_parts == 1:
        loss = model(inputs, targets, scale)
        loss.backward()
        return loss.detach()
    embedded = [model.ends.embed(part) for part in inputs.chunk(num_parts)]
    starts = [x.detach().requires_grad_() for x in embedded]
    total = torch.zeros((), device=inputs.device)
    for x, part in zip(starts, targets.chunk(num_parts), strict=True):
        loss = model.loss(x, part, scale) / num_parts
        loss.backward()
        total += loss.detach()
    for x, start in zip(embedded, starts, strict=True):
        x.backward(start.grad)
    return total


def _take_gradients(masters: Sequence[Tensor], weights: Sequence[Tensor], scale: LossScale) -> None:
    """Move the weights' gradients to their fp32 masters, which in fp32 are the weights, and take out the loss scale."""
    import torch

    for master, weight in zip(masters, weights, strict=True):
        if master is not weight:
            master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
    if scale.is_used:
        torch._foreach_div_([master.grad for master in masters], scale.value)  # type: ignore[misc]
