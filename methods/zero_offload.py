"""ZeRO-Offload (Ren et al. 2021): weights on the device, gradients and optimizer on the host. This is DeepSpeed's stage
2."""

from __future__ import annotations

from dataclasses import dataclass

from harness.base.json_object import JsonObject
from harness.core.job import Plan, Room, Workload
from harness.core.method import ForecastTest
from harness.core.option import with_option
from methods.engines.deepspeed_config import stage_2_config, stage_2_plan
from methods.engines.deepspeed_method import DeepSpeedMethod
from methods.shared.data_parallel import RANKS, rank_part


@dataclass(frozen=True)
class ZeroOffload(DeepSpeedMethod):
    # the host's Adam: fused, deepspeed or published (methods/engines/deepspeed_config.py)
    adam: str = "fused"
    world_size: int = with_option(1, RANKS)  # ranks
    release: str | None = None  # version of DeepSpeed, such as 0.18.9; None: the installed one

    label = "ZeRO-Offload"
    paper = "Ren et al., USENIX ATC 2021; DeepSpeed"
    takes_config = True  # trains models that a config.json describes, too
    scales_loss = True
    forecast_test = ForecastTest(2, 0.013, "the published logs on a V100, 32 and 48 layers")

    def plan(self, workload: Workload, room: Room) -> Plan:
        return stage_2_plan(rank_part(workload, self.world_size), room, self.world_size)

    def zero(self, workload: Workload, *, is_on_gpu: bool) -> JsonObject:
        return stage_2_config(workload, is_on_gpu)
