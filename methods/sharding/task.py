"""A model in training is a chain of units; each unit takes the result of the unit before it.

For K shards the units of a minibatch are F_1 .. F_K-1, FB_K, B_K-1 .. B_1: forward units F, backward units B, and one
unit FB for the last shard's forward pass, the loss and the last shard's backward pass. With clipping by the global norm
the updates are units of their own, after B_1. Without such clipping a shard's update is part of its unit B or FB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.core.method import Step
from methods.offload.clip import clip_factor, global_norm
from methods.sharding.shard import Shard, Version, split
from methods.sharding.unit import BACKWARD, FORWARD, LOSS, UPDATE, Kept, Result, Tensors, Unit

# The guessed time of each kind of unit, relative to a forward pass, until a unit of this kind is measured. The backward
# pass includes a recompute.
GUESSED_TIMES = {FORWARD: 1.0, LOSS: 4.0, BACKWARD: 3.0, UPDATE: 1.0}
# guessed seconds of a forward pass per byte of weights; only ratios between guesses matter
GUESSED_SECONDS = 1e-10


@dataclass(frozen=True)
class TaskSettings:
    """How a model is trained: what is the same for all its minibatches."""

    max_norm: float = 0.0  # largest norm of the gradient; 0.0: no clipping
    update: str = "later"  # when shards are updated: later, now or clipped, as class Unit says
    learning_rate_at: Callable[[int], float] | None = (
        None  # rate of step n, from 1; None: the optimizer's rate
    )
    random_state: object = None  # state of torch's random numbers at the start
    keeps_graphs: bool = False  # True: a forward unit keeps autograd's graph for its backward unit
    per_round: int = 1  # number of minibatches in a round
    micro_batches: int = 1  # number of equal parts of a minibatch; the loss is the mean of their losses
    num_batches: int | None = None  # number of minibatches; None: not known
    rehearses: bool = False  # True: nothing is copied to the host


class Task:
    """A model, its data, and the progress of its training. `batches`: pairs of inputs and targets."""

    def __init__(
        self,
        model: int,
        shards: list[Shard],
        names: Sequence[str],
        batches: Iterable,
        *,
        settings: TaskSettings,
    ) -> None:
        self.model, self.shards, self.names, self.batches = model, shards, names, iter(batches)
        self.settings, self.random = settings, settings.random_state
        self.keeps_graphs = settings.keeps_graphs and len(shards) > 1
        self.batches_left: float = math.inf if settings.num_batches is None else settings.num_batches
        self.num_done = 0  # number of minibatches finished so far
        self.updates = [0] * len(shards)
        self.script, self.position = self._script(), 0
        self.seconds = {
            (kind, shard_index): GUESSED_SECONDS
            * GUESSED_TIMES[kind]
            * max(1, shards[shard_index].num_bytes("weights"))
            for kind, shard_index in self.script
        }
        self.next_unit: Unit | None = None
        # the device that keeps this task's graphs and must run its next unit; None: any device
        self.device: Any = None
        self.failure = ""  # the traceback of the unit that ended the task; "": no failure
        self.lacks_memory = False  # True: the task failed because the device ran out of memory
        self.can_split = not self.keeps_graphs
        # the task that trains the other half of each batch; None: this task has whole batches
        self.twin: Any = None
        self.loss: Any = None  # loss of the last minibatch
        self.norms: dict[str, Tensor] = {}  # gradient norms of the last minibatch, by parameter name
        self.norm: Tensor | None = None  # norm of all gradients of the last minibatch; None: not yet known
        self.factor: Tensor | None = None  # clip factor of the last minibatch; None: not clipped

    @property
    def remaining(self) -> float:
        """Return the seconds that all units still to be run will take, by the last measured times. If the number of
        batches is unknown, count only this round's units."""
        minibatch_seconds = sum(self.seconds[kind] for kind in self.script)
        batches_of_round = self.settings.per_round - self.num_done % self.settings.per_round
        batches_left = batches_of_round if math.isinf(self.batches_left) else self.batches_left
        return (
            sum(self.seconds[kind] for kind in self.script[self.position :])
            + (batches_left - 1) * minibatch_seconds
        )

    @property
    def rounds(self) -> int:
        return self.num_done // self.settings.per_round

    def _script(self) -> list[tuple[str, int]]:
        """Return the units of a minibatch, in order, as pairs of a unit's kind and the index of its shard."""
        last_shard = len(self.shards) - 1
        passes = (
            [(FORWARD, shard_index) for shard_index in range(last_shard)]
            + [(LOSS, last_shard)]
            + [(BACKWARD, shard_index) for shard_index in reversed(range(last_shard))]
        )
        return passes + [
            (UPDATE, shard_index) for shard_index in range(last_shard + 1) if self.settings.update == "later"
        ]

    def split(self, index: int) -> None:
        """Halve shard `index` while no unit of this task runs. If the next unit is a unit of this shard, replace it by
        a unit of the half that the pass reaches first."""
        kind, shard = self.script[self.position]
        size = max(1, self.shards[index].num_bytes("weights"))
        split(self.shards, index)
        old_seconds, self.seconds, self.script = self.seconds, {}, self._script()
        for unit_kind, shard_index in self.script:
            old_index = shard_index - (shard_index > index)
            share = self.shards[shard_index].num_bytes("weights") / size if old_index == index else 1.0
            old_key = (unit_kind, old_index) if (unit_kind, old_index) in old_seconds else (LOSS, old_index)
            self.seconds[unit_kind, shard_index] = max(old_seconds[old_key] * share, GUESSED_SECONDS)
        self.updates.insert(index, self.updates[index])
        if self.next_unit is not None:
            shard += index < shard or (index == shard and kind == BACKWARD)
            kind = FORWARD if kind == LOSS and shard < len(self.shards) - 1 else kind
            self.position = self.script.index((kind, shard))
            self.next_unit = self._unit()

    def hint(self, ahead: int = 0) -> Unit | None:
        """Return the unit `ahead` places after the next unit (0: the next unit), without its tensors, which a prefetch
        does not need. Return None if that unit would begin a minibatch that may not come.
        """
        position = self.position + ahead
        if position == len(self.script) and self.batches_left <= 1:
            return None
        kind, shard = self.script[position % len(self.script)]
        return Unit(self.model, shard, kind, self.version(shard), update=self.settings.update)

    def start(self) -> None:
        """Begin the next minibatch, if there is one."""
        batch = next(self.batches, None)
        if batch is not None:
            self.begin(*batch)

    def begin(self, inputs: Any, targets: Any, part: int | None = None) -> None:
        """Begin a minibatch with these inputs and targets. `part`: which half of a batch these samples are, 0 or 1;
        None: the whole batch."""
        self.part, self.targets = part, self._micro_batches(targets)
        # What the last unit passed to the next unit, for each micro-batch: first the batch's inputs, then outputs, then
        # gradients of inputs.
        self.boundaries: Sequence[Tensors] = [(kind,) for kind in self._micro_batches(inputs)]
        # for each layer that is still to be differentiated: a Kept of each micro-batch
        self.kept: list[Sequence[Kept]] = []
        self.next_unit = self._unit()

    def _micro_batches(self, values: Any) -> Sequence[Any]:
        return values.chunk(self.settings.micro_batches) if self.settings.micro_batches > 1 else (values,)

    def _unit(self) -> Unit:
        kind, index = self.script[self.position]
        unit_inputs: dict[str, Any] = {"x": self.boundaries, "targets": self.targets if kind == LOSS else ()}
        if kind == BACKWARD:
            unit_inputs = {"dy": self.boundaries, "kept": self.kept[-len(self.shards[index].layers) :]}
        elif kind == UPDATE:
            unit_inputs = {"factor": self.factor}
        learning_rate = (
            self.settings.learning_rate_at(self.num_done + 1) if self.settings.learning_rate_at else None
        )
        return Unit(
            self.model,
            index,
            kind,
            self.version(index),
            random=self.random,
            learning_rate=learning_rate,
            update=self.settings.update,
            rehearses=self.settings.rehearses,
            part=self.part,
            **unit_inputs,
        )

    def advance(self, result: Result, seconds: float) -> Step | None:
        """Take the result of the unit that has run, and its seconds; make the next unit and return None. After the
        minibatch's last unit return the step instead. The next minibatch begins with start()."""
        kind, index = self.script[self.position]
        shard, self.seconds[kind, index] = self.shards[index], seconds
        self.position += 1
        if kind in (FORWARD, LOSS):
            self.random = result.random
        if kind == FORWARD:
            self.kept += result.kept or []
        elif kind == LOSS:
            self.loss, self.norms = result.loss, dict(zip(shard.trained, result.norms or [], strict=False))
        elif kind == BACKWARD:
            self.norms |= zip(shard.trained, result.norms or [], strict=False)
            del self.kept[-len(shard.layers) :]
        if kind == UPDATE or (self.settings.update != "later" and kind != FORWARD):
            self.updates[index] += 1
        if kind == UPDATE:
            return self._next()
        self.boundaries = result.y
        return self._join() if (kind, index) in ((LOSS, 0), (BACKWARD, 0)) else self._next()

    def _join(self) -> Step | None:
        """Compute the global gradient norm, summed in the model's order, and the clip factor for the updates. Called
        after the minibatch's last backward unit. Return what advance() returns.
        """
        self.norm = global_norm([self.norms[name] for name in self.names if name in self.norms])
        self.factor = clip_factor(self.norm, self.settings.max_norm) if self.settings.max_norm else None
        return self._next()

    def _next(self) -> Step | None:
        if self.position < len(self.script):
            self.next_unit = self._unit()
            return None
        self.next_unit = self.device = None
        self.position, self.batches_left, self.num_done = 0, self.batches_left - 1, self.num_done + 1
        return Step(self.loss, self.norm)

    def fail(self, text: str) -> None:
        """End this task's training, and the training of its twin. The model's weights keep the values of the last
        update. `text`: the traceback of the failure."""
        self.failure, self.next_unit, self.boundaries, self.kept = text, None, (), []
        if self.twin and not self.twin.failure:
            self.twin.fail(text)

    def version(self, index: int) -> Version:
        lenders = set(self.shards[index].lenders.values())
        borrowed = sum(self.updates[other] for other, shard in enumerate(self.shards) if shard in lenders)
        return Version(self.updates[index], borrowed)
