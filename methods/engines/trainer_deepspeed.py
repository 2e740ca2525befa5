"""Drives transformers.Trainer with a configuration of DeepSpeed, as TrainingArguments(deepspeed=...) takes it. Engine,
optimizer and accumulation are what Trainer and accelerate make of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from harness.core.job import Workload
from harness.core.method import TensorState, Unavailable
from harness.devices.exchange import join_alone, leave_others
from harness.models.gpt import initials
from methods.engines import deepspeed
from methods.engines.deepspeed_config import EngineSettings, is_built, lacks_to_build
from methods.engines.deepspeed_file import DeepSpeedFile
from methods.engines.deepspeed_stage_0 import kept_by
from methods.engines.trainer import BatchTrainer, LabelledGPT, empty_model


class DeepSpeedTrainer(BatchTrainer):
    """A BatchTrainer whose engine is DeepSpeed's. `needed`: a context that stays open until all trained tensors have
    been read. Raises Unavailable if deepspeed, or a kernel that the configuration needs, is missing."""

    def __init__(
        self, workload: Workload, device: str, folder: str, file: DeepSpeedFile, needed: ExitStack
    ) -> None:
        self.needed = needed
        _load(file, device)
        join_alone(device)
        needed.callback(leave_others)
        config = engine_config(file, workload)
        model = _model(workload, device, config)
        with mock.patch.dict(os.environ):
            # accelerate on a CPU would set the number of threads and join ranks itself
            del os.environ["LOCAL_RANK"]
            super().__init__(workload, device, folder, model, config)

    def begin(self) -> None:
        """Set the weights and DeepSpeed's main weights to the starting values. In bf16 main weights that DeepSpeed
        makes of the model's would be rounded."""
        from deepspeed import zero
        from deepspeed.utils import safe_set_full_fp32_param

        engine: Any = self.deepspeed
        kept, named = kept_by(engine.optimizer), list(engine.module.named_parameters())
        shapes = ((name, getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in named)
        for (_, parameter), value in zip(named, initials(shapes, self.workload), strict=True):
            with zero.GatheredParameters(parameter, modifier_rank=0, enabled=hasattr(parameter, "ds_shape")):
                parameter.data.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            if id(parameter) in kept:
                kept[id(parameter)].weight.copy_(value)

    def states(self) -> Iterable[TensorState]:
        return deepspeed.states(self.deepspeed, self.needed.pop_all())


def engine_config(file: DeepSpeedFile, workload: Workload) -> dict[str, Any]:
    """Return the file's entries with those that the workload gives, as a user would write them for Trainer."""
    adam = "deepspeed" if "optimizer" in file.entries else "fused"
    settings = EngineSettings(
        file.zero(workload), adam, accumulation="accelerate", extra=file.others(workload)
    )
    config = deepspeed.engine_config(workload, settings)
    if "zero_force_ds_cpu_optimizer" not in file.entries:
        del config["zero_force_ds_cpu_optimizer"]  # accelerate's default holds
    return config


def _model(workload: Workload, device: str, config: dict[str, Any]) -> Any:
    """Return the model without values, as from_pretrained() of transformers returns it: in stage 3 partitioned over the
    ranks, in other stages whole on the host, or on sim for sim. The configuration gives the dtype."""
    if config["zero_optimization"]["stage"] < 3:
        # Make the model on sim itself, because a move to sim would make other parameters.
        return empty_model(workload, "sim" if device == "sim" else "cpu")
    from deepspeed import zero

    if workload.config is None:
        with zero.Init(config_dict_or_path=config), deepspeed.undrawn():
            return LabelledGPT(workload)
    model = empty_model(workload, "cpu")
    zero.Init(module=model, config_dict_or_path=config)
    return model


def _load(file: DeepSpeedFile, device: str) -> None:
    """Import DeepSpeed, and load the kernel of its Adam if it is compiled. Raises Unavailable if the file needs a
    kernel that is not compiled."""
    adam = "cpu_adam" if file.offload else "fused_adam"
    if file.adam == "deepspeed":
        if adam == "fused_adam" and device == "cuda":
            reason = "DeepSpeed's Adam on a GPU is not compiled here"
            raise Unavailable(f"{reason}: try torch_adam true, or a configuration without an optimizer")
        if not is_built(adam):
            raise Unavailable(lacks_to_build(adam) or f"DeepSpeed's {adam} is not compiled: ./run.sh setup")
    deepspeed.import_deepspeed(device)
    deepspeed.load_built(None, adam)
