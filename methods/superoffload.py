"""SuperOffload (Lian et al. 2026): optimizer steps on the host as soon as gradients arrive. DeepSpeed, stage 3, CUDA.

With clipping on, DeepSpeed 0.19.8 steps after the backward pass, as ZeRO-Infinity does.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.method import Training, Unavailable
from harness.spec import Budget, Plan, Workload
from methods import _zero

GPU_ONLY = "SuperOffload runs on NVIDIA GPUs only, says DeepSpeed; on a CPU take zero-infinity"


@dataclass(frozen=True)
class SuperOffload:
    label = "SuperOffload"
    color = "#93C47D"
    paper = "Lian et al., ASPLOS 2026, arXiv:2509.21271; DeepSpeed"

    def missing(self, device: str) -> str | None:
        return _zero.missing() or (None if device == "cuda" else GPU_ONLY)

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        return _zero.stage_3_plan(workload)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return _zero.description(workload, "deepspeed")

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods import _deepspeed

        if device != "cuda":
            raise Unavailable(GPU_ONLY)
        zero = _zero.stage_3(workload, on_gpu=True)
        zero["offload_optimizer"] |= {"super_offload": True, "ratio": 0.9, "cpuadam_cores_perc": 0.5}
        return (yield from _deepspeed.train(workload, batches, device, "deepspeed", zero))
