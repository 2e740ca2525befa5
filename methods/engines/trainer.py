"""Drives transformers.Trainer with the harness's model and batches, alone or with a configuration of DeepSpeed, as
TrainingArguments(deepspeed=...) takes it. Loop, loss, optimizer, clip and mixed precision are Trainer's and
accelerate's own code; with DeepSpeed, engine, optimizer and accumulation are what these two make of it.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import accelerate  # noqa: F401 without it transformers has no Trainer
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from harness.base.json_object import JsonObject
from harness.core.job import BETAS, EPSILON, MOST, WEIGHT_DECAY, Workload
from harness.core.method import Step, TensorState, Unavailable
from harness.devices.exchange import join_alone, leave_others
from harness.models.gpt import GPT, initialize, initials
from harness.models.hub_model import causal_model, library
from methods.engines import deepspeed
from methods.engines.deepspeed_config import EngineSettings, is_kernel_built, missing_to_build
from methods.engines.deepspeed_file import DeepSpeedFile
from methods.engines.deepspeed_stage_0 import main_states_of
from methods.engines.release import training_arguments_of
from methods.engines.turns import Turns

transformers: Any = sys.modules.get("transformers") or library()  # a release has been imported before
Trainer: Any = transformers.Trainer


def _training_arguments(
    workload: Workload, device: str, folder: str, engine_config: JsonObject | None
) -> Any:
    """Return Trainer's arguments: the reference's AdamW, and nothing logged, saved or reported."""
    return training_arguments_of(
        transformers.TrainingArguments,
        output_dir=folder,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        logging_nan_inf_filter=False,  # nothing is logged; the filter would wait for the device
        use_cpu=device != "cuda",
        max_steps=MOST,  # the loop ends with the batches, whose number it need not know
        per_device_train_batch_size=workload.batch_size // workload.micro_batches,
        gradient_accumulation_steps=workload.micro_batches,
        optim="adamw_torch_fused",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        weight_decay=WEIGHT_DECAY,
        learning_rate=workload.learning_rate,
        max_grad_norm=workload.clip_norm,
        bf16=workload.dtype == "bf16",
        activation_checkpointing=workload.config is not None,  # the GPT has checkpoints of its own
        activation_checkpointing_kwargs={"use_reentrant": False},
        deepspeed=engine_config,
    )


class BatchTrainer(Trainer):
    """A Trainer that asks for one batch at a time, and gives the step of the batch before. `folder`: the folder that
    Trainer makes for checkpoints; none is written. `engine_config`: DeepSpeed's configuration; None: train
    without DeepSpeed."""

    lr_scheduler: Any

    def __init__(
        self,
        workload: Workload,
        device: str,
        folder: str,
        model: Any,
        engine_config: JsonObject | None = None,
    ) -> None:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]  # accelerate would take another precision, device or engine than the job's
        arguments = _training_arguments(workload, device, folder, engine_config)
        # on several GPUs Trainer would split a batch over all of them
        arguments._n_gpu = min(1, arguments.n_gpu)
        if device == "sim":
            arguments.__dict__["_setup_devices"] = arguments.distributed_state.device = torch.device(device)
        super().__init__(model, arguments)
        # dropout draws as in the reference: Trainer has set a seed of its own
        torch.manual_seed(workload.seed)
        self.remove_callback(transformers.PrinterCallback)
        self.workload = workload
        self.loss: Tensor | None = None  # of the current step
        self.norm: Tensor | None = None
        clip = self.accelerator.clip_grad_norm_

        def clip_and_keep(*arguments: Any, **named: Any) -> Any:
            norm = clip(*arguments, **named)
            self.norm = None if norm is None else torch.as_tensor(norm)  # DeepSpeed tells a number, or none
            return norm

        self.accelerator.clip_grad_norm_ = clip_and_keep
        self.turns = Turns(self.train)

    def get_train_dataloader(self) -> Iterator[dict[str, Tensor]]:
        """Yield micro-batches. accelerate's own loader would take a batch before the step of the batch before is done,
        because it looks for the last one."""
        self.begin()
        step = None
        while (batch := self.turns.take(step)) is not None:
            inputs, targets = batch
            # (B, T + 1): transformers shifts the labels itself
            tokens = torch.cat([inputs, targets[:, -1:]], 1)
            self.loss = None
            yield from (
                {"input_ids": part, "labels": part} for part in tokens.chunk(self.workload.micro_batches)
            )
            assert self.loss is not None
            step = Step(self.loss, self.norm)
        self.control.should_training_stop = True

    def begin(self) -> None:
        """Do what is left to do when Trainer has prepared the model and the optimizer."""

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*arguments, **named)
        self.loss = loss if self.loss is None else self.loss + loss
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Make the harness's schedule, unless there is one. Trainer's own begin with a step at rate 0."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            for group in optimizer.param_groups:
                group["initial_lr"] = 1.0  # by which the schedule's rates are multiplied
            self.lr_scheduler = LambdaLR(optimizer, lambda done: self.workload.learning_rate_at(done + 1))
        return self.lr_scheduler

    def states(self) -> Iterable[TensorState]:
        state = self.optimizer.state
        columns = ((name, p.detach(), state[p]) for name, p in self.model.named_parameters())
        return [
            TensorState(name, p, of_p.get("exp_avg"), of_p.get("exp_avg_sq")) for name, p, of_p in columns
        ]


class LabelledGPT(GPT):
    """The published GPT as Trainer takes a model: it gets token ids with labels, shifts the labels, and returns its
    loss. Like a model of transformers it computes all logits at once."""

    loss_type = "ForCausalLM"  # Trainer then counts, as tokens that are learned, those after a sample's first
    # Some releases, such as 4.46.3, give the number of tokens only to a model that names a parameter `loss_kwargs`.

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **loss_kwargs: Any
    ) -> dict[str, Tensor]:
        """Return the loss of (B, T + 1) token ids: the sum over this micro-batch's tokens, divided by the number of the
        whole batch's."""
        x, targets = self.embed(input_ids[:, :-1]), labels[:, 1:].flatten()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = F.linear(self.ends.lnf(x), self.ends.wte.weight)
        total = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")
        return {"loss": total / (len(targets) if num_items_in_batch is None else num_items_in_batch)}


