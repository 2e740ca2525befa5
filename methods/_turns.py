"""A model in training is a coroutine that names its next unit and is told what became of it.

Of a minibatch the units are F_1 .. F_K-1, FB_K, B_K-1 .. B_1: the last shard's forward pass, the loss and its backward
pass are one. Where gradients are clipped by their global norm the updates are units of their own, after B_1; else each
is done with its backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.method import Step
from methods._shards import Shard, Version
from methods._travel import clip_factor
from methods._units import BACKWARD, FORWARD, LOSS, UPDATE, Result, Unit

# What a unit takes before it was ever measured, relative to a forward pass: the backward pass recomputes.
GUESSES = {FORWARD: 1.0, LOSS: 4.0, BACKWARD: 3.0, UPDATE: 1.0}
GUESSED_SECONDS = 1e-10  # for each byte of weights; only ratios matter, and only until a unit was measured


class Task:
    """A model, its data, and how far its training is."""

    def __init__(
        self, model: int, shards: Sequence[Shard], names: Sequence[str], batches: Iterable, num_batches: int | None, *,
        max_norm: float = 0.0, update: str = "later", learning_rate_at: Callable[[int], float] | None = None,
        random_state: object = None, keeps_graphs: bool = False, per_round: int = 1,
    ) -> None:  # fmt: skip
        self.model, self.shards, self.names, self.batches = model, shards, names, batches
        self.max_norm, self.update, self.learning_rate_at = max_norm, update, learning_rate_at
        self.random, self.keeps_graphs, self.num_steps = random_state, keeps_graphs and len(shards) > 1, 0
        self.batches_left: float = math.inf if num_batches is None else num_batches
        self.per_round, self.num_done = per_round, 0  # minibatches of a round of all models, and how many are done
        self.updates = [0] * len(shards)
        last = len(shards) - 1
        turn = [(FORWARD, i) for i in range(last)] + [(LOSS, last)] + [(BACKWARD, i) for i in reversed(range(last))]
        self.script = turn + [(UPDATE, i) for i in range(last + 1) if update == "later"]
        self.position = 0
        self.seconds = {
            (kind, i): GUESSED_SECONDS * GUESSES[kind] * max(1, shards[i].num_bytes("weights"))
            for kind, i in self.script
        }
        self.coroutine = training(self)
        self.next_unit: Unit | None = None
        self.device: Any = None  # the only one that can go on, where graphs are kept there
        self.failure = ""  # the traceback of the unit that ended it

    @property
    def remaining(self) -> float:
        """Seconds of all its units that have not started, by what they took last; of those of this round, where nobody
        knows how many rounds there are."""
        whole = sum(self.seconds[each] for each in self.script)
        batches = self.per_round - self.num_done % self.per_round
        batches_left = batches if math.isinf(self.batches_left) else self.batches_left
        return sum(self.seconds[each] for each in self.script[self.position :]) + (batches_left - 1) * whole

    @property
    def rounds(self) -> int:
        return self.num_done // self.per_round

    def unit(self, kind: str, shard: int, **given: object) -> Unit:
        rate = self.learning_rate_at(self.num_steps) if self.learning_rate_at else None
        values = {"random": self.random, "learning_rate": rate, "update": self.update, **given}
        return Unit(self.model, shard, kind, self.version(shard), **values)  # type: ignore[arg-type]

    def hint(self) -> Unit | None:
        """The next unit without its tensors: enough to fetch its shard."""
        unit = self.next_unit
        return unit and Unit(unit.model, unit.shard, unit.kind, unit.version, update=unit.update)

    def following(self) -> Unit | None:
        """The unit after the next, as far as it is known now."""
        place = self.position + 1
        if place == len(self.script) and self.batches_left <= 1:
            return None
        kind, shard = self.script[place % len(self.script)]
        return Unit(self.model, shard, kind, self.version(shard), update=self.update)

    def start(self) -> None:
        """Name the first unit, or, after a step, that of the next minibatch; none where there is no more data."""
        item = next(self.coroutine, None)
        assert not isinstance(item, Step)
        self.next_unit = item

    def advance(self, result: Result, seconds: float) -> Step | None:
        """Take in what the unit left. The step, where it was the last of a minibatch: start() then goes on."""
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
        if isinstance(item, Step):
            return item
        self.next_unit = item
        return None

    def fail(self, text: str) -> None:
        """End this model's training; its weights stay as its last update left them."""
        self.failure, self.next_unit = text, None
        self.coroutine.close()

    def version(self, index: int) -> Version:
        lenders = set(self.shards[index].lenders.values())
        borrowed = sum(self.updates[other] for other, shard in enumerate(self.shards) if shard in lenders)
        return Version(self.updates[index], borrowed)

    def norm(self, norms: dict[int, list[Tensor]]) -> Tensor:
        """The global gradient norm, of each parameter's in the model's order."""
        found = {
            name: norm
            for index, shard in enumerate(self.shards)
            for name, norm in zip(shard.trained, norms[index], strict=True)
        }
        ordered = [found[name] for name in self.names if name in found]
        return torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.zeros(())


def training(task: Task) -> Generator[Unit | Step, Result, None]:
    """The minibatches of a model, unit by unit."""
    last = len(task.shards) - 1
    for inputs, targets in task.batches:
        task.num_steps += 1
        x, kept = (inputs,), []
        for shard in range(last):
            done = yield task.unit(FORWARD, shard, x=x)
            x = done.y
            kept.append(done.kept)

        done = yield task.unit(LOSS, last, x=x, targets=targets)
        loss, norms = done.loss, {last: done.norms or []}
        for shard in reversed(range(last)):
            done = yield task.unit(BACKWARD, shard, dy=done.y, kept=kept.pop())
            norms[shard] = done.norms or []

        total = task.norm(norms)
        factor = clip_factor(total, task.max_norm) if task.max_norm else None
        if task.update == "later":
            for shard in range(last + 1):
                yield task.unit(UPDATE, shard, factor=factor)
        assert loss is not None
        yield Step(loss, total)
