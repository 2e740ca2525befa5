"""SuperOffload (Lian et al. 2026): the host steps the optimizer as soon as gradients arrive. The method is DeepSpeed's
stage 3, and runs on CUDA only.

If gradients are clipped, DeepSpeed 0.19.8 steps the optimizer only after the backward pass, as in ZeRO-Infinity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.base.json_object import JsonObject
from harness.core.job import Plan, Room, Workload
from harness.core.method import Training, Unavailable
from harness.devices import machine
from methods.engines.deepspeed_config import stage_3_config, stage_3_plan, sub_group_numels
from methods.engines.deepspeed_method import DeepSpeedMethod

GPU_ONLY = "DeepSpeed runs SuperOffload on NVIDIA GPUs only: on a CPU take zero-infinity"
HOST_SHARE = 0.9  # the host updates this share of the sub-groups, rounded up, as in DeepSpeed's examples


@dataclass(frozen=True)
class SuperOffload(DeepSpeedMethod):
    release: str | None = None  # version of DeepSpeed, such as 0.18.9; None: the installed one

    label = "SuperOffload"
    color = "#93C47D"
    # DeepSpeed 0.19.8 steps a sub-group once it has counted a gradient of each of its parameters. It counts those of
    # all micro-batches, so with several the count is full before the last one. Nobody has run it so.
    accumulates = False
    paper = "Lian et al., ASPLOS 2026, arXiv:2509.21271; DeepSpeed"

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Return stage 3's plan with two changes: the first sub-groups stay on the device, and the optimizer runs in a
        process of its own. That process needs a copy of one sub-group's gradients. The process also needs shared memory
        for the gradients of all sub-groups on the host, beside the page-locked gradients."""
        plan, numels = stage_3_plan(workload, room), sub_group_numels(workload)
        kept_numel = sum(numels[: int((1 - HOST_SHARE) * len(numels))])
        host_bytes = plan.host
        host_bytes["weights"] -= 4 * kept_numel
        host_bytes["optimizer"] -= 8 * kept_numel
        host_bytes["buffers"] += 4 * (max(numels) + sum(numels) - kept_numel)
        return replace(plan, device={**plan.device, "optimizer": 16 * kept_numel}, host=host_bytes)

    def missing(self, device: str) -> str | None:
        return super().missing(device) if device == "cuda" else GPU_ONLY

    def to_build(self) -> str | None:
        return super().to_build() if machine.gpu() else None

    def zero(self, workload: Workload, *, is_on_gpu: bool) -> JsonObject:
        zero = stage_3_config(workload, is_on_gpu)
        zero["offload_optimizer"] |= {"super_offload": True, "ratio": HOST_SHARE, "cpuadam_cores_perc": 0.5}
        return zero

    def train(self, workload: Workload, batches, device: str) -> Training:
        if device != "cuda":
            raise Unavailable(GPU_ONLY)
        from methods.engines.deepspeed import use_built_kernel_in_superoffload

        use_built_kernel_in_superoffload(self.other_release)
        return (yield from super().train(workload, batches, device))
