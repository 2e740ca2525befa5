"""A model in training is a coroutine that yields its next unit and is sent the unit's result.

The units of a minibatch are F_1 .. F_K-1, FB_K, B_K-1 .. B_1: the last shard's forward pass, the loss and its backward
pass are one unit. With clipping by the global norm the updates are units of their own, after B_1; otherwise each is
part of its backward unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from torch import Tensor

from harness.core.method import Step
from methods.offload.clip import clip_factor, global_norm
from methods.sharding.shard import Shard, Version, split
from methods.sharding.unit import BACKWARD, FORWARD, LOSS, UPDATE, Result, Unit

Coroutine = Generator[Unit | Step | None, Result | None, None]
Passes = Generator[Unit | Step | None, Result | None, tuple[Tensor, dict[str, Tensor]]]

# Estimated times before any is measured, relative to a forward pass: the backward pass recomputes.
GUESSES = {FORWARD: 1.0, LOSS: 4.0, BACKWARD: 3.0, UPDATE: 1.0}
GUESSED_SECONDS = 1e-10  # for each byte of weights; only ratios matter, until a unit has been measured


class Task:
    """A model, its data, and the progress of its training."""

    def __init__(
        self, model: int, shards: list[Shard], names: Sequence[str], batches: Iterable, num_batches: int | None, *,
        max_norm: float = 0.0, update: str = "later", learning_rate_at: Callable[[int], float] | None = None,
        random_state: object = None, keeps_graphs: bool = False, per_round: int = 1, rehearses: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.shards, self.names, self.batches = model, shards, names, batches
        self.max_norm, self.update, self.learning_rate_at = max_norm, update, learning_rate_at
        self.random, self.keeps_graphs, self.num_steps = random_state, keeps_graphs and len(shards) > 1, 0
        self.batches_left: float = math.inf if num_batches is None else num_batches
        self.per_round, self.num_done = per_round, 0  # minibatches in a round of all models, and finished ones
        self.updates, self.rehearses = [0] * len(shards), rehearses
        self.script, self.position = self._script(), 0
        self.cursor = 0  # the shard of the next unit
        self.seconds = {
            (kind, i): GUESSED_SECONDS * GUESSES[kind] * max(1, shards[i].num_bytes("weights"))
            for kind, i in self.script
        }
        self.coroutine = training(self)
        self.next_unit: Unit | None = None
        self.device: Any = None  # the device that keeps this task's graphs, and must run its next unit
        self.failure = ""  # the traceback of the unit that ended it
        self.lacks_memory = False  # it failed because the device ran out of memory
        self.can_split = not self.keeps_graphs

    @property
    def remaining(self) -> float:
        """Seconds of all its units that have not started, as last measured; only of this round if the number of rounds
        is unknown."""
        whole = sum(self.seconds[each] for each in self.script)
        batches = self.per_round - self.num_done % self.per_round
        batches_left = batches if math.isinf(self.batches_left) else self.batches_left
        return sum(self.seconds[each] for each in self.script[self.position :]) + (batches_left - 1) * whole

    @property
    def rounds(self) -> int:
        return self.num_done // self.per_round

    def unit(self, kind: str, shard: int, **given: object) -> Unit:
        rate = self.learning_rate_at(self.num_steps) if self.learning_rate_at else None
        values = {"random": self.random, "learning_rate": rate, "update": self.update, "rehearses": self.rehearses}
        return Unit(self.model, shard, kind, self.version(shard), **{**values, **given})  # type: ignore[arg-type]

    def _script(self) -> list[tuple[str, int]]:
        """The units of a minibatch: kind and shard."""
        last = len(self.shards) - 1
        turn = [(FORWARD, i) for i in range(last)] + [(LOSS, last)] + [(BACKWARD, i) for i in reversed(range(last))]
        return turn + [(UPDATE, i) for i in range(last + 1) if self.update == "later"]

    def split(self, index: int) -> None:
        """Halve a shard between two units: the next unit is of the half that is still to be done."""
        size = max(1, self.shards[index].num_bytes("weights"))
        split(self.shards, index)
        before, self.seconds, self.script = self.seconds, {}, self._script()
        for kind, i in self.script:
            whole = i - (i > index)
            share = self.shards[i].num_bytes("weights") / size if whole == index else 1.0
            alike = (kind, whole) if (kind, whole) in before else (LOSS, whole)
            self.seconds[kind, i] = max(before[alike] * share, GUESSED_SECONDS)
        self.updates.insert(index, self.updates[index])
        unit = self.next_unit
        if unit is not None:
            self.cursor += index < self.cursor or (index == self.cursor and unit.kind == BACKWARD)
            item = self.coroutine.send(None)
            assert isinstance(item, Unit)
            self.next_unit, self.position = item, self.script.index((item.kind, item.shard))

    def hint(self) -> Unit | None:
        """The next unit without its tensors: enough to fetch its shard."""
        unit = self.next_unit
        return unit and Unit(unit.model, unit.shard, unit.kind, unit.version, update=unit.update)

    def following(self) -> Unit | None:
        """The unit after the next one; None if unknown."""
        place = self.position + 1
        if place == len(self.script) and self.batches_left <= 1:
            return None
        kind, shard = self.script[place % len(self.script)]
        return Unit(self.model, shard, kind, self.version(shard), update=self.update)

    def start(self) -> None:
        """Advance to the first unit of the next minibatch; none if the data has ended."""
        item = next(self.coroutine, None)
        assert not isinstance(item, Step)
        self.next_unit = item

    def advance(self, result: Result, seconds: float) -> Step | None:
        """Process the unit's result. Returns the step after the last unit of a minibatch; then call start()."""
        unit = self.next_unit
        assert unit is not None
        self.seconds[unit.kind, unit.shard] = seconds
        if unit.kind in (FORWARD, LOSS):
            self.random = result.random
        if unit.kind == UPDATE or (self.update != "later" and unit.kind != FORWARD):
            self.updates[unit.shard] += 1
        self.position += 1
        if self.position == len(self.script):
            self.position, self.batches_left, self.device = 0, self.batches_left - 1, None
            self.num_done += 1
        item = self.coroutine.send(result)
        self.next_unit = None if isinstance(item, Step) else item
        return item if isinstance(item, Step) else None

    def wakes(self) -> bool:
        """True if it has a unit again after waiting for another task."""
        return False

    def fail(self, text: str) -> None:
        """End this model's training; its weights stay as of its last update."""
        self.failure, self.next_unit = text, None
        self.coroutine.close()

    def version(self, index: int) -> Version:
        lenders = set(self.shards[index].lenders.values())
        borrowed = sum(self.updates[other] for other, shard in enumerate(self.shards) if shard in lenders)
        return Version(self.updates[index], borrowed)

    def norm(self, norms: dict[str, Tensor]) -> Tensor:
        """The global gradient norm, summed in the model's order."""
        return global_norm([norms[name] for name in self.names if name in norms])


