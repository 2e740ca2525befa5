"""ZeRO-Infinity (Rajbhandari et al. 2021): weights, gradients and optimizer on the host, a layer at a time on the
device. DeepSpeed, stage 3 with both offloads."""

from __future__ import annotations

from dataclasses import dataclass

from harness.method import Training
from harness.spec import Budget, Plan, Workload
from methods import _zero


@dataclass(frozen=True)
class ZeroInfinity:
    adam: str = "fused"  # who steps on the host: fused, deepspeed or published (methods/_zero.py)

    label = "ZeRO-Infinity"
    color = "#E7D6EF"
    paper = "Rajbhandari et al., SC 2021; DeepSpeed"
    scales_loss = True

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        _zero.check_adam(self.adam)
        return _zero.stage_3_plan(workload, {"adam": self.adam})

    def missing(self, device: str) -> str | None:
        return _zero.missing()

    def to_build(self) -> str | None:
        return _zero.to_build("cpu_adam") if self.adam == "deepspeed" else None

    def build(self) -> None:
        from methods import _deepspeed

        _deepspeed.build("cpu_adam")

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return _zero.description(workload, self.adam)

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods import _deepspeed

        zero = _zero.stage_3(workload, on_gpu=device == "cuda")
        return (yield from _deepspeed.train(workload, batches, device, self.adam, zero))
