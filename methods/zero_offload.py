"""ZeRO-Offload (Ren et al. 2021): weights on the device, gradients and optimizer on the host. This is DeepSpeed's stage
2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.core.job import Plan, Room, Workload
from harness.core.method import ForecastTest
from harness.forecast.resources import parts_sent, sum_sent
from methods.engines.deepspeed_config import BUCKET_PARAMS, stage_2, stage_2_host
from methods.engines.deepspeed_method import DeepSpeedMethod
from methods.shared.data_parallel import rank_part


@dataclass(frozen=True)
class ZeroOffload(DeepSpeedMethod):
    adam: str = "fused"  # the host's Adam: fused, deepspeed or published (methods/engines/deepspeed_config.py)
    world_size: int = 1  # ranks

    label = "ZeRO-Offload"
    paper = "Ren et al., USENIX ATC 2021; DeepSpeed"
    takes_config = True
    scales_loss = True
    forecast_test = ForecastTest(2, 0.013, "the published logs on a V100, 32 and 48 layers")

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Plan the memory and the exchanges of a rank. DeepSpeed sums gradients in whole buckets, in the weights'
        dtype, and gathers the weights after an update."""
        workload, params, size = rank_part(workload, self.world_size), workload.num_params, workload.weight_bytes
        num_ranks = self.world_size
        return Plan(
            device={
                "weights": size * params,
                "gradients": 2 * size * min(BUCKET_PARAMS, params),
                "activations": workload.num_layers * workload.boundary_bytes + workload.working_bytes,
            },
            host=stage_2_host(workload, room, num_ranks),
            moved_bytes=2 * size * params // num_ranks,
            exchanged={"gathers": parts_sent(size * params, num_ranks), "sums": sum_sent(size * params, num_ranks)},
        )

    def zero(self, workload: Workload, *, on_gpu: bool) -> dict[str, Any]:
        return stage_2(workload, on_gpu)
