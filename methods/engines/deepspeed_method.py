"""The base class of the DeepSpeed methods: a subclass gives its configuration of ZeRO and its memory plan."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from harness.core.job import Workload
from harness.core.method import Method, Training
from methods.engines import deepspeed_config
from methods.shared.memory_needs import describe


class DeepSpeedMethod(Method):
    color = "#E7D6EF"
    log_dialect = "deepspeed"
    adam = "deepspeed"  # the host's Adam: a key of deepspeed_config.ADAMS
    reentrant = False  # True: use torch's older recompute
    world_size = 1  # ranks

    def __post_init__(self) -> None:
        if self.adam not in deepspeed_config.ADAMS:
            raise ValueError(f"adam: expected one of {', '.join(deepspeed_config.ADAMS)}, got {self.adam!r}")

    @property
    def kernel(self) -> str | None:
        """Return the name of the DeepSpeed kernel that must be compiled before a run; None if no kernel is needed."""
        return "cpu_adam" if self.adam == "deepspeed" else None

    def zero(self, workload: Workload, *, on_gpu: bool) -> dict[str, Any]:
        """Return the entry zero_optimization of DeepSpeed's configuration. Each subclass defines this method."""
        raise NotImplementedError

    def missing(self, device: str) -> str | None:
        if not find_spec("deepspeed"):
            return deepspeed_config.NEEDS
        return deepspeed_config.lacks_to_build(self.kernel) if self.kernel else None

    @property
    def build_seconds(self) -> int:  # type: ignore[override]
        return deepspeed_config.KERNELS[self.kernel][1] if self.kernel else 0

    def to_build(self) -> str | None:
        if not self.kernel or deepspeed_config.is_built(self.kernel) or deepspeed_config.lacks_to_build(self.kernel):
            return None
        return f"DeepSpeed's {self.kernel}, once, about {self.build_seconds} seconds on two cores"

    def build(self) -> None:
        from methods.engines import deepspeed

        if self.kernel:
            deepspeed.build(self.kernel)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        row = describe(workload, "upstream: deepspeed", deepspeed_config.ADAMS[self.adam])
        recompute = f"{row['recompute']}{', reentrant' if self.reentrant else ''}"
        return {**row, "recompute": recompute, "clipping": "global norm, by the engine"}

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods.engines import deepspeed

        zero = self.zero(workload, on_gpu=device == "cuda")
        with ExitStack() as needed:
            how = (self.adam, zero, self.reentrant, needed, self.world_size)
            return (yield from deepspeed.train(workload, batches, device, *how))
