"""DeepSpeed by the caller's own settings: a stage of ZeRO (Rajbhandari et al. 2020), with or without offload.

zero-offload, zero-infinity and others are settings of DeepSpeed that papers describe. This method trains any stage, so
that the gate can judge the settings that people use. Stage 0 in bf16 and fp16 fails: DeepSpeed 0.19.8 makes a step
without gradients when it builds the optimizer, so Adam's bias corrections are a step ahead of the training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.core.job import Plan, Room, Workload
from methods.engines.deepspeed_config import OFFLOADS, zero_of_stage, zero_plan
from methods.engines.deepspeed_method import DeepSpeedMethod
from methods.shared.data_parallel import rank_part


@dataclass(frozen=True)
class DeepSpeed(DeepSpeedMethod):
    stage: int = 2  # stage of ZeRO: 0 splits nothing over ranks, 1 optimizer states, 2 gradients too, 3 weights too
    offload: str | None = None  # what lives on the host: None, optimizer (stages 1 to 3) or all (stage 3)
    overlap_comm: bool = False  # True: ranks exchange gradients during the backward pass
    accumulation: str = "engine"  # how micro-batches are summed: a key of engines/deepspeed_config.ACCUMULATIONS
    adam: str = "fused"  # Adam's kernel: fused, deepspeed or published (methods/engines/deepspeed_config.py)
    world_size: int = 1  # ranks
    release: str | None = None  # version of DeepSpeed, such as 0.18.9; None: the installed one

    label = "DeepSpeed"
    paper = "Rajbhandari et al., SC 2020, arXiv:1910.02054; DeepSpeed"
    takes_config = True
    scales_loss = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage: expected 0 to 3, got {self.stage}")
        if self.offload not in (None, *OFFLOADS):
            raise ValueError(f"offload: expected none or one of {', '.join(OFFLOADS)}, got {self.offload!r}")
        if self.offload and self.stage < (least := OFFLOADS[self.offload]):
            raise ValueError(
                f"offload={self.offload}: expected stage {least} or higher, got {self.stage}; try stage={least}"
            )

    def plan(self, workload: Workload, room: Room) -> Plan:
        part = rank_part(workload, self.world_size)
        return zero_plan(part, room, self.stage, self.offload, self.world_size)

    def zero(self, workload: Workload, *, on_gpu: bool) -> dict[str, Any]:
        zero = zero_of_stage(workload, self.stage, self.offload, on_gpu=on_gpu)
        return {**zero, "overlap_comm": self.overlap_comm} if self.stage else zero
