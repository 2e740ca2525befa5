"""A model in training is a chain of units; each unit takes the result of the unit before it.

For K shards the units of a minibatch are F_1 .. F_K-1, FB_K, B_K-1 .. B_1: forward units F, backward units B, and one
unit FB for the last shard's forward pass, the loss and the last shard's backward pass. With clipping by the global norm
the updates are units of their own, after B_1. Without such clipping a shard's update is part of its unit B or FB.

One model may train on two devices. Each half of a batch is then a chain of units, FirstHalf or SecondHalf; the two
chains join before the updates. The host adds the second half's gradients to the first half's. If the criterion is a
mean over the batch, the result has the bits of a training on two micro-batches whose losses are halved. The second half
has random numbers of its own. Each half has as many micro-batches as the whole batch would have. A batch whose halves
would not split into them evenly, or of other values than two tensors, is not halved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.core.method import Step
from methods.offload.clip import clip_factor, global_norm, norms_of
from methods.sharding.shard import Shard, Version, split_shard
from methods.sharding.unit import BACKWARD, FORWARD, LOSS, UPDATE, RecomputeInput, Result, Tensors, Unit

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
    # learning rate of a step, counted from 1; None: the optimizer's rate
    learning_rate_at: Callable[[int], float] | None = None
    random_state: object = None  # state of torch's random numbers at the start
    keeps_graphs: bool = False  # True: a forward unit keeps autograd's graph for its backward unit
    batches_per_round: int = 1  # number of minibatches in a round
    micro_batches: int = 1  # number of equal parts of a minibatch; the loss is the mean of their losses
    num_batches: int | None = None  # number of minibatches; None: not known
    rehearses: bool = False  # True: nothing is copied to the host


class Task:
    """A model, its data, and the progress of its training. `batches`: pairs of inputs and targets."""

    def __init__(
        self,
        model: int,
        shards: list[Shard],
        parameter_names: Sequence[str],
        batches: Iterable,
        *,
        settings: TaskSettings,
    ) -> None:
        self.model, self.shards, self.batches = model, shards, iter(batches)
        self.parameter_names = parameter_names
        self.settings, self.random_state = settings, settings.random_state
        self.keeps_graphs = settings.keeps_graphs and len(shards) > 1
        self.batches_left: float = math.inf if settings.num_batches is None else settings.num_batches
        self.num_finished = 0  # number of minibatches finished so far
        self.updates = [0] * len(shards)
        self.script, self.script_position = self._make_script(), 0
        self.unit_seconds = {
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
        self.other_half: Any = None
        self.loss: Any = None  # loss of the last minibatch
        self.norms: dict[str, Tensor] = {}  # gradient norms of the last minibatch, by parameter name
        self.norm: Tensor | None = None  # norm of all gradients of the last minibatch; None: not yet known
        self.factor: Tensor | None = None  # clip factor of the last minibatch; None: not clipped

    @property
    def remaining_seconds(self) -> float:
        """Return the seconds that all units still to be run will take, by the last measured times. If the number of
        batches is unknown, count only this round's units."""
        minibatch_seconds = sum(self.unit_seconds[unit] for unit in self.script)
        per_round = self.settings.batches_per_round
        batches_of_round = per_round - self.num_finished % per_round
        batches_left = batches_of_round if math.isinf(self.batches_left) else self.batches_left
        seconds_of_minibatch = sum(self.unit_seconds[unit] for unit in self.script[self.script_position :])
        return seconds_of_minibatch + (batches_left - 1) * minibatch_seconds

    @property
    def num_rounds(self) -> int:
        return self.num_finished // self.settings.batches_per_round

    def _make_script(self) -> list[tuple[str, int]]:
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
        kind, shard = self.script[self.script_position]
        size = max(1, self.shards[index].num_bytes("weights"))
        split_shard(self.shards, index)
        old_seconds, self.unit_seconds, self.script = self.unit_seconds, {}, self._make_script()
        for unit_kind, shard_index in self.script:
            old_index = shard_index - (shard_index > index)
            share = self.shards[shard_index].num_bytes("weights") / size if old_index == index else 1.0
            old_key = (unit_kind, old_index) if (unit_kind, old_index) in old_seconds else (LOSS, old_index)
            self.unit_seconds[unit_kind, shard_index] = max(old_seconds[old_key] * share, GUESSED_SECONDS)
        self.updates.insert(index, self.updates[index])
        if self.next_unit is not None:
            shard += index < shard or (index == shard and kind == BACKWARD)
            kind = FORWARD if kind == LOSS and shard < len(self.shards) - 1 else kind
            self.script_position = self.script.index((kind, shard))
            self.next_unit = self._unit()

    def hinted_unit(self, ahead: int = 0) -> Unit | None:
        """Return the unit `ahead` places after the next unit (0: the next unit), without its tensors, which a prefetch
        does not need. Return None if that unit would begin a minibatch that may not come.
        """
        position = self.script_position + ahead
        if position == len(self.script) and self.batches_left <= 1:
            return None
        kind, shard = self.script[position % len(self.script)]
        return Unit(self.model, shard, kind, self.version(shard), update=self.settings.update)

    def start(self) -> None:
        """Begin the next minibatch, if there is one."""
        batch = next(self.batches, None)
        if batch is not None:
            self.begin(*batch)

    def begin(self, inputs: Any, targets: Any, batch_half: int | None = None) -> None:
        """Begin a minibatch with these inputs and targets. `batch_half`: which half of a batch these samples are, 0 or
        1; None: the whole batch."""
        self.batch_half, self.targets = batch_half, self._micro_batches(targets)
        # What the last unit passed to the next unit, for each micro-batch: first the batch's inputs, then outputs, then
        # gradients of inputs.
        self.boundaries: Sequence[Tensors] = [(tensor,) for tensor in self._micro_batches(inputs)]
        # for each layer that is still to be differentiated: a RecomputeInput of each micro-batch
        self.recompute_inputs: list[Sequence[RecomputeInput]] = []
        self.next_unit = self._unit()

    def _micro_batches(self, values: Any) -> Sequence[Any]:
        return values.chunk(self.settings.micro_batches) if self.settings.micro_batches > 1 else (values,)

    def _unit(self) -> Unit:
        kind, index = self.script[self.script_position]
        unit_inputs: dict[str, Any] = {"x": self.boundaries, "targets": self.targets if kind == LOSS else ()}
        if kind == BACKWARD:
            unit_inputs = {
                "dy": self.boundaries,
                "recompute_inputs": self.recompute_inputs[-len(self.shards[index].layers) :],
            }
        elif kind == UPDATE:
            unit_inputs = {"factor": self.factor}
        learning_rate = None
        if self.settings.learning_rate_at:
            learning_rate = self.settings.learning_rate_at(self.num_finished + 1)
        return Unit(
            self.model,
            index,
            kind,
            self.version(index),
            random_state=self.random_state,
            learning_rate=learning_rate,
            update=self.settings.update,
            rehearses=self.settings.rehearses,
            batch_half=self.batch_half,
            **unit_inputs,
        )

    def advance(self, result: Result, seconds: float) -> Step | None:
        """Take the result of the unit that has run, and its seconds; make the next unit and return None. After the
        minibatch's last unit return the step instead. The next minibatch begins with start()."""
        kind, index = self.script[self.script_position]
        shard, self.unit_seconds[kind, index] = self.shards[index], seconds
        self.script_position += 1
        if kind in (FORWARD, LOSS):
            self.random_state = result.random_state
        if kind == FORWARD:
            self.recompute_inputs += result.recompute_inputs or []
        elif kind == LOSS:
            self.loss = result.loss
            self.norms = dict(zip(shard.trained_names, result.norms or [], strict=False))
        elif kind == BACKWARD:
            self.norms |= zip(shard.trained_names, result.norms or [], strict=False)
            del self.recompute_inputs[-len(shard.layers) :]
        if kind == UPDATE or (self.settings.update != "later" and kind != FORWARD):
            self.updates[index] += 1
        if kind == UPDATE:
            return self._end_unit()
        self.boundaries = result.y
        return self._end_passes() if (kind, index) in ((LOSS, 0), (BACKWARD, 0)) else self._end_unit()

    def _end_passes(self) -> Step | None:
        """Compute the global gradient norm, summed in the model's order, and the clip factor for the updates. Called
        after the minibatch's last backward unit. Return what advance() returns.
        """
        self.norm = global_norm([self.norms[name] for name in self.parameter_names if name in self.norms])
        self.factor = clip_factor(self.norm, self.settings.max_norm) if self.settings.max_norm else None
        return self._end_unit()

    def _end_unit(self) -> Step | None:
        if self.script_position < len(self.script):
            self.next_unit = self._unit()
            return None
        self.next_unit = self.device = None
        self.script_position = 0
        self.batches_left -= 1
        self.num_finished += 1
        return Step(self.loss, self.norm)

    def fail(self, text: str) -> None:
        """End this task's training, and the training of its twin. The model's weights keep the values of the last
        update. `text`: the traceback of the failure."""
        self.failure, self.next_unit, self.boundaries, self.recompute_inputs = text, None, (), []
        if self.other_half and not self.other_half.failure:
            self.other_half.fail(text)

    def version(self, index: int) -> Version:
        lenders = set(self.shards[index].lenders.values())
        borrowed = sum(
            self.updates[lender_index] for lender_index, shard in enumerate(self.shards) if shard in lenders
        )
        return Version(self.updates[index], borrowed)


