"""Varuna (Athlur et al. 2022): the model is cut into stages on different ranks, and micro-batches flow through the
stages.

Ranks exchange only the activations at a cut and their gradients, few enough bytes for a common network. A stage keeps
only its input of each micro-batch, and recomputes its other activations just before the gradient arrives. The order of
passes follows fixed rules, but a stage whose gradient is late runs another forward pass meanwhile. Ranks beyond one
pipeline hold replicas of it; all replicas share each batch.

The training is exact: gradients are summed over micro-batches, over replicas, and over the two stages that share a tied
embedding; the norm is taken over all stages. torch's own pipelines run `schedule=gpipe` and `1f1b`.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.console import counted
from harness.core.identity import source_hash
from harness.core.job import Plan, Room, Workload
from harness.core.method import Method, Step, Trained, Training
from harness.core.option import opt, with_option
from harness.plan.resources import all_reduce_sent_bytes
from methods.pipeline.checkpoint.folders import complete_steps, find_checkpoint
from methods.pipeline.config.auto_config import AutoConfig, ConfigRow
from methods.pipeline.config.partition import PipelineShape, gpt_stages, stage_bytes
from methods.pipeline.config.profile import GptCosts, Sum
from methods.pipeline.rank_map import RankMap
from methods.pipeline.schedule import SCHEDULES
from methods.shared.data_parallel import RANKS
from methods.shared.memory_needs import describe

if TYPE_CHECKING:
    from methods.pipeline.cut_model import CutModel
    from methods.pipeline.pipeline import Varuna

# The classes for users and their modules, but for AutoConfig, which this module imports.
CLASSES = {
    "CutPoint": "methods.pipeline.cut",
    "Varuna": "methods.pipeline.pipeline",
    "Profiler": "methods.pipeline.config.profiler",
}

# The folder of `python -m methods.varuna.run`, the original's command: a method is a file, so it cannot hold run.py.
__path__ = [str(Path(__file__).with_name("pipeline") / "launch")]


def __getattr__(name: str) -> object:
    """Return a class for users. Its module is imported only now, because it imports torch, and this module does not."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(CLASSES[name]), name)


