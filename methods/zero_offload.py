"""ZeRO-Offload (Ren et al. 2021): weights on the device, gradients and optimizer on the host. DeepSpeed, stage 2."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.job import Budget, Plan, Workload
from harness.core.method import Training
from methods.engines import deepspeed_config


@dataclass(frozen=True)
class ZeroOffload:
    adam: str = "fused"  # who steps on the host: fused, deepspeed or published (methods/engines/deepspeed_config.py)

    label = "ZeRO-Offload"
    color = "#E7D6EF"
    paper = "Ren et al., USENIX ATC 2021; DeepSpeed"
    scales_loss = True

    def plan(self, workload: Workload, budget: Budget) -> Plan:
        deepspeed_config.check_adam(self.adam)
        params, size = workload.num_params, workload.weight_bytes
        return Plan(
            device={
                "weights": size * params,
                "gradients": 2 * size * min(deepspeed_config.BUCKET_PARAMS, params),
                "activations": workload.num_layers * workload.boundary_bytes + workload.working_bytes,
            },
            host={
                "weights": 4 * params,
                "gradients": 4 * params,
                "optimizer": 8 * params,
                "buffers": size * params,  # a flat copy; 20 (fp32) and 18 (bf16) bytes in all on sim
            },
            moved_bytes=2 * size * params,
            options={"adam": self.adam},
        )

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

        zero = deepspeed_config.stage_2(workload, on_gpu=device == "cuda")
        return (yield from deepspeed.train(workload, batches, device, self.adam, zero))
