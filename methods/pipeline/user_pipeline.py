"""Varuna for users' models: a model with CutPoints, of which every process keeps its stage.

    shared = [("wte.weight", "head.weight")]
    model = Varuna(model, "0,2;1,3;", get_batch, batch_size=64, chunk_size=4, shared_weights=shared)
    optimizer = torch.optim.AdamW(model.parameters())
    model.set_optimizer(optimizer)
    for inputs in batches:  # dictionaries of this process's share of the batch
        loss, overflow = model.step(inputs, clip_grad_max_norm=1.0)
        if not overflow:
            optimizer.step()

The model's forward pass takes the dictionary's items by name, and returns the mean loss over the samples. After a step
each process has its stage's part of the global batch's gradient, which is that of one process.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from methods.pipeline.batches import Inputs, cast, micro_batch_sizes, moved, resized, sample_shape, split
from methods.pipeline.checkpoint import Checkpoints
from methods.pipeline.cut import CutPoint, Part, choose_cuts, cut, num_cuts, probe, specs_of, traced
from methods.pipeline.engine import Engine, order_of
from methods.pipeline.gradients import Gradients, Groups, Shared, all_reduce
from methods.pipeline.link import done, link, num_updates
from methods.pipeline.masters import Masters
from methods.pipeline.rank_map import RankMap
from methods.pipeline.stage import Spec, Stage
from methods.pipeline.transport import Transport, backend_of, join

__all__ = ["CutPoint", "Varuna"]
SCALE_WINDOW = 1000  # good steps in a row, after which the loss scale doubles


@dataclass(frozen=True)
class Progress:
    """A checkpoint's data on the steps before it."""

    num_steps: int
    loss_scale: float
    num_good: int


