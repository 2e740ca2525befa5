"""The base class of the DeepSpeed methods: a subclass gives its configuration of ZeRO and its memory plan."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec

from harness.base.json_object import JsonObject
from harness.core.job import Workload
from harness.core.method import Training
from methods.engines import deepspeed_config
from methods.engines.deepspeed_config import EngineSettings
from methods.engines.release import ReleasedMethod
from methods.shared.memory_needs import describe


class DeepSpeedMethod(ReleasedMethod):
    """The base class of the DeepSpeed methods: a subclass gives its configuration of ZeRO and its memory plan."""

    package = "deepspeed"
    color = "#E7D6EF"
    log_dialect = "deepspeed"
    adam = "deepspeed"  # the host's Adam: a key of deepspeed_config.ADAMS
    reentrant = False  # True: use torch's older recompute
    world_size = 1  # ranks
    accumulates = True
    accumulation = "engine"  # a key of deepspeed_config.ACCUMULATIONS

    def __post_init__(self) -> None:
        for name, allowed in (
            ("adam", deepspeed_config.ADAMS),
            ("accumulation", deepspeed_config.ACCUMULATIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        super().__post_init__()

    @property
    def kernel(self) -> str | None:
        """Return the name of the DeepSpeed kernel that must be compiled before a run; None if no kernel is needed."""
        return "cpu_adam" if self.adam == "deepspeed" else None

    def zero(self, workload: Workload, *, is_on_gpu: bool) -> JsonObject:
        """Return the entry zero_optimization of DeepSpeed's configuration. Each subclass defines this method."""
        raise NotImplementedError

    def settings(self, workload: Workload, *, is_on_gpu: bool) -> EngineSettings:
        zero = self.zero(workload, is_on_gpu=is_on_gpu)
        return EngineSettings(
            zero, self.adam, self.reentrant, self.world_size, self.other_release, self.accumulation
        )

    def missing(self, device: str) -> str | None:
        if not find_spec("deepspeed"):
            return deepspeed_config.NEEDS_DEEPSPEED
        return deepspeed_config.missing_to_build(self.kernel, self.other_release) if self.kernel else None

    @property
    def build_seconds(self) -> int:  # type: ignore[override]
        return deepspeed_config.KERNELS[self.kernel][1] if self.kernel else 0

    def to_build(self) -> str | None:
        texts, kernel, release = [super().to_build()], self.kernel, self.other_release
        if (
            kernel
            and not deepspeed_config.is_kernel_built(kernel, release)
            and not deepspeed_config.missing_to_build(kernel, release)
        ):
            texts.append(f"DeepSpeed's {kernel}, once, about {self.build_seconds} seconds on two cores")
        return "; ".join(filter(None, texts)) or None

    def build(self) -> None:
        from methods.engines import deepspeed

        super().build()
        if self.kernel:
            deepspeed.compile_kernel(self.kernel, self.other_release)

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        row = describe(workload, self.implementation, deepspeed_config.ADAMS[self.adam])
        recompute = f"{row['recompute']}{', reentrant' if self.reentrant else ''}"
        return {**row, "recompute": recompute, "clipping": "global norm, by the engine"}

    def train(self, workload: Workload, batches, device: str) -> Training:
        from methods.engines import deepspeed

        with ExitStack() as open_context:
            settings = self.settings(workload, is_on_gpu=device == "cuda")
            return (yield from deepspeed.train(workload, batches, device, settings, open_context))
