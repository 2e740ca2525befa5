"""SuperOffload (Lian et al. 2026): optimizer steps on the host as soon as gradients arrive. DeepSpeed, stage 3, CUDA.

With clipping on, DeepSpeed 0.19.8 steps after the backward pass, as ZeRO-Infinity does.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.job import Budget, Plan, Workload
from harness.core.method import Training, Unavailable
from methods.engines import deepspeed_config

GPU_ONLY = "SuperOffload runs on NVIDIA GPUs only, says DeepSpeed; on a CPU take zero-infinity"


@dataclass(frozen=True)
class SuperOffload:
    label = "SuperOffload"
    color = "#93C47D"
    paper = "Lian et al., ASPLOS 2026, arXiv:2509.21271; DeepSpeed"

    def missing(self, device: str) -> str | None:
        return deepspeed_config.missing() or (None if device == "cuda" else GPU_ONLY)

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        return deepspeed_config.stage_3_plan(workload)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return deepspeed_config.description(workload, "deepspeed")

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods.engines import deepspeed

        if device != "cuda":
            raise Unavailable(GPU_ONLY)
        zero = deepspeed_config.stage_3(workload, on_gpu=True)
        zero["offload_optimizer"] |= {"super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.5}
        return (yield from deepspeed.train(workload, batches, device, "deepspeed", zero))