class FirstHalf(Task):
    """The chain of the first half of each batch: it updates the model and yields the steps."""

    def __init__(self, *args: Any, settings: TaskSettings, second_random: object) -> None:
        super().__init__(*args, settings=dataclasses.replace(settings, update="later"))
        self.can_split, self.other_half = False, SecondHalf(self, second_random)

    def begin(self, inputs: Any, targets: Any, batch_half: int | None = None) -> None:
        is_split = isinstance(inputs, Tensor) and isinstance(targets, Tensor) and len(inputs) == len(targets)
        if is_split and len(inputs) % (2 * self.settings.micro_batches) == 0:
            inputs, second_inputs = inputs.chunk(2)
            targets, second_targets = targets.chunk(2)
            self.other_half.begin(second_inputs, second_targets, 1)
            batch_half = 0
        super().begin(inputs, targets, batch_half)

    def _end_passes(self) -> Step | None:
        """If the second half still runs, return None: the second half calls this method again at its end. If both
        halves have ended, sum the losses of both halves and, on the host, their gradients."""
        if self.other_half.next_unit is not None:
            self.next_unit = None
            return None
        if self.batch_half is not None:
            self.batch_half, self.loss = None, self.loss + self.other_half.loss
            for shard in self.shards:
                if not shard.trained_names:
                    continue
                grads = [shard.at_home(name, "grads") for name in shard.trained_names]
                torch._foreach_add_(grads, [shard.at_home(name, "seconds") for name in shard.trained_names])
                self.norms |= zip(shard.trained_names, norms_of(grads, in_blocks=True), strict=True)
        return super()._end_passes()


class SecondHalf(Task):
    """The chain of the second half of each batch: it has no updates, and yields no steps."""

    def __init__(self, first: FirstHalf, random_state: object) -> None:
        settings = TaskSettings(
            random_state=random_state,
            keeps_graphs=first.keeps_graphs,
            micro_batches=first.settings.micro_batches,
        )
        super().__init__(first.model, first.shards, [], (), settings=settings)
        self.can_split, self.other_half = False, first
        self.updates, self.script = first.updates, self.script[: -len(self.shards)]

    @property
    def remaining_seconds(self) -> float:
        self.batches_left = self.other_half.batches_left
        return super().remaining_seconds

    @property
    def num_rounds(self) -> int:
        return self.other_half.num_rounds

    def _end_passes(self) -> None:
        self._end_unit()
        if self.other_half.next_unit is None:  # the first half has ended, and waits for this half
            self.other_half._end_passes()
