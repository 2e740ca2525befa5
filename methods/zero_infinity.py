"""ZeRO-Infinity (Rajbhandari et al. 2021): weights, gradients and optimizer on the host, a layer at a time on the
device. DeepSpeed, stage 3 with both offloads."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.job import Budget, Plan, Workload
from harness.core.method import Training
from methods.engines import deepspeed_config


@dataclass(frozen=True)
class ZeroInfinity:
    adam: str = "fused"  # who steps on the host: fused, deepspeed or published (methods/engines/deepspeed_config.py)

    label = "ZeRO-Infinity"
    color = "#E7D6EF"
    paper = "Rajbhandari et al., SC 2021; DeepSpeed"
    scales_loss = True

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        deepspeed_config.check_adam(self.adam)
        return deepspeed_config.stage_3_plan(workload, {"adam": self.adam})

    def missing(self, device: str) -> str | None:
        return deepspeed_config.missing()

    def to_build(self) -> str | None:
        return deepspeed_config.to_build("cpu_adam") if self.adam == "deepspeed" else None

    def build(self) -> None:
        from methods.engines import deepspeed

        deepspeed.build("cpu_adam")

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return deepspeed_config.description(workload, self.adam)

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods.engines import deepspeed

        zero = deepspeed_config.stage_3(workload, on_gpu=device == "cuda")
        return (yield from deepspeed.train(workload, batches, device, self.adam, zero))
