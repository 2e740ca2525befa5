"""GPipe and 1F1B by torch.distributed.pipelining, with torch's own engine and messages.

A stage keeps all that its backward pass needs; only modules that recompute by themselves keep less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from methods.pipeline.engine import Compute, Note, unnoted
from methods.pipeline.setup import StageSetup

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LOSS_ON_META = torch.empty((), device="meta")  # stands for the last stage's output, a scalar loss


class NumberedModule(nn.Module):
    """A stage's computation as a module for torch. torch gives the module the received tensors but not the
    micro-batch's number, so NotedStage sets `number` before each pass."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute, self.number = compute, 0

    def forward(self, *received: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.compute(self.number, received))


class NotedStage(PipelineStage):
    """torch's stage, which also records its passes for a trace, in the contexts that `note` returns."""

    note: Note = staticmethod(unnoted)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.number = fwd_chunk_id  # type: ignore[assignment]
        with self.note("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.note("backward", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class TorchSchedule:
    """torch's GPipe or 1F1B, over micro-batches of one size. `group`: the pipeline's ranks; None: all ranks."""

    waited_seconds = 0.0  # always 0, because torch does not tell how long a stage waits

    def __init__(
        self, schedule: str, compute: Compute, setup: StageSetup, group: Any, note: Note = unnoted
    ) -> None:
        self.num_micro_batches = len(setup.micro_batch_sizes)
        stage = NotedStage(
            NumberedModule(compute),
            setup.stage,
            setup.num_stages,
            setup.device,
            input_args=tuple(map(_meta_like, setup.received(setup.micro_batch_sizes[0]))),
            output_args=tuple(map(_meta_like, setup.sent(setup.micro_batch_sizes[0]) or [LOSS_ON_META])),
            group=group or dist.group.WORLD,
        )
        stage.note = note  # type: ignore[method-assign]
        # The losses are already weighted, so torch must only sum the micro-batches' gradients, not scale them.
        self.schedule = SCHEDULES[schedule](
            stage, self.num_micro_batches, loss_fn=lambda outputs, _: outputs[0], scale_grads=False
        )

    def step(self) -> None:
        """Run all passes of a step."""
        self.schedule.step(target=torch.zeros(self.num_micro_batches), return_outputs=False)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Run the forward passes of a step, without backward passes."""
        self.schedule.eval(target=torch.zeros(self.num_micro_batches), return_outputs=False)

    def close(self) -> None: ...


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
