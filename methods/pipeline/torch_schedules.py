"""GPipe and 1F1B by torch.distributed.pipelining: torch's own engine and messages.

Each layer is recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from methods.pipeline.engine import Note, unnoted
from methods.pipeline.gpt_stage import Batch

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class NotedStage(PipelineStage):
    """torch's stage, with its passes noted for a trace."""

    note: Note = staticmethod(unnoted)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **words: Any) -> Any:
        with self.note("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **words)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **words: Any) -> Any:
        with self.note("backward", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **words)


class TorchSchedule:
    """GPipe or 1F1B of torch. `boundary`: a tensor like a micro-batch's between two stages, of any memory."""

    def __init__(self, schedule: str, batch: Batch, place: tuple[int, int], boundary: Tensor, tokens: Tensor,
                 group: Any, device: str, note: Note = unnoted) -> None:  # fmt: skip
        number, num_stages = place
        first = tokens if number == 0 else boundary.requires_grad_()
        self.stage = NotedStage(
            batch.part, number, num_stages, torch.device(device), input_args=(first,),
            output_args=(boundary.detach().clone().requires_grad_(),), group=group or dist.group.WORLD,
        )  # fmt: skip
        self.stage.note = note  # type: ignore[method-assign]
        # Gradients are weighted already, so the sum over micro-batches is all.
        self.schedule = SCHEDULES[schedule](self.stage, batch.num_micro_batches, loss_fn=batch.loss, scale_grads=False)
        self.batch = batch

    def step(self) -> list[Tensor]:
        """Run all passes of a step; return the losses of the last stage."""
        losses: list[Tensor] = []
        stage = self.batch.part.stage
        inputs = (torch.cat(self.batch.inputs),) if stage.is_first else ()
        targets = torch.cat(self.batch.targets) if stage.is_last else None
        self.schedule.step(*inputs, target=targets, losses=losses if stage.is_last else None, return_outputs=False)
        return [loss.detach() for loss in losses]
