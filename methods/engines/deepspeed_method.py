"""The base of the DeepSpeed methods: a subclass says what ZeRO does and needs."""

from __future__ import annotations

from typing import Any

from harness.core.job import Workload
from harness.core.method import Training
from methods.engines import deepspeed_config


class DeepSpeedMethod:
    color = "#E7D6EF"
    adam = "deepspeed"  # one of deepspeed_config.ADAMS
    reentrant = False  # recompute by torch's older way

    @property
    def kernel(self) -> str | None:
        """The DeepSpeed kernel that must be compiled before a run."""
        return "cpu_adam" if self.adam == "deepspeed" else None

    def zero(self, workload: Workload, *, on_gpu: bool) -> dict[str, Any]:
        """DeepSpeed's configuration of ZeRO."""
        raise NotImplementedError

    def missing(self, device: str) -> str | None:
        return deepspeed_config.missing()

    def to_build(self) -> str | None:
        return deepspeed_config.to_build(self.kernel) if self.kernel else None

    def build(self) -> None:
        from methods.engines import deepspeed

        if self.kernel:
            deepspeed.build(self.kernel)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        return deepspeed_config.description(workload, self.adam, reentrant=self.reentrant)

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods.engines import deepspeed

        zero = self.zero(workload, on_gpu=device == "cuda")
        return (yield from deepspeed.train(workload, batches, device, self.adam, zero))
