"""DeepSpeed by the caller's own settings: a stage of ZeRO (Rajbhandari et al. 2020), with or without offload.

zero-offload, zero-infinity and others are settings of DeepSpeed that papers describe. This method trains any stage, so
that the gate can judge the settings that people use. Stage 0 in bf16 and fp16 fails: DeepSpeed 0.19.8 makes a step
without gradients when it builds the optimizer, so Adam's bias corrections are a step ahead of the training.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Self

from harness.base.json_object import JsonObject
from harness.core.job import Plan, Room, Workload
from harness.core.method import Training, Unavailable
from harness.core.option import with_option
from methods.engines.deepspeed_config import OFFLOADS, EngineSettings, stage_config, zero_plan
from methods.engines.deepspeed_file import DeepSpeedFile
from methods.engines.deepspeed_method import DeepSpeedMethod
from methods.engines.user_config import UNSAID, Options, fill_in, settled_options
from methods.shared.data_parallel import RANKS, rank_part

# Options that a configuration sets, and their values without one.
DEFAULTS: Options = {
    "stage": 2,
    "offload": None,
    "overlap_comm": False,
    "accumulation": "engine",
    "adam": "fused",
}


@dataclass(frozen=True)
class DeepSpeed(DeepSpeedMethod):
    # Stage of ZeRO: 0 splits nothing over ranks, 1 optimizer states, 2 gradients too, 3 weights too.
    stage: int = UNSAID
    offload: str | None = UNSAID  # what lives on the host: None, optimizer (stages 1 to 3) or all (stage 3)
    overlap_comm: bool = UNSAID  # True: ranks exchange gradients during the backward pass
    # how micro-batches are summed: a key of engines/deepspeed_config.ACCUMULATIONS
    accumulation: str = UNSAID
    adam: str = UNSAID  # Adam's kernel: fused, deepspeed or published (methods/engines/deepspeed_config.py)
    world_size: int = with_option(1, RANKS)  # ranks
    release: str | None = None  # version of DeepSpeed, such as 0.18.9; None: the installed one
    # a configuration file of DeepSpeed or accelerate, or its JSON; sets the options above
    config: str | None = None

    label = "DeepSpeed"
    paper = "Rajbhandari et al., SC 2020, arXiv:1910.02054; DeepSpeed"
    takes_config = True  # trains models that a config.json describes, too
    scales_loss = True

    def __post_init__(self) -> None:
        if self.config is None:
            fill_in(self, DEFAULTS)
        elif UNSAID in (getattr(self, name) for name in DEFAULTS):
            return  # the plan makes the method again, with all options
        super().__post_init__()
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage: expected 0 to 3, got {self.stage}")
        if self.offload not in (None, *OFFLOADS):
            raise ValueError(f"offload: expected none or one of {', '.join(OFFLOADS)}, got {self.offload!r}")
        if self.offload and self.stage < (least_stage := OFFLOADS[self.offload]):
            raise ValueError(
                f"offload={self.offload}: expected stage {least_stage} or higher, got {self.stage};"
                f" try stage={least_stage}"
            )

    @property
    def kernel(self) -> str | None:
        """Return the kernel of DeepSpeed's own Adam, which on the device is another one than on the host."""
        return "fused_adam" if self.adam == "deepspeed" and self.offload is None else super().kernel

    def plan(self, workload: Workload, room: Room) -> Plan:
        part = rank_part(workload, self.world_size)
        if (file := self.file(workload)) is None:
            return zero_plan(part, room, self.stage, self.offload, self.world_size)
        return replace(file.plan(part, room, self.world_size), options=asdict(self._as_configured(file)))

    def file(self, workload: Workload) -> DeepSpeedFile | None:
        """Read the caller's configuration, if there is one. Raises ValueError as DeepSpeedFile.read() does."""
        if self.config is None:
            return None
        accumulation = DEFAULTS["accumulation"] if self.accumulation == UNSAID else self.accumulation
        return DeepSpeedFile.read(self.config, workload, self.world_size, accumulation)

    def _as_configured(self, file: DeepSpeedFile) -> Self:
        """Return this method with the options that the configuration sets, and with the configuration as JSON."""
        configured_options: Options = {
            "stage": file.stage,
            "offload": file.offload,
            "overlap_comm": file.overlaps,
        }
        if file.adam:
            configured_options["adam"] = file.adam
        if file.accumulation:
            configured_options["accumulation"] = file.accumulation
        return replace(self, **settled_options(self, DEFAULTS, configured_options), config=file.text)

    def zero(self, workload: Workload, *, is_on_gpu: bool) -> JsonObject:
        if (file := self.file(workload)) is not None:
            return file.zero(workload)
        zero = stage_config(workload, self.stage, self.offload, is_on_gpu=is_on_gpu)
        return {**zero, "overlap_comm": self.overlap_comm} if self.stage else zero

    def settings(self, workload: Workload, *, is_on_gpu: bool) -> EngineSettings:
        settings, file = super().settings(workload, is_on_gpu=is_on_gpu), self.file(workload)
        return settings if file is None else replace(settings, extra_entries=file.other_entries(workload))

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        row = super().describe(workload, device)
        if self.config is not None:
            row["implementation"] += ", as the caller's configuration says"
        return {**row, "optimizer": "DeepSpeed's FusedAdam"} if self.kernel == "fused_adam" else row

    def train(self, workload: Workload, batches, device: str) -> Training:
        if self.kernel == "fused_adam" and device == "cuda":
            reason = "DeepSpeed's Adam on a GPU is not compiled here"
            raise Unavailable(f"{reason}: try torch_adam true, or a configuration without an optimizer")
        return (yield from super().train(workload, batches, device))
