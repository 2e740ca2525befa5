"""Drives transformers.Trainer with the harness's model and batches. Its loop, loss, optimizer, clip and mixed precision
are Trainer's and accelerate's own code.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import accelerate  # noqa: F401 without it transformers has no Trainer
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from harness.core.gpt import GPT, initialize
from harness.core.hub_model import causal_model, library
from harness.core.job import BETAS, EPSILON, MOST, WEIGHT_DECAY, Workload
from harness.core.method import Step, TensorState
from methods.engines.turns import Turns

transformers = library()
Trainer: Any = transformers.Trainer


class BatchTrainer(Trainer):
    """A Trainer that asks for one batch at a time, and gives the step of the batch before. `folder`: the folder that
    Trainer makes for checkpoints; none is written."""

    def __init__(self, workload: Workload, device: str, folder: str) -> None:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]  # accelerate would take another precision, device or engine than the job's
        arguments = transformers.TrainingArguments(
            output_dir=folder, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
            log_level="error",
            logging_nan_inf_filter=False,  # nothing is logged; the filter would wait for the device
            use_cpu=device != "cuda",
            max_steps=MOST,  # the loop ends with the batches, whose number it need not know
            per_device_train_batch_size=workload.batch_size // workload.micro_batches,
            gradient_accumulation_steps=workload.micro_batches,
            optim="adamw_torch_fused", adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPSILON,
            weight_decay=WEIGHT_DECAY,
            learning_rate=1.0,  # by which the schedule's rates are multiplied
            max_grad_norm=workload.clip_norm,
            bf16=workload.dtype == "bf16",
            activation_checkpointing=workload.config is not None,  # the GPT has checkpoints of its own
            activation_checkpointing_kwargs={"use_reentrant": False},
        )  # fmt: skip
        arguments._n_gpu = min(1, arguments.n_gpu)  # on several GPUs Trainer would split a batch over all of them
        if device == "sim":
            arguments.__dict__["_setup_devices"] = arguments.distributed_state.device = torch.device(device)
        super().__init__(model_of(workload, device), arguments)
        torch.manual_seed(workload.seed)  # dropout draws as in the reference: Trainer has set a seed of its own
        self.remove_callback(transformers.PrinterCallback)
        self.workload = workload
        self.loss: Tensor | None = None  # of the current step
        self.norm: Tensor | None = None
        clip = self.accelerator.clip_grad_norm_

        def clip_and_keep(*given: Any, **named: Any) -> Tensor:
            self.norm = clip(*given, **named)
            return self.norm

        self.accelerator.clip_grad_norm_ = clip_and_keep
        self.turns = Turns(self.train)

    def get_train_dataloader(self) -> Iterator[dict[str, Tensor]]:
        """Yield micro-batches. accelerate's own loader would take a batch before the step of the batch before is done,
        because it looks for the last one."""
        step = None
        while (batch := self.turns.take(step)) is not None:
            inputs, targets = batch
            tokens = torch.cat([inputs, targets[:, -1:]], 1)  # (B, T + 1): transformers shifts the labels itself
            self.loss = None
            yield from ({"input_ids": part, "labels": part} for part in tokens.chunk(self.workload.micro_batches))
            assert self.loss is not None
            step = Step(self.loss, self.norm)
        self.control.should_training_stop = True

    def training_step(self, *given: Any, **named: Any) -> Tensor:
        loss: Tensor = super().training_step(*given, **named)
        self.loss = loss if self.loss is None else self.loss + loss
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Make the harness's schedule. Trainer's own begin with a step at rate 0."""
        rates = lambda done: self.workload.learning_rate_at(done + 1)  # noqa: E731
        self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, rates)
        return self.lr_scheduler

    def states(self) -> list[TensorState]:
        state = self.optimizer.state
        columns = ((name, p.detach(), state[p]) for name, p in self.model.named_parameters())
        return [TensorState(name, p, of_p.get("exp_avg"), of_p.get("exp_avg_sq")) for name, p, of_p in columns]


class LabelledGPT(GPT):
    """The published GPT as Trainer takes a model: it gets token ids with labels, shifts the labels, and returns its
    loss. Like a model of transformers it computes all logits at once."""

    loss_type = "ForCausalLM"  # Trainer then counts, as tokens that are learned, those after a sample's first

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **others: Any
    ) -> dict[str, Tensor]:
        """Return the loss of (B, T + 1) token ids: the sum over this micro-batch's tokens, divided by the number of the
        whole batch's."""
        x, targets = self.embed(input_ids[:, :-1]), labels[:, 1:].flatten()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = F.linear(self.ends.lnf(x), self.ends.wte.weight)
        total = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")
        return {"loss": total / (len(targets) if num_items_in_batch is None else num_items_in_batch)}


def model_of(workload: Workload, device: str) -> Any:
    """Return the model in fp32, with the harness's starting values. Trainer computes in the workload's dtype by
    autocast."""
    wide = replace(workload, dtype="fp32")
    model: Any
    if workload.config is None:
        with torch.device("meta"):
            model = LabelledGPT(wide)
        model.to_empty(device=device)
    else:
        model = causal_model(wide, device)
    initialize(((name, parameter.data) for name, parameter in model.named_parameters()), workload)
    return model
