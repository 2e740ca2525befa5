"""A stage of the published GPT, with the names that its parameters have in the whole model.

Shapes: B samples of a micro-batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.core.gpt import DTYPES, GPT, initialize
from harness.core.job import Workload
from methods.pipeline.partition import GptStage

EMBEDDING = "ends.wte.weight"  # a weight of the first stage, and of the head in the last


def names_and_shapes(workload: Workload) -> dict[str, torch.Size]:
    """Return every parameter of the whole model, in its order."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in GPT(workload).named_parameters()}


def stage_of(name: str, stages: Sequence[GptStage]) -> int:
    """Return the stage of this parameter; the first one for the embedding, which the last stage has, too."""
    part = name.split(".")
    if part[0] == "layers":
        return next(number for number, stage in enumerate(stages) if int(part[1]) in stage.layers)
    return len(stages) - 1 if part[1] == "lnf" else 0


class GptPart(nn.Module):
    """A run of layers, with the ends that belong to this stage."""

    def __init__(self, workload: Workload, stage: GptStage) -> None:
        super().__init__()
        self.stage = stage
        with torch.device("meta"):
            whole = GPT(workload)
        if stage.is_first or stage.is_last:
            self.ends = whole.ends
            if not stage.is_first:
                del self.ends.wpe
            if not stage.is_last:
                del self.ends.lnf
        self.layers = nn.ModuleDict({str(index): whole.layers[index] for index in stage.layers})

    def bottom(self, x: Tensor, *, recomputes: bool = False) -> Tensor:
        """Run this stage without the loss, from token ids (B, T), or from (B, T, D), to (B, T, D)."""
        if self.stage.is_first:
            x = self.ends.embed(x)
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if recomputes else layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage as torch's schedules call it, without a recompute of its own."""
        return self.bottom(x, recomputes=True)


def build(workload: Workload, stage: GptStage, device: str) -> tuple[GptPart, dict[str, Tensor] | None]:
    """Build the seeded stage in the workload's dtype, and its fp32 starts if that is another dtype."""
    part = GptPart(workload, stage).to(DTYPES[workload.dtype]).to_empty(device=device)
    named = [(name, parameter.data) for name, parameter in part.named_parameters()]
    if workload.dtype == "fp32":
        initialize(named, workload)
        return part, None
    starts = {name: torch.empty_like(weight, dtype=torch.float32) for name, weight in named}
    initialize(starts.items(), workload)
    for name, weight in named:
        weight.copy_(starts[name])
    return part, starts


class Batch:
    """The micro-batches of this rank's part of a step's batch, and the module that computes them. `weight`: each one's
    share of the global batch."""

    def __init__(self, part: GptPart, num_micro_batches: int, weight: float) -> None:
        self.part, self.num_micro_batches, self.weight = part, num_micro_batches, weight
        self.scale = 1.0

    def begin(self, inputs: Tensor, targets: Tensor, scale: float) -> None:
        """Take a step's batch. inputs, targets: (samples of this replica, T)."""
        self.inputs, self.targets = inputs.chunk(self.num_micro_batches), targets.chunk(self.num_micro_batches)
        self.scale = scale

    def compute(self, number: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run one micro-batch through this stage; the last stage's result is its loss."""
        x = self.part.bottom(self.inputs[number] if self.part.stage.is_first else received[0])
        return (self.loss(x, self.targets[number]),) if self.part.stage.is_last else (x,)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return a micro-batch's mean loss, whose gradient is multiplied by weight and loss scale: without the weight
        an fp16 gradient would overflow sooner."""
        return self.part.ends.loss(x, targets, self.scale * self.weight)