def wide_model(workload: Workload, device: str) -> Any:
    """Return the model in fp32, with the harness's starting values. Trainer computes in the workload's dtype by
    autocast."""
    model = empty_model(replace(workload, dtype="fp32"), device)
    initialize(((name, parameter.data) for name, parameter in model.named_parameters()), workload)
    return model


def empty_model(workload: Workload, device: str) -> Any:
    """Return the model in the workload's dtype. The values of its parameters are not yet set."""
    if workload.config is not None:
        return causal_model(workload, device)
    with torch.device("meta"):
        model = LabelledGPT(workload)
    return model.to_empty(device=device)


class DeepSpeedTrainer(BatchTrainer):
    """A BatchTrainer whose engine is DeepSpeed's. `open_context`: a context that stays open until all trained tensors
    have been read. Raises Unavailable if deepspeed, or a kernel that the configuration needs, is missing."""

    def __init__(
        self, workload: Workload, device: str, folder: str, file: DeepSpeedFile, open_context: ExitStack
    ) -> None:
        self.open_context = open_context
        _load_deepspeed(file, device)
        join_alone(device)
        open_context.callback(leave_others)
        config = config_of_file(file, workload)
        model = _model_for_deepspeed(workload, device, config)
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
        main_states, named = main_states_of(engine.optimizer), list(engine.module.named_parameters())
        shapes = ((name, getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in named)
        for (_, parameter), value in zip(named, initials(shapes, self.workload), strict=True):
            with zero.GatheredParameters(parameter, modifier_rank=0, enabled=hasattr(parameter, "ds_shape")):
                parameter.data.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            if id(parameter) in main_states:
                main_states[id(parameter)].weight.copy_(value)

    def states(self) -> Iterable[TensorState]:
        return deepspeed.trained_states(self.deepspeed, self.open_context.pop_all())


def config_of_file(file: DeepSpeedFile, workload: Workload) -> JsonObject:
    """Return the file's entries with those that the workload gives, as a user would write them for Trainer."""
    adam = "deepspeed" if "optimizer" in file.entries else "fused"
    settings = EngineSettings(
        file.zero(workload), adam, accumulation="accelerate", extra_entries=file.other_entries(workload)
    )
    config = deepspeed.engine_config(workload, settings)
    if "zero_force_ds_cpu_optimizer" not in file.entries:
        del config["zero_force_ds_cpu_optimizer"]  # accelerate's default holds
    return config


def _model_for_deepspeed(workload: Workload, device: str, config: JsonObject) -> Any:
    """Return the model without values, placed as from_pretrained() of transformers places a model. Stage 3 partitions
    the model over the ranks. In other stages the whole model is on the host, or on sim if the device is sim. The
    configuration gives the dtype."""
    if config["zero_optimization"]["stage"] < 3:
        # Make the model on sim itself, because a move to sim would make other parameters.
        return empty_model(workload, "sim" if device == "sim" else "cpu")
    from deepspeed import zero

    if workload.config is None:
        with zero.Init(config_dict_or_path=config), deepspeed.without_random_values():
            return LabelledGPT(workload)
    model = empty_model(workload, "cpu")
    zero.Init(module=model, config_dict_or_path=config)
    return model


def _load_deepspeed(file: DeepSpeedFile, device: str) -> None:
    """Import DeepSpeed, and load the kernel of its Adam if it is compiled. Raises Unavailable if the file needs a
    kernel that is not compiled."""
    adam = "cpu_adam" if file.offload else "fused_adam"
    if file.adam == "deepspeed":
        if adam == "fused_adam" and device == "cuda":
            reason = "DeepSpeed's Adam on a GPU is not compiled here"
            raise Unavailable(f"{reason}: try torch_adam true, or a configuration without an optimizer")
        if not is_kernel_built(adam):
            raise Unavailable(missing_to_build(adam) or f"DeepSpeed's {adam} is not compiled: ./run.sh setup")
    deepspeed.import_deepspeed(device)
    deepspeed.load_built_kernels(None, adam)
