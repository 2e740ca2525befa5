"""The published GPT as a pipeline: this rank's stage, its messages, and its share of the update."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.gpt import DTYPES, adamw
from harness.core.job import Workload
from harness.core.method import Step, TensorState
from harness.devices.streams import STREAMS, UNNOTED
from methods.pipeline.checkpoint import Checkpoints
from methods.pipeline.engine import Engine, order_of
from methods.pipeline.gpt_stage import EMBEDDING, Batch, build, names_and_shapes, stage_of
from methods.pipeline.gradients import Gradients, Groups, Shared
from methods.pipeline.masters import Masters
from methods.pipeline.partition import gpt_stages
from methods.pipeline.rank_map import RankMap
from methods.pipeline.stage import Stage
from methods.pipeline.torch_schedules import TorchSchedule
from methods.pipeline.transport import Transport, backend_of, join
from methods.shared.loss_scale import LossScale


@dataclass(frozen=True)
class PipelineShape:
    """The distribution of a job over its ranks."""

    ranks: RankMap
    chunk_size: int  # samples of a micro-batch
    schedule: str
    limit_seconds: float  # longest wait for another rank


@dataclass(frozen=True)
class GptProgress:
    """A checkpoint's data on the steps before it; lists hold one value a step."""

    workload: dict[str, Any]
    loss_scale: float
    num_good: int
    loss: list[float]
    grad_norm: list[float]
    loss_scales: list[float | None]
    skipped: list[bool]
    source: str = ""  # hash of the source that trained these steps

    def __post_init__(self) -> None:
        lengths = {len(each) for each in (self.loss, self.grad_norm, self.loss_scales, self.skipped)}
        if len(lengths) > 1:
            raise ValueError(f"expected a loss, norm, scale and skip for each step, got {sorted(lengths)} of them")
        if any(is_skipped and scale is None for is_skipped, scale in zip(self.skipped, self.loss_scales, strict=True)):
            raise ValueError("expected a loss scale of each step that is skipped, got None")
        if not re.fullmatch("[0-9a-f]*", self.source):
            raise ValueError(f"expected the hash of a source, got {self.source!r:.80}")


@contextmanager
def joined(world_size: int, device: str, limit_seconds: float) -> Iterator[int]:
    """Join all ranks of the job and return this process's; a single process needs no others."""
    if world_size == 1:
        yield 0
        return
    join(limit_seconds, backend_of(torch.device(device)))
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


