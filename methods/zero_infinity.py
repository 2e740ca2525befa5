"""ZeRO-Infinity (Rajbhandari et al. 2021): weights, gradients and optimizer on the host, a layer at a time on the
device. DeepSpeed, stage 3 with both offloads."""

from __future__ import annotations

from dataclasses import dataclass

from harness.method import Training
from harness.spec import Budget, Plan, Workload
from methods import _zero


@dataclass(frozen=True)
class ZeroInfinity:
    adam: str | None = None  # fused, deepspeed or published; None: deepspeed's own where it has been compiled
    published: bool = False  # as in the published artifact: torch's AdamW on the host, op by op

    label = "ZeRO-Infinity"
    color = "#E7D6EF"
    paper = "Rajbhandari et al., SC 2021; DeepSpeed"
    world_size = 1

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        adam = _zero.chosen_adam(self.adam, self.published)
        return _zero.stage_3_plan(workload, {"adam": adam, "published": self.published})

    def to_build(self) -> str | None:
        return _zero.to_build("cpu_adam") if self.adam == "deepspeed" else None

    def build(self) -> None:
        from methods import _deepspeed

        _deepspeed.build("cpu_adam")

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return _zero.description(workload, _zero.chosen_adam(self.adam, self.published))

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods import _deepspeed

        adam = _zero.chosen_adam(self.adam, self.published)
        zero = _zero.stage_3(workload, on_gpu=device == "cuda")
        return (yield from _deepspeed.train(workload, batches, device, adam, zero))