class Varuna(nn.Module):
    """One process's stage of a model.

    `get_batch_fn(size, device=None)` returns a batch of that size, to find the shapes at the cuts; nothing is trained
    on it. `batch_size`: of all replicas together. `chunk_size`: samples of a micro-batch; the last one may be smaller.
    `shared_weights`: pairs of names of parameters that are one. `cuts`: the CutPoints to cut at, counted from 0 in the
    order of the forward pass, as AutoConfig's table names them; None: those that balance the FLOPs. Raises ValueError,
    one line, for a model that cannot be cut so, and LostPeer for a process that does not come.
    """

    def __init__(
        self, model: nn.Module, stage_to_rank_map: str, get_batch_fn: Callable[..., Inputs], batch_size: int,
        chunk_size: int, fp16: bool = False, local_rank: int = -1, device: int = -1,
        shared_weights: Sequence[tuple[str, str]] | None = None, *, cuts: Sequence[int] | None = None,
        limit_seconds: float = 1800.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self._link = link()
        if self._link and cuts is None:
            cuts = self._link.cuts
        self.ranks = RankMap.parse(stage_to_rank_map)
        self.device = chosen_device(device, local_rank)
        if not dist.is_initialized():
            join(limit_seconds, backend_of(self.device))
        self.rank = dist.get_rank()
        if dist.get_world_size() != self.ranks.world_size:
            raise ValueError(f"stage_to_rank_map: expected {dist.get_world_size()} ranks, got {self.ranks}")
        self.stage, self.replica = self.ranks.place_of(self.rank)
        self.batch_size, self.fp16 = batch_size, fp16
        self.sizes = micro_batch_sizes(batch_size, chunk_size, self.ranks.num_replicas)
        sample = get_batch_fn(chunk_size, device=None)
        self._shapes = {name: sample_shape(value) for name, value in sample.items()}
        pairs = list(shared_weights or [])
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        parts = self._cut(model, sample, cuts)
        shared = _shared(model, parts, pairs)
        self._other_names = {name: other for pair in pairs for name, other in (pair, pair[::-1])}
        mine = parts[self.stage].module
        starts = {name: weight.detach().float().clone() for name, weight in mine.named_parameters()} if fp16 else None
        if fp16:
            model.half()
        returned = self._probe(parts, sample, chunk_size)
        # One engine for each mode, because a trace fixes a module's use of self.training.
        self.modes = {True: parts[self.stage]}
        self.modes[False] = self._in_eval_mode(model, sample, parts)
        mine.to(self.device)
        if starts:
            starts = {name: start.to(self.device) for name, start in starts.items()}
        self._masters = Masters(dict(mine.named_parameters()), starts)
        groups = Groups(self.ranks, self.rank, shared, limit_seconds)
        self._groups = groups
        self._gradients = Gradients(
            self._masters.trained(), names, groups, shared, torch.float16 if fp16 else torch.float32
        )
        self._engine = self._make_engine(returned, limit_seconds)
        self._loss_scale, self._num_good, self._min_scale, self._is_dynamic = 1.0, 0, 1.0, False
        self.grad_norm = torch.zeros(())  # of the last step, before clipping
        self.num_steps = 0  # steps taken, those that overflow included
        self._same_weights(shared)

    # ---- Set-up

    def _cut(self, model: nn.Module, sample: Inputs, cuts: Sequence[int] | None) -> list[Part]:
        graph = traced(model.train(), sample)
        number, num_stages = num_cuts(graph), self.ranks.num_stages
        if cuts is not None:
            self.active = sorted(set(cuts))
            if len(self.active) != num_stages - 1 or any(each not in range(number) for each in self.active):
                raise ValueError(
                    f"cuts: expected {num_stages - 1} of the {number} CutPoints, counted from 0, for {num_stages}"
                    f" stages, got {list(cuts)}"
                )
            return cut(model, graph, self.active)
        runs = cut(model, graph, range(number))
        flops = [flops for _, flops in probe(runs, sample)]
        weighs = [any(True for _ in run.module.parameters()) for run in runs]
        self.active = choose_cuts(flops, weighs, num_stages)
        return cut(model, graph, self.active)

    def _in_eval_mode(self, model: nn.Module, sample: Inputs, parts: Sequence[Part]) -> Part:
        graph = traced(model.eval(), sample)
        part = cut(model, graph, self.active)[self.stage]
        model.train()
        return part

    def _probe(self, parts: Sequence[Part], sample: Inputs, chunk_size: int) -> dict[int, list[Any]]:
        """Return each part's result, by size of micro-batch. Every process refuses the same unsendable values, so that
        none waits for one that has refused."""
        chunks = {size: resized(sample, size) if size != chunk_size else sample for size in set(self.sizes)}
        returned = {size: [*probe(parts, cast(each, self.fp16))] for size, each in chunks.items()}
        *below, (last, _) = returned[self.sizes[0]]
        self._check_loss(last[0])
        for number, (values, _) in enumerate(below):
            specs_of(values, number)
        return returned

    def _check_loss(self, loss: Any) -> None:
        loss = loss[0] if isinstance(loss, tuple | list) else loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"expected the model's forward pass to return a loss of one element, got {got}")

    def _make_engine(self, returned: Mapping[int, Sequence[Any]], limit_seconds: float) -> Engine:
        """Make the engine. `returned`: each part's result, by size of micro-batch."""
        stage, last, pipeline = self.stage, self.ranks.num_stages - 1, self.ranks.pipeline(self.replica)
        self._sent: list[list[Spec]] = []
        received: list[list[Spec]] = []
        gradients: list[list[Spec]] = []
        for size in self.sizes:
            if stage:
                received.append(specs_of(returned[size][stage - 1][0], stage - 1))
            if stage < last:
                tensors = returned[size][stage][0]
                self._sent.append(specs_of(tensors, stage))
                gradients.append(specs_of([tensor for tensor in tensors if tensor.requires_grad], stage))
        needs_grad = [tensor.requires_grad for tensor in returned[self.sizes[0]][stage - 1][0]] if stage else []
        below, above = pipeline[stage - 1] if stage else None, pipeline[stage + 1] if stage < last else None
        return Engine(
            Stage(self._compute, needs_grad, is_last=stage == last, device=str(self.device)),
            Transport(below, above, limit_seconds), order_of(last + 1, stage, len(self.sizes)), received, gradients,
        )  # fmt: skip

    @torch.no_grad()
    def _same_weights(self, shared: Sequence[Shared]) -> None:
        """Copy the first replica's weights, and the first of shared weights, to the others."""
        masters = self._masters.by_name
        if self._groups.replicas:
            for master in masters.values():
                dist.broadcast(master, self.ranks.ranks[self.stage][0], group=self._groups.replicas)
        for pair in shared:
            if pair.stage == pair.other_stage:
                masters[pair.other].copy_(masters[pair.name])
            elif self.stage in (pair.stage, pair.other_stage):
                name = pair.name if self.stage == pair.stage else pair.other
                source = self.ranks.ranks[pair.stage][self.replica]
                dist.broadcast(masters[name], source, group=self._groups.pairs[pair])
        self._masters.publish()

    def set_optimizer(self, optimizer: torch.optim.Optimizer, loss_scale: str | float = "dynamic",
                      init_loss_scale: float = 2.0**20, min_loss_scale: float = 1.0) -> None:  # fmt: skip
        """An optimizer of this model's parameters(). In fp16 it will update their fp32 masters.

        A scale that is a number stays as it is.
        """
        mine = {id(weight): self._masters.by_name[name] for name, weight in self._masters.weights.items()}
        for group in optimizer.param_groups:
            if any(id(weight) not in mine for weight in group["params"]):
                raise ValueError(
                    "set_optimizer: expected an optimizer of this model's parameters(), made after Varuna()"
                )
            group["params"] = [mine[id(weight)] for weight in group["params"]]
        if optimizer.state:
            raise ValueError("set_optimizer: expected an optimizer before its first step")
        if self.fp16:
            self._is_dynamic = loss_scale == "dynamic"
            self._loss_scale = init_loss_scale if self._is_dynamic else float(loss_scale)
            self._min_scale = min_loss_scale
            optimizer.register_step_post_hook(lambda *_: self._masters.publish())
        self.optimizer = optimizer
        place = (self.stage, self.replica, self.ranks.num_replicas)
        self._checkpoints = Checkpoints(
            self._gradients.masters, optimizer, self._gradients.own, place, self._other_names
        )

    # ---- Training

    def step(self, inputs: Inputs, clip_grad_max_norm: float | None = None) -> tuple[float, bool]:
        """The whole step but for the update, on this process's share of the batch: the loss of the global batch, and in
        fp16 whether a gradient was not finite, so that the optimizer must not step."""
        if not hasattr(self, "optimizer"):
            raise ValueError("step: expected an optimizer; try set_optimizer(optimizer) before")
        if self._link:
            self._link.at_boundary(self)
        began = time.monotonic()
        self._begin(inputs)
        self._masters.zero_grad()
        waited = self._engine.transport.waited_seconds
        self._engine.step()
        busy = time.monotonic() - began - (self._engine.transport.waited_seconds - waited)
        loss, norm = self._gradients.reduce(self._taken_loss(), self._loss_scale)
        self.grad_norm = norm
        overflow = self.fp16 and not math.isfinite(float(norm))
        self.num_steps += 1
        if self._link:
            self._link.tell_step(self, inputs, {
                "step": self.num_steps, "loss": float(loss), "grad_norm": float(norm), "overflow": overflow,
                "learning_rate": self.optimizer.param_groups[0]["lr"], "updates": num_updates(self.optimizer),
                "loss_scale": self._loss_scale, "busy_seconds": busy, "seconds": time.monotonic() - began,
            })  # fmt: skip
        self._rescale(overflow)
        if clip_grad_max_norm is not None and not overflow:
            self._gradients.clip(norm, clip_grad_max_norm)
        return float(loss), overflow

    @torch.no_grad()
    def evaluate(self, inputs: Inputs) -> float:
        """The loss of the global batch, by forward passes alone."""
        self._begin(inputs)
        self._engine.evaluate()
        loss = self._taken_loss()
        for group in (self._groups.replicas, self._groups.pipeline):
            if group:
                all_reduce(loss, group)
        return float(loss)

    def forward(self, *args: Any, **words: Any) -> Any:
        raise RuntimeError("a pipeline has no forward pass of its own; try step(inputs), or evaluate(inputs)")

    def _begin(self, inputs: Inputs) -> None:
        if missing := sorted(self._shapes.keys() - inputs.keys()):
            raise ValueError(f"step: the batch lacks {', '.join(missing)}, which the first one had")
        for name, value in inputs.items():
            found, expected = sample_shape(value), self._shapes.get(name)
            if found != expected and None not in (found, expected):
                raise ValueError(
                    f"step: expected {name} of {expected} for each sample, as in the first batch, got {found};"
                    " try to pad all batches to one shape"
                )
        self._micro_batches = split(inputs, self.sizes)

    def _taken_loss(self) -> Tensor:
        losses, self._engine.stage.losses = self._engine.stage.losses, []
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss / self._loss_scale
        return total

    def _compute(self, number: int, received: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run one micro-batch through this stage. The last stage's loss is weighted by its share of the global
        batch."""
        if self._link:
            self._link.alive()
        part, inputs = self.modes[self.training], self._micro_batches[number]
        mine = [moved(inputs.get(name), self.device, self.fp16) for name in part.inputs]
        found = part.module(*received, *mine)
        if self._engine.stage.is_last:
            loss = found[0] if isinstance(found, tuple | list) else found
            return (loss.float().reshape(()) * (self.sizes[number] / self.batch_size) * self._loss_scale,)
        for index, (tensor, expected) in enumerate(zip(found, self._sent[number], strict=True)):
            if (tensor.shape, tensor.dtype) != expected:
                raise ValueError(
                    f"expected {_told(expected)} at the cut above stage {self.stage} (tensor {index}) of micro-batch"
                    f" {number}, got {_told((tensor.shape, tensor.dtype))}; try to pad all batches to one shape"
                )
        return found

    def _rescale(self, overflow: bool) -> None:
        if not self._is_dynamic:
            return
        self._num_good = 0 if overflow else self._num_good + 1
        if overflow:
            self._loss_scale = max(self._min_scale, self._loss_scale / 2)
        elif self._num_good % SCALE_WINDOW == 0:
            self._loss_scale *= 2

    def checkpoint(self, folder: str | Path | None = None, step: int | None = None) -> Future:
        """Called by all processes after an update: copies the state, and writes it while training goes on. Durable when
        the future is done. `step`: the number of steps taken, if not given. `folder`: the launcher's, if not given."""
        step = self.num_steps if step is None else step
        if folder is None and self._link:
            if self._link.saved == step:  # writing it again would leave no complete one meanwhile
                return self._checkpoints.under_way or done()
            self._link.saved = step
        progress = Progress(self.num_steps, self._loss_scale, self._num_good)
        return self._checkpoints.save(self._folder(folder), step, asdict(progress))

    def load_checkpoint(self, folder: str | Path | None = None, step: int | None = None) -> int:
        """Go on from a complete checkpoint, the newest if no step is given, of any stages and replicas; its step."""
        chosen, progress = self._checkpoints.load(self._folder(folder), Progress, step)
        if folder is None and self._link:
            self._link.saved = chosen
        self.num_steps = progress.num_steps
        if self._is_dynamic:
            self._loss_scale, self._num_good = progress.loss_scale, progress.num_good
        self._masters.publish()
        return chosen

    def _folder(self, folder: str | Path | None) -> str | Path:
        if folder is None and self._link is None:
            raise ValueError("checkpoint: expected a folder, which only a launcher's scripts may leave out")
        return folder if folder is not None else self._link.folder  # type: ignore[union-attr]

    # ---- This stage as a module: names are those of the whole model

    @property
    def part(self) -> nn.Module:
        return self.modes[True].module

    def named_parameters(self, *args: Any, **words: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.part.named_parameters(*args, **words)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._masters.zero_grad()

    def train(self, mode: bool = True) -> Varuna:
        super().train(mode)
        for part in getattr(self, "modes", {}).values():
            part.module.train(mode)
        return self

    def state_dict(self, *args: Any, **words: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this stage's state."""
        return dict(self.part.state_dict(*args, **words))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **words: Any) -> Any:
        found = self.part.load_state_dict(state_dict, *args, **words)
        with torch.no_grad():
            for name, weight in self._masters.weights.items():
                self._masters.by_name[name].copy_(weight)
        return found


def _shared(model: nn.Module, parts: Sequence[Part], pairs: Sequence[tuple[str, str]]) -> list[Shared]:
    """The pairs, with their stages. Raises ValueError for one that does not exist, and for a parameter on both sides of
    a cut that is in no pair."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    stages: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        for name, _ in part.module.named_parameters(remove_duplicate=False):
            stages.setdefault(name, []).append(number)
    found = []
    for name, other in pairs:
        for each in (name, other):
            if each not in whole:
                raise ValueError(f"shared_weights: the model has no parameter {each}")
            if each not in stages:
                raise ValueError(f"shared_weights: no stage uses {each}")
        if whole[name].shape != whole[other].shape:
            raise ValueError(
                f"shared_weights: {name} has shape {tuple(whole[name].shape)}, {other} {tuple(whole[other].shape)}"
            )
        shared = Shared(name, other, stages[name][0], stages[other][-1])
        if shared.stage != shared.other_stage or whole[name] is not whole[other]:
            found.append(shared)
    told = {frozenset((id(whole[name]), id(whole[other]))) for name, other in pairs}
    for name, weight in whole.items():
        for other, another in whole.items():
            if another is not weight or name > other or not stages.get(name) or not stages.get(other):
                continue
            places = sorted({*stages[name], *stages[other]})
            if len(places) > 1 and frozenset((id(weight), id(another))) not in told:
                raise ValueError(
                    f"parameter {name} is used by stages {' and '.join(map(str, places))}, on both sides of a cut; try"
                    f" shared_weights=[({name!r}, {other!r})]"
                )
            if len(places) > 2:
                raise ValueError(f"parameter {name} is used by {len(places)} stages; two at most can share one")
    return found


def chosen_device(device: int, local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = next((each for each in (device, local_rank) if each >= 0), int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _told(spec: Spec) -> str:
    return f"{tuple(spec[0])} {str(spec[1]).removeprefix('torch.')}"