class GptPipeline:
    """One rank's part of the pipeline."""

    def __init__(self, workload: Workload, shape: PipelineShape, rank: int, device: str) -> None:
        ranks = shape.ranks
        self.workload, self.ranks, self.rank, self.device = workload, ranks, rank, device
        self.stages = gpt_stages(workload, ranks.num_stages)
        self.number, self.replica = ranks.place_of(rank)
        stage = self.stages[self.number]
        part, starts = build(workload, stage, device)
        self.masters = Masters(dict(part.named_parameters()), starts)
        self.shapes = names_and_shapes(workload)
        last = ranks.num_stages - 1
        shared = [Shared(EMBEDDING, EMBEDDING, 0, last)] if last else []
        groups = Groups(ranks, rank, shared, shape.limit_seconds)
        dtype = DTYPES[workload.dtype]
        self.gradients = Gradients(self.masters.trained(), list(self.shapes), groups, shared, dtype)
        self.optimizer = adamw(self.masters.trained().values())
        place = (self.number, self.replica, ranks.num_replicas)
        self.checkpoints = Checkpoints(self.gradients.masters, self.optimizer, self.gradients.own, place)
        self.num_samples = workload.batch_size // ranks.num_replicas  # samples of this replica
        num_micro_batches = self.num_samples // shape.chunk_size
        self.batch = Batch(part, num_micro_batches, shape.chunk_size / workload.batch_size)
        size = torch.Size((shape.chunk_size, workload.seq_len, workload.hidden_size))
        self.engine: Engine | None = None
        self.torchs: TorchSchedule | None = None
        if shape.schedule == "varuna" or last == 0:  # with one stage all schedules are the same
            pipeline = ranks.pipeline(self.replica)
            below = pipeline[self.number - 1] if self.number else None
            above = pipeline[self.number + 1] if self.number < last else None
            specs = [[(size, dtype)]] * num_micro_batches
            self.engine = Engine(
                Stage(self.batch.compute, [True] * (not stage.is_first), is_last=stage.is_last, device=device),
                Transport(below, above, shape.limit_seconds),
                order_of(ranks.num_stages, self.number, num_micro_batches),
                specs, specs, note=self.note,
            )  # fmt: skip
        else:
            boundary = torch.empty(size, dtype=dtype, device="meta")
            tokens = torch.empty(size[:2], dtype=torch.long, device="meta")
            self.torchs = TorchSchedule(
                shape.schedule, self.batch, (self.number, ranks.num_stages), boundary, tokens, groups.pipeline, device,
                self.note,
            )  # fmt: skip

    def note(self, work: str, number: int) -> AbstractContextManager[None]:
        """Note work for a trace of this rank."""
        span: Any = STREAMS[torch.device(self.device).type].span
        track = "compute" if work in ("forward", "recompute", "backward") else "messages"
        return UNNOTED if span is None else span(None, track, work, f"micro-batch {number}")

    def passes(self, inputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Run all passes of this replica's samples; return its share of the global batch's loss, 0 but on the last
        stage."""
        start = self.replica * self.num_samples
        mine = slice(start, start + self.num_samples)
        self.batch.begin(inputs[mine], targets[mine], scale)
        losses: list[Tensor] = []
        if self.engine:
            self.engine.step()
            losses, self.engine.stage.losses = self.engine.stage.losses, []
        elif self.torchs:
            losses = self.torchs.step()
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss * self.batch.weight
        return total

    def update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.masters.publish()

    def save(self, folder: str, scale: LossScale, steps: Sequence[Step], source: str) -> None:
        """Save a checkpoint after the last of these steps, counted from the first of the job. `source`: hash of the
        method's source."""
        norms = [float(step.grad_norm) for step in steps if step.grad_norm is not None]
        progress = GptProgress(
            asdict(self.workload), scale.value, scale.num_good, [float(step.loss) for step in steps], norms,
            [step.loss_scale for step in steps], [step.is_skipped for step in steps], source,
        )  # fmt: skip
        self.checkpoints.save(folder, len(steps), asdict(progress))

    def resume(self, folder: str, scale: LossScale) -> tuple[list[Step], str]:
        """Continue after the newest complete checkpoint; return the steps until then, and the source that trained them.
        Raises ValueError if it is of another workload."""
        step, progress = self.checkpoints.load(folder, GptProgress)
        for name, value in asdict(self.workload).items():
            if (there := progress.workload.get(name)) != value:
                raise ValueError(
                    f"{folder}: expected a checkpoint with {name} {value}, got {there}; try another folder"
                )
        if len(progress.loss) != step:
            raise ValueError(f"{folder}: expected a checkpoint of {step} steps, got {len(progress.loss)} losses")
        scale.value, scale.num_good = progress.loss_scale, progress.num_good
        self.masters.publish()
        columns = (progress.loss, progress.grad_norm, progress.loss_scales, progress.skipped)
        steps = [
            Step(torch.tensor(loss), torch.tensor(norm), loss_scale=of_loss, is_skipped=is_skipped)
            for loss, norm, of_loss, is_skipped in zip(*columns, strict=True)
        ]
        return steps, progress.source

    def tensors(self) -> list[TensorState]:
        """Return the whole model's tensors on rank 0, in the host's memory; the first replica's ranks send them."""
        found = []
        for name, shape in self.shapes.items():
            source = self.ranks.ranks[stage_of(name, self.stages)][0]
            if self.rank not in (0, source):
                continue
            if self.rank == source:
                master = self.masters.by_name[name]
                state = self.optimizer.state[master]
                moments = [state.get(each, torch.zeros_like(master)) for each in ("exp_avg", "exp_avg_sq")]
                whole = [tensor.detach().cpu() for tensor in (master, *moments)]
            else:
                whole = [torch.empty(shape) for _ in range(3)]
            if source:
                for tensor in whole:
                    dist.send(tensor, 0) if self.rank else dist.recv(tensor, source)
            if self.rank == 0:
                found.append(TensorState(name, *whole))
        return found

    def close(self) -> None:
        """Wait for all ranks, and leave."""
        self.checkpoints.wait()
        if self.engine:
            self.engine.transport.close()
        if self.ranks.world_size > 1:
            dist.all_reduce(torch.zeros(1))
