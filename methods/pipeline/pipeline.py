"""Varuna: trains a model with CutPoints in several processes. Each process keeps one stage of the model.

    shared = [("wte.weight", "head.weight")]
    model = Varuna(model, "0,2;1,3;", get_batch, batch_size=64, chunk_size=4, shared_weights=shared)
    optimizer = torch.optim.AdamW(model.parameters())
    model.set_optimizer(optimizer)
    for inputs in batches:  # dictionaries of this process's share of the batch
        loss, overflow = model.step(inputs, clip_grad_max_norm=1.0)
        if not overflow:
            optimizer.step()

The model's forward pass takes the dictionary's items as keyword arguments, and returns the mean loss over the samples.
After step() each process has its stage's gradients. These gradients equal the gradients that a single process would
compute on the whole batch of all replicas.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.core.method import TensorState
from harness.devices.streams import STREAMS, UNTRACED
from methods.pipeline.batches import (
    Inputs,
    MeanCheck,
    check_like_first_batch,
    micro_batch_sizes,
    move_value,
    split_batch,
)
from methods.pipeline.checkpoint.checkpoints import Checkpoints, Progress
from methods.pipeline.cut import CHANGES_ERROR, LOSS_SCALE, InitWeights, Part, specs_of
from methods.pipeline.engine import Compute, Engine, Stage, order_of
from methods.pipeline.gradients import Gradients, Groups, all_reduce
from methods.pipeline.launch.link import Link, completed_future, count_updates, link_to_launcher
from methods.pipeline.rank_map import RankMap
from methods.pipeline.seat import take_seat
from methods.pipeline.setup import ModelToCut, StageSetup, set_up_stage
from methods.pipeline.transport import TensorSpec, Transport
from methods.shared.loss_scale import ChosenLossScale, LossScale
from methods.shared.module_watch import ModuleWatch

if TYPE_CHECKING:
    from methods.pipeline.torch_schedules import TorchSchedule


class Varuna(nn.Module):
    """One process's stage of a model.

    `stage_to_rank_map`: the rank of each stage and replica, in RankMap's form. `get_batch_fn(size, device=None)`:
    returns a batch of `size` samples, from which the shapes at the cuts are found; the model is not trained on it.
    `batch_size`: samples of all replicas together. `chunk_size`: samples of a micro-batch; the last one may be smaller.
    `device`: a name, or the number of a GPU; below 0: GPU `local_rank` or, if that is below 0 too, GPU LOCAL_RANK; if a
    machine has fewer GPUs than ranks, all ranks take the CPU. `shared_weights`: pairs of names of parameters that share
    one weight. `cuts`: the CutPoints to cut at, counted from 0 in the order of the forward pass, as in AutoConfig's
    table; None: cuts that balance the stages' FLOPs. `fp16`, `bf16`: True: train in that dtype, with fp32 masters; bf16
    needs no loss scale. `schedule`: `varuna`, or torch's `1f1b` or `gpipe`, which recompute nothing. `init_weights`:
    for a model on torch's meta device: fills named tensors in place; each process then allocates only its own stage.
    `limit_seconds`: longest wait for another process. Raises ValueError if the model cannot be cut in this way, and
    LostPeer if a process does not come.
    """

    def __init__(
        self,
        model: nn.Module,
        stage_to_rank_map: str,
        get_batch_fn: Callable[..., Inputs],
        batch_size: int,
        chunk_size: int,
        fp16: bool = False,
        local_rank: int = -1,
        device: int | str = -1,
        shared_weights: Sequence[tuple[str, str]] | None = None,
        *,
        cuts: Sequence[int] | None = None,
        bf16: bool = False,
        schedule: str = "varuna",
        init_weights: InitWeights | None = None,
        limit_seconds: float = 1800.0,
    ) -> None:
        super().__init__()
        self._link = link_to_launcher()
        self.rank_map = RankMap.parse(stage_to_rank_map)
        self.rank, world_size, self.device, note = take_seat(limit_seconds, device, local_rank)
        if note and self._link and self.rank == 0:
            self._link.tell("note", text=note)
        if world_size != self.rank_map.world_size:
            raise ValueError(f"stage_to_rank_map: expected {world_size} ranks, got {self.rank_map}")
        self.stage, self.replica = self.rank_map.stage_and_replica(self.rank)
        self.batch_size, self.fp16 = batch_size, fp16
        self.dtype = None  # the model's dtype
        if fp16 or bf16:
            self.dtype = torch.float16 if fp16 else torch.bfloat16
        self.micro_batch_sizes = micro_batch_sizes(batch_size, chunk_size, self.rank_map.num_replicas)
        if self._link and cuts is None:
            cuts = self._link.cuts
        self._sample_batch = get_batch_fn(chunk_size, device=None)
        shared_pairs = list(shared_weights or [])
        request = ModelToCut(model, self._sample_batch, shared_pairs, cuts, self.dtype, init_weights)
        weights = model.named_parameters(remove_duplicate=False)
        self.weight_shapes = {name: weight.shape for name, weight in weights}
        self._other_names: dict[str, str] = {}
        for name, other_name in shared_pairs:
            self._other_names[name] = other_name
            self._other_names[other_name] = name
        setup = set_up_stage(
            request, self.rank_map.num_stages, self.stage, self.micro_batch_sizes, self.device
        )
        self.active_cuts, self.stage_of = setup.active_cuts, setup.stage_of
        self.parts_by_mode = setup.parts_by_mode
        self._masters, self._sent_specs = setup.masters, setup.sent_specs()
        self._groups = Groups(self.rank_map, self.rank, setup.shared_weights, limit_seconds)
        self._gradients = Gradients(
            self._masters.trained_masters(),
            setup.weight_names,
            self._groups,
            setup.shared_weights,
            self.dtype,
        )
        self._passes = make_passes(setup, schedule, self._groups, self._compute)
        self._mean_check = MeanCheck(self.replica, self.rank_map.num_replicas, len(self.micro_batch_sizes))
        self._watch: ModuleWatch | None = ModuleWatch(self.part)  # None after the first step
        self._is_compared = False  # True once this stage has compared a micro-batch with its samples
        # on the last stage: each micro-batch's share of the global batch's loss
        self._losses: list[Tensor] = []
        self.scale: LossScale = ChosenLossScale(None)
        self.grad_norm = torch.zeros(())  # gradient norm of the last step, before clipping
        self.num_steps = 0  # number of steps taken, including steps that overflowed
        self.progress: Any = None  # Progress of the checkpoint that was loaded; None: none was loaded
        self._masters.share(self._groups, setup.shared_weights)

    def set_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        loss_scale: str | float | LossScale = "dynamic",
        init_loss_scale: float = 2.0**20,
        min_loss_scale: float = 1.0,
    ) -> None:
        """Take an optimizer of this model's parameters(). In fp16 and bf16 it will update the parameters' fp32 masters.

        `loss_scale`: `dynamic`: a scale from `init_loss_scale`, not below `min_loss_scale`. A number: a scale that
        never changes. `dynamic` and a number apply in fp16 only. A LossScale applies in any dtype. Raises ValueError if
        the optimizer has other parameters, or has taken a step.
        """
        masters = {id(weight): self._masters.by_name[name] for name, weight in self._masters.weights.items()}
        for group in optimizer.param_groups:
            if any(id(weight) not in masters for weight in group["params"]):
                raise ValueError(
                    "set_optimizer: expected an optimizer of this model's parameters(), made after Varuna(), got"
                    " another"
                )
            group["params"] = [masters[id(weight)] for weight in group["params"]]
        if optimizer.state:
            raise ValueError(
                "set_optimizer: expected an optimizer before its first step, got one that has stepped"
            )
        if isinstance(loss_scale, LossScale):
            self.scale = loss_scale
        elif self.fp16:
            is_dynamic = loss_scale == "dynamic"
            start = init_loss_scale if is_dynamic else float(loss_scale)
            self.scale = ChosenLossScale(start, min_loss_scale, is_dynamic=is_dynamic)
        optimizer.register_step_pre_hook(lambda *_: self._gradients.refuse_changes())
        if self.dtype:
            optimizer.register_step_post_hook(lambda *_: self._masters.publish())
        self.optimizer = optimizer
        position = (self.stage, self.replica, self.rank_map.num_replicas)
        self._checkpoints = Checkpoints(
            self._gradients.masters, optimizer, self._gradients.written_names, position, self._other_names
        )

    # ---- Training

    def step(self, inputs: Inputs, clip_grad_max_norm: float | None = None) -> tuple[float, bool]:
        """Run a step, except for the update, on this process's share of the batch. Return the loss of the global batch,
        and whether a gradient is not finite in fp16; if so, the optimizer must not step. The attribute `last_step`
        keeps the result as a Step. `clip_grad_max_norm`: clip gradients to this norm; None: do not clip.
        """
        if not hasattr(self, "optimizer"):
            raise ValueError("step: expected an optimizer, got none; try set_optimizer(optimizer) first")
        if self._link:
            self._link.at_boundary(self)
        self._masters.refuse_changed_weights()
        began_at = time.monotonic()
        self._begin(inputs)
        self._gradients.forget()
        self._masters.zero_grad()
        waited_before = self._passes.waited_seconds
        self._passes.step()
        if self._link:  # wait for the first stage's last backward passes, which may still be queued on a GPU
            STREAMS[self.device.type].current().synchronize()
        busy_seconds = time.monotonic() - began_at - (self._passes.waited_seconds - waited_before)
        check_numbers = self._mean_check.take_numbers(self.device)
        loss, norm, check_numbers = self._gradients.reduce(self._take_loss(), check_numbers, self.scale.value)
        self._mean_check.refuse(check_numbers)
        self.grad_norm, self._watch = norm, None
        overflow = self.scale.overflows(norm)
        self.num_steps += 1
        if self._link:
            self._report(self._link, inputs, loss, busy_seconds, began_at)
        self.last_step = self.scale.step(loss, norm, is_skipped=overflow)
        if clip_grad_max_norm is not None and not overflow:
            self._gradients.clip(norm, clip_grad_max_norm)
        self._gradients.remember()
        return float(loss), overflow

    def _report(
        self, launcher_link: Link, inputs: Inputs, loss: Tensor, busy_seconds: float, began_at: float
    ) -> None:
        """Report the step to the launcher. `began_at`: time.monotonic() at the step's beginning."""
        facts = {
            "step": self.num_steps,
            "loss": float(loss),
            "grad_norm": float(self.grad_norm),
            "overflow": self.scale.overflows(self.grad_norm),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "updates": count_updates(self.optimizer),
            "loss_scale": self.scale.value,
            "busy_seconds": busy_seconds,
            "seconds": time.monotonic() - began_at,
        }
        launcher_link.tell_step(self, inputs, facts)

    @torch.no_grad()
    def evaluate(self, inputs: Inputs) -> float:
        """Run forward passes only, and return the loss of the global batch. `inputs`: this process's share of the
        batch."""
        self._begin(inputs)
        self._passes.evaluate()
        loss = self._take_loss()
        for group in (self._groups.replicas, self._groups.pipeline):
            if group:
                all_reduce(loss, group)
        return float(loss)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a pipeline has no forward pass of its own; try step(inputs), or evaluate(inputs)")

    def _begin(self, inputs: Inputs) -> None:
        check_like_first_batch(inputs, self._sample_batch)
        self._micro_batches = split_batch(inputs, self.micro_batch_sizes)

    def _take_loss(self) -> Tensor:
        """Return the sum of the micro-batches' weighted losses; 0 on all stages but the last."""
        losses, self._losses = self._losses, []
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss
        return total

    def _compute(self, micro_batch: int, received_tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run micro-batch `micro_batch` through this stage; return the tensors to send or, on the last stage, the loss.

        The loss is multiplied by the loss scale and by the micro-batch's share of the global batch. A model whose
        forward pass takes `loss_scale` applies this product itself, before the gradient can be rounded to zero in fp16.
        """
        if self._link:
            self._link.tell_alive()
        part = self.parts_by_mode[self.training]
        batch_share = self.micro_batch_sizes[micro_batch] / self.batch_size
        inputs = {**self._micro_batches[micro_batch], LOSS_SCALE: batch_share * self.scale.value}
        run_part = self._run_watched_part if self._watch else self._run_part
        outputs = run_part(part, received_tensors, inputs)
        if self._watch and self.training and not self._is_compared:
            self._is_compared = True
            self.eval()  # dropout would draw other numbers for a sample alone
            compute = functools.partial(self._run_part, self.parts_by_mode[False])
            self._mean_check.compare(compute, received_tensors, inputs, self.micro_batch_sizes[micro_batch])
            self.train()
        if self.stage == self.rank_map.num_stages - 1:
            loss = outputs[0].float().reshape(())
            self._losses.append(loss.detach() * batch_share)
            self._mean_check.count_targets(loss, self.micro_batch_sizes[micro_batch])
            return (loss if LOSS_SCALE in part.inputs else loss * inputs[LOSS_SCALE],)
        for index, (tensor, expected_spec) in enumerate(
            zip(outputs, self._sent_specs[micro_batch], strict=True)
        ):
            if (tensor.shape, tensor.dtype) != expected_spec:
                spec_got = spec_text((tensor.shape, tensor.dtype))
                raise ValueError(
                    f"micro-batch {micro_batch}: expected tensor {index} that stage {self.stage} sends to be"
                    f" {spec_text(expected_spec)}, got {spec_got}; try to pad all batches to one shape"
                )
        return outputs

    def _run_part(self, part: Part, received_tensors: Sequence[Tensor], inputs: Inputs) -> Sequence[Any]:
        """Return the tensors that the part sends or, on the last stage, the loss."""
        values = (move_value(inputs.get(name), self.device, self.dtype) for name in part.inputs)
        outputs = part.module(*received_tensors, *values)
        if self.stage < self.rank_map.num_stages - 1:
            return outputs
        return [outputs[0] if isinstance(outputs, tuple | list) else outputs]

    def _run_watched_part(
        self, part: Part, received_tensors: Sequence[Tensor], inputs: Inputs
    ) -> Sequence[Any]:
        """Return _results(). Raises ValueError if the pass changes what a recompute would change once more."""
        assert self._watch is not None
        state_before = self._watch.state((received_tensors, inputs))
        outputs = self._run_part(part, received_tensors, inputs)
        if change := self._watch.change(state_before):
            raise ValueError(f"stage {self.stage}: {CHANGES_ERROR} {change}")
        return outputs

    def checkpoint(
        self,
        folder: str | Path | None = None,
        step: int | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Future:
        """Save a checkpoint: copy the state now, and write the copy while training goes on. All processes must call
        this after an update. The checkpoint is on disk when the returned future is done.

        `folder`: folder of the checkpoints; None: the launcher's. `step`: the checkpoint's step; None: the number of
        steps taken. `notes`: values of the script's own to store, of types that JSON has.
        """
        step = self.num_steps if step is None else step
        if folder is None and self._link:
            # Do not write this step again: its checkpoint would be incomplete meanwhile.
            if self._link.saved_step == step:
                return self._checkpoints.pending_save or completed_future()
            self._link.saved_step = step
        progress = Progress(self.num_steps, self.scale.value, self.scale.num_good)
        return self._checkpoints.save(self._folder(folder), step, {**asdict(progress), **(notes or {})})

    def saved(self, step: int | None = None) -> None:
        """Tell the launcher that the script has saved its state by itself, and that the files are on disk. All
        processes must call this. `step`: the step of the saved state; None: the number of steps taken.

        The launcher restarts from this step, and gives its number to the script as --resume_step. The script then loads
        its state and sets `num_steps` to this number.
        """
        if self._link:
            self._link.tell("saved", step=self.num_steps if step is None else step)

    def load_checkpoint(
        self, folder: str | Path | None = None, step: int | None = None, form: type[Progress] = Progress
    ) -> int:
        """Load a complete checkpoint and return its step. The checkpoint may have been saved with other numbers of
        stages and replicas. `folder`: folder of the checkpoints; None: the launcher's. `step`: the checkpoint's step;
        None: the newest. `form`: class of the attribute `progress`, into which the checkpoint's progress is read:
        Progress, or a subclass with a field for each note.
        """
        loaded_step, progress = self._checkpoints.load(self._folder(folder), form, step)
        if folder is None and self._link:
            self._link.saved_step = loaded_step
        self.progress, self.num_steps = progress, progress.num_steps
        self.scale.resume(progress.loss_scale, progress.num_good)
        self._masters.publish()
        return loaded_step

    def _folder(self, folder: str | Path | None) -> str | Path:
        if folder is None and self._link is None:
            raise ValueError(
                "checkpoint: expected a folder, got none; only scripts of a launcher may leave it out"
            )
        return folder if folder is not None else self._link.folder  # type: ignore[union-attr]

    def leave(self) -> Iterator[TensorState]:
        """Wait until the last checkpoint is written, and return an iterator over the trained tensors. On rank 0 the
        iterator yields each weight of the whole model with its moments, which the ranks of the first replica send; on
        other ranks it yields nothing. All ranks must iterate to the end, where the process group is closed.
        """
        self._checkpoints.wait()
        return self._sent_tensors()

    def _sent_tensors(self) -> Iterator[TensorState]:
        for name, shape in self.weight_shapes.items():
            if name not in self.stage_of:  # the weight's stage has the weight under another name
                continue
            source = self.rank_map.ranks_by_stage[self.stage_of[name]][0]
            if self.rank not in (0, source):
                continue
            if self.rank == source:
                master = self._masters.by_name[name]
                state = self.optimizer.state.get(master, {})
                moments = [state.get(key, torch.zeros_like(master)) for key in ("exp_avg", "exp_avg_sq")]
                tensors = [tensor.detach().cpu() for tensor in (master, *moments)]
            else:
                tensors = [torch.empty(shape) for _ in range(3)]
            if source:
                for tensor in tensors:
                    if self.rank:
                        dist.send(tensor, 0)
                    else:
                        dist.recv(tensor, source)
            if self.rank == 0:
                yield TensorState(name, *tensors)
        self._passes.close()
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))
            dist.destroy_process_group()

    # ---- This stage as a module: names are those of the whole model

    @property
    def part(self) -> nn.Module:
        return self.parts_by_mode[True].module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.part.named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._masters.zero_grad()

    def train(self, mode: bool = True) -> Varuna:
        super().train(mode)
        for part in getattr(self, "parts_by_mode", {}).values():
            part.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of this stage alone, under the names of the whole model."""
        return dict(self.part.state_dict(*args, **kwargs))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        mismatched_keys = self.part.load_state_dict(state_dict, *args, **kwargs)
        with torch.no_grad():
            for name, weight in self._masters.weights.items():
                self._masters.by_name[name].copy_(weight)
        self._masters.publish()
        return mismatched_keys


def make_passes(setup: StageSetup, schedule: str, groups: Groups, compute: Compute) -> Engine | TorchSchedule:
    """Return the engine that runs a step's passes: this project's engine for `varuna` or a single stage, otherwise
    torch's engine."""
    note = functools.partial(trace_note, setup.device)
    stage, num_stages, micro_batch_sizes = setup.stage, setup.num_stages, setup.micro_batch_sizes
    if schedule != "varuna" and num_stages > 1:  # all schedules are the same with one stage
        from methods.pipeline.torch_schedules import TorchSchedule  # its imports take a second

        if len(set(micro_batch_sizes)) > 1:
            raise ValueError(
                f"chunk_size: expected micro-batches of one size for {schedule}, got"
                f" {', '.join(map(str, micro_batch_sizes))}"
            )
        return TorchSchedule(schedule, compute, setup, groups.pipeline, note)
    ranks = groups.rank_map.pipeline(groups.replica)
    received_specs = [specs_of(setup.received(size), stage - 1) for size in micro_batch_sizes]
    gradient_specs = []
    for size in micro_batch_sizes:
        gradient_specs.append(
            specs_of([tensor for tensor in setup.sent(size) if tensor.requires_grad], stage)
        )
    transport = Transport(
        ranks[stage - 1] if stage else None,
        None if setup.is_last else ranks[stage + 1],
        groups.limit.total_seconds(),
        received_specs,
        gradient_specs,
    )
    needs_grad = [tensor.requires_grad for tensor in setup.received(micro_batch_sizes[0])]
    return Engine(
        Stage(compute, needs_grad, is_last=setup.is_last, device=str(setup.device)),
        transport,
        order_of(num_stages, stage, len(micro_batch_sizes)),
        note=note,
    )


def trace_note(device: torch.device, work: str, micro_batch: int) -> AbstractContextManager[None]:
    """Return a context that records the work in this process's trace, if there is one."""
    streams = STREAMS[device.type]
    span: Any = streams.span
    if span is None:
        return UNTRACED
    if work in ("forward", "recompute", "backward"):
        # passes run on the device's stream, messages in this thread
        return span(streams.current(), "compute", work, f"micro-batch {micro_batch}")
    return span(None, "messages", work, f"micro-batch {micro_batch}")


def spec_text(spec: TensorSpec) -> str:
    return f"{tuple(spec[0])} {str(spec[1]).removeprefix('torch.')}"
