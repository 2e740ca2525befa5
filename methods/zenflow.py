"""ZenFlow (Lan et al. 2025): the device applies the largest gradients at once; the host applies the other gradients
later.

This is DeepSpeed's stage 2. Updates are late by design, so the gate fails the method. In fp32 the first loss is wrong
already, because DeepSpeed 0.19.8 stores every matrix transposed when it starts. In mixed precision the first loss is
right, because the weights are set after the transposition.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.base.json_object import JsonObject
from harness.core.job import Plan, Room, Workload
from methods.engines.deepspeed_config import activation_bytes, stage_2_config
from methods.engines.deepspeed_method import DeepSpeedMethod


@dataclass(frozen=True)
class ZenFlow(DeepSpeedMethod):
    topk_ratio: float = 0.1  # share of gradient columns that the device applies at each step
    update_interval: int = 4  # number of steps between two updates by the host, which apply the other columns
    release: str | None = None  # version of DeepSpeed, such as 0.18.9; None: the installed one

    label = "ZenFlow"
    color = "#F6B26B"
    paper = "Lan et al. 2025, arXiv:2505.12242; DeepSpeed"
    hides = ("updates",)
    is_exact = False
    takes_config = True  # trains models that a config.json describes, too

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Raises ValueError for a mixture of experts: DeepSpeed's ZenFlow selects columns of matrices alone."""
        kinds = workload.anatomy.kinds
        for name, shape in [pair for kind in kinds for pair in kind.tensors.items()]:
            if len(shape) > 2:
                message = (
                    f"expected matrices, whose columns it selects, got {name}, the matrices of all experts"
                )
                raise ValueError(f"{self.label}: {message}; try -m zero-offload or stronghold")
        params, size = workload.num_params, workload.weight_bytes
        return Plan(
            device={
                "weights": size * params,
                "gradients": 2 * size * params,
                "optimizer": int(8 * self.topk_ratio * params),
                "activations": activation_bytes(workload),
            },
            host={"weights": 4 * params, "gradients": 8 * params, "optimizer": 8 * params},
            moved_bytes=2 * size * params,
        )

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        optimizer = "ZenFlowCPUAdam, stale by up to update_interval steps"
        return {**super().describe(workload, device), "optimizer": optimizer}

    def zero(self, workload: Workload, *, is_on_gpu: bool) -> JsonObject:
        zenflow = {
            "topk_ratio": self.topk_ratio,
            "update_interval": self.update_interval,
            "select_strategy": "step",
            "select_interval": 2 * self.update_interval,
            # no helper process, because its work would be outside of the measured time
            "overlap_step": False,
            "full_warm_up_rounds": 0,
        }
        return {**stage_2_config(workload, is_on_gpu), "zenflow": zenflow}
