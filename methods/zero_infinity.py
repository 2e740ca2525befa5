"""ZeRO-Infinity (Rajbhandari et al. 2021): weights, gradients and optimizer live on the host; one layer at a time is on
the device. This is DeepSpeed's stage 3 with offload of parameters and of the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from harness.base.json_object import JsonObject
from harness.core.job import Plan, Room, Workload
from harness.core.method import ForecastTest
from harness.core.option import with_option
from methods.engines.deepspeed_config import stage_3_config, stage_3_plan
from methods.engines.deepspeed_method import DeepSpeedMethod
from methods.shared.data_parallel import RANKS, rank_part


@dataclass(frozen=True)
class ZeroInfinity(DeepSpeedMethod):
    # the host's Adam: fused, deepspeed or published (methods/engines/deepspeed_config.py)
    adam: str = "fused"
    world_size: int = with_option(1, RANKS)  # ranks
    release: str | None = None  # version of DeepSpeed, such as 0.18.9; None: the installed one

    label = "ZeRO-Infinity"
    paper = "Rajbhandari et al., SC 2021; DeepSpeed"
    takes_config = True  # trains models that a config.json describes, too
    scales_loss = True
    forecast_test = ForecastTest(3, -0.18, "SlideFormer's runs of DeepSpeed, Llama 3.1 8B on an RTX 4090")

    def plan(self, workload: Workload, room: Room) -> Plan:
        return stage_3_plan(rank_part(workload, self.world_size), room, self.world_size)

    def zero(self, workload: Workload, *, is_on_gpu: bool) -> JsonObject:
        return stage_3_config(workload, is_on_gpu)