def training(task: Task) -> Coroutine:
    """The minibatches of a model, unit by unit. Send each unit's result, or None if shards were halved before it could
    be done."""
    for inputs, targets in task.batches:
        task.num_steps += 1
        loss, norms = yield from passes(task, inputs, targets)
        yield from updates(task, loss, norms)


def passes(task: Task, inputs: Any, targets: Any, part: int | None = None) -> Passes:
    """Forward and backward pass of a batch, or of a part of it; returns the loss, and norms by parameter name."""
    task.cursor, x = 0, (inputs,)
    kept: list = []  # one for each layer that is still to be differentiated
    while True:
        kind = FORWARD if task.cursor < len(task.shards) - 1 else LOSS
        done = yield task.unit(kind, task.cursor, x=x, targets=targets if kind == LOSS else None, part=part)
        if done is None:
            continue
        if kind == LOSS:
            break
        task.cursor, x = task.cursor + 1, done.y
        kept += done.kept or []

    loss, norms = done.loss, dict(zip(task.shards[task.cursor].trained, done.norms or [], strict=False))
    assert loss is not None
    dy = done.y
    task.cursor -= 1
    while task.cursor >= 0:
        first = len(kept) - len(task.shards[task.cursor].layers)
        done = yield task.unit(BACKWARD, task.cursor, dy=dy, kept=kept[first:], part=part)
        if done is None:
            continue
        norms |= zip(task.shards[task.cursor].trained, done.norms or [], strict=False)
        task.cursor, dy = task.cursor - 1, done.y
        del kept[first:]
    return loss, norms


def updates(task: Task, loss: Tensor, norms: dict[str, Tensor]) -> Coroutine:
    """The updates that are units of their own, then the step."""
    total = task.norm(norms)
    factor = clip_factor(total, task.max_norm) if task.max_norm else None
    task.cursor = 0
    while task.update == "later" and task.cursor < len(task.shards):
        if (yield task.unit(UPDATE, task.cursor, factor=factor)) is not None:
            task.cursor += 1
    yield Step(loss, total)