@dataclass(frozen=True)
class VarunaMethod(Method):
    num_stages: int | None = None  # stages of a pipeline (more ranks make replicas); None: the plan chooses
    chunk_size: int | None = None  # samples of a micro-batch; None: the plan chooses
    schedule: str = "varuna"  # or 1f1b, gpipe
    world_size: int = with_option(1, RANKS)  # ranks
    peer_seconds: int = 1800  # most seconds to wait for another rank
    # folder to write checkpoints to while training goes on; None: no checkpoints
    checkpoint: str | None = None
    checkpoint_every: int = 10  # steps between two checkpoints
    # folder of checkpoints, of any stages and replicas, to resume from; None: begin anew
    resume: str | None = opt(
        None, "--resume", "Continue from the newest checkpoint in this folder.", metavar="FOLDER"
    )

    label = "Varuna"
    verbs = "methods.verbs.varuna"
    color = "#B8860B"
    paper = "Athlur et al. 2022, EuroSys, doi:10.1145/3492321.3519584"
    takes_config = True  # trains models that a config.json describes, too
    scales_loss = True

    def plan(self, workload: Workload, room: Room) -> Plan:
        """Plan a rank. If num_stages or chunk_size is None, choose the fastest configuration that fits, by the
        machine's rates; if no rates are known, choose the most stages and the smallest micro-batches. If no
        configuration fits, plan the one that needs the least memory."""
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule: expected {' or '.join(SCHEDULES)}, got {self.schedule!r}")
        for name in ("world_size", "num_stages", "chunk_size", "peer_seconds", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.resume and not self._begins_there():
            find_checkpoint(self.resume)
        config = self._config(workload, room, self._possible_stages(workload))
        return self._plan(workload, config.best() if config.fits else config.least())

    def _possible_stages(self, workload: Workload) -> list[int]:
        """Return the possible numbers of stages. Raises ValueError if there are none."""
        possible, reason = list[int](), ""
        for num_stages in [self.num_stages] if self.num_stages else _divisors(min(self.world_size, 10**6)):
            try:
                self._check(workload, num_stages)
                possible.append(num_stages)
            except ValueError as error:
                reason = str(error)
        if not possible:
            raise ValueError(reason)
        return possible

    def _config(self, workload: Workload, room: Room, possible: list[int]) -> AutoConfig:
        """Return all configurations of these numbers of stages, with costs by the machine's rates."""
        sizes = [self.chunk_size] if self.chunk_size else self._possible_sizes(workload, possible)
        sizes = sizes[-1:] if workload.dropout else sizes
        rates = room.rates
        num_sharing = self.world_size if rates and rates.is_host else 1  # ranks that share the host's cores
        network = rates.exchange_bytes_per_second / num_sharing if rates else math.inf
        sums = [Sum(2, 1, all_reduce_sent_bytes(1, 2) / network)]
        costs = GptCosts(workload, rates, sizes, None, network, self.schedule, num_sharing, sums)
        capacity = room.host_bytes if room.device_bytes is None else room.device_bytes
        return AutoConfig(
            self.world_size,
            self.world_size,
            workload.batch_size,
            costs,
            None if capacity is None else max(1, capacity),
            num_stages=possible,
            schedule=self.schedule,
            takes_all=True,
        )

    def _possible_sizes(self, workload: Workload, possible: list[int]) -> list[int]:
        """Return the sizes of micro-batches that divide a replica's samples, for these numbers of stages."""
        sizes: set[int] = set()
        for samples in {workload.batch_size * num_stages // self.world_size for num_stages in possible}:
            sizes |= {*_divisors(samples)}
        return sorted(sizes)

    def twin_options(self, num_layers: int, twin_layers: int) -> dict[str, Any]:
        most = min(self.num_stages or twin_layers, twin_layers)
        num_stages = max(count for count in _divisors(self.world_size) if count <= most)
        return dataclasses.asdict(
            dataclasses.replace(self, num_stages=num_stages, checkpoint=None, resume=None)
        )

    def describe(self, workload: Workload, device: str) -> dict[str, str]:
        row = describe(workload, "this project", "torch AdamW, fused, device")
        if self.schedule != "varuna":
            return row | {"implementation": "torch.distributed.pipelining"}
        return row | {"recompute": "every stage but the last, from its input"}

    def train(self, workload: Workload, batches, device: str) -> Training:
        from harness.models.gpt import adamw
        from methods.pipeline.checkpoint.checkpoints import GptProgress
        from methods.shared.loss_scale import LossScale

        whole, model = self._model(workload, device)
        optimizer = adamw(model.parameters())
        model.set_optimizer(optimizer, LossScale(workload))
        # Only a checkpoint names the source, and to read all files takes as long as a small model's training.
        source = source_hash(Path(__file__)) if self.checkpoint else ""
        steps, notes = list[Step](), {}
        if self.resume and not self._begins_there():
            model.load_checkpoint(self.resume, form=GptProgress)
            steps = model.progress.steps_of(workload, self.resume)
            notes = {"resumed_steps": len(steps), "resumed_source": model.progress.source}
        num_resumed, size = len(steps), workload.batch_size // model.rank_map.num_replicas
        share = slice(model.replica * size, (model.replica + 1) * size)  # samples of this replica
        for step, (inputs, targets) in enumerate(batches, start=1):
            if step <= num_resumed:
                yield steps[step - 1]
                continue
            batch = {"inputs": inputs[share], "targets": targets[share]}
            _, is_skipped = model.step(batch, workload.clip_norm or None)
            for group in optimizer.param_groups:
                group["lr"] = workload.learning_rate_at(step)
            if not is_skipped:
                optimizer.step()
            model.zero_grad()
            steps.append(model.last_step)
            if self.checkpoint and step % self.checkpoint_every == 0:
                model.checkpoint(self.checkpoint, notes=GptProgress.notes(workload, steps, source))
            yield steps[-1]
        stages = [str(stage) for stage in gpt_stages(workload, model.rank_map.num_stages)]
        return Trained(whole.of_model(model.leave()), schedule={"stages": stages, **notes})

    def _model(self, workload: Workload, device: str) -> tuple[CutModel, Varuna]:
        """Return the whole model without memory, and this rank's stage of it."""
        from methods.pipeline.cut_model import CutModel
        from methods.pipeline.pipeline import Varuna

        assert self.num_stages and self.chunk_size
        stages = gpt_stages(workload, self.num_stages)
        whole = CutModel(workload, recomputes=self.schedule != "varuna" and self.num_stages > 1)
        model = Varuna(
            whole,
            str(RankMap.make(self.num_stages, self.world_size // self.num_stages)),
            whole.shapes,
            workload.batch_size,
            self.chunk_size,
            workload.dtype == "fp16",
            device=device,
            shared_weights=whole.shared,
            cuts=[stage.layers.stop - 1 for stage in stages[:-1]],
            bf16=workload.dtype == "bf16",
            schedule=self.schedule,
            init_weights=whole.init_weights,
            limit_seconds=float(self.peer_seconds),
        )
        return whole, model

    def _begins_there(self) -> bool:
        """True if the job resumes from the folder to which it also writes, and this folder has no complete checkpoint
        yet."""
        if self.checkpoint is None or self.resume is None:
            return False
        folder = Path(self.resume).resolve()
        return folder == Path(self.checkpoint).resolve() and not complete_steps(folder)

    def _check(self, workload: Workload, num_stages: int) -> None:
        """Raise ValueError if the model cannot be cut into this many stages, or a replica's samples into micro-batches
        of chunk_size."""
        if num_stages > workload.num_layers:
            raise ValueError(
                f"num_stages: expected 1 to {workload.num_layers}, the number of layers, got {num_stages}"
            )
        samples = _samples(workload, num_stages, self.world_size)
        chunk_size = self.chunk_size or (samples if workload.dropout else 1)
        if samples % chunk_size:
            raise ValueError(
                f"chunk_size: expected a divisor of the {counted(samples, 'sample')} of a replica, got {chunk_size};"
                f" try {' or '.join(map(str, _nearest(_divisors(samples), chunk_size)))}"
            )
        if self.schedule == "1f1b" and samples // chunk_size < num_stages:
            raise ValueError(
                f"schedule=1f1b: expected at least {num_stages} micro-batches, the number of stages, got"
                f" {samples // chunk_size}; try a smaller chunk_size, or schedule=varuna"
            )
        if workload.dropout and (self.world_size > 1 or samples > chunk_size):
            raise ValueError(
                "--dropout: expected 0 with several ranks or micro-batches: they would drop other elements"
            )

    def _plan(self, workload: Workload, row: ConfigRow) -> Plan:
        """Plan the memory of the rank that needs most memory in this configuration."""
        stages = gpt_stages(workload, row.num_stages)
        shape = PipelineShape(len(stages), row.num_replicas, row.chunk_size, self.schedule)
        needs = [stage_bytes(workload, stage, number, shape) for number, stage in enumerate(stages)]
        # Make folders absolute, because a rank in a container has another working folder than this process.
        names = [name for name in ("checkpoint", "resume") if getattr(self, name)]
        folders: dict[str, Any] = {name: str(Path(getattr(self, name)).resolve()) for name in names}
        chosen = dataclasses.replace(self, num_stages=row.num_stages, chunk_size=row.chunk_size, **folders)
        seconds = None if math.isnan(row.step_seconds) else row.step_seconds
        return Plan(
            max(needs, key=lambda need: sum(need.values())),
            options=dataclasses.asdict(chosen),
            step_seconds=seconds,
            binds=f"the pipeline's {row.binds}" if seconds else "",
            stages={
                f"stage {number}, {stage}": sum(need.values())
                for number, (stage, need) in enumerate(zip(stages, needs, strict=True))
            },
        )


def _samples(workload: Workload, num_stages: int, world_size: int) -> int:
    """Return the number of samples of a replica. Raises ValueError if num_stages does not divide the ranks, or if the
    replicas do not divide the batch."""
    if world_size % num_stages:
        raise ValueError(
            f"num_stages: expected a divisor of the {counted(world_size, 'rank')}, got {num_stages}; try"
            f" {' or '.join(map(str, _nearest(_divisors(world_size), num_stages)))}, or --ranks {num_stages}"
        )
    num_replicas = world_size // num_stages
    if workload.batch_size % num_replicas:
        below = workload.batch_size // num_replicas * num_replicas
        nearest = " or ".join(str(size) for size in (below, below + num_replicas) if size)
        raise ValueError(
            f"a batch of {workload.batch_size} does not divide by {num_replicas} replicas; try -b {nearest}"
        )
    return workload.batch_size // num_replicas


def _divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def _nearest(allowed: list[int], number: int) -> list[int]:
    """Return the allowed numbers that are nearest to `number`, below and above."""
    below = [count for count in allowed if count < number] or allowed[:1]
    above = [count for count in allowed if count > number]
    return below[-1:] + above[:1]
