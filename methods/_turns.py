"""Models take turns, shard by shard: a model in training is a coroutine that names its next unit, a rule picks whose
turn it is, and what will come next is already on its way.

Of a minibatch the units are F_1 .. F_K-1, FB_K, B_K-1 .. B_1: the last shard's forward pass, the loss and its backward
pass are one. Where gradients are clipped by their global norm the updates are units of their own, after B_1; else each
is done with its backward pass.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from harness.method import Step
from methods._scheduler import Waiting, key_of
from methods._shards import Shard, Version
from methods._travel import clip_factor
from methods._units import BACKWARD, FORWARD, LOSS, UPDATE, Result, Unit
from methods._worker import Worker

# What a unit takes before it was ever measured, relative to a forward pass: the backward pass recomputes.
GUESSES = {FORWARD: 1.0, LOSS: 4.0, BACKWARD: 3.0, UPDATE: 1.0}
GUESSED_SECONDS = 1e-10  # for each byte of weights; only ratios matter, and only until a unit was measured


class Task:
    """A model, its data, and how far its training is."""

    def __init__(
        self, model: int, shards: Sequence[Shard], names: Sequence[str], batches: Iterable, num_batches: int, *,
        max_norm: float = 0.0, update: str = "later", learning_rate_at: Callable[[int], float] | None = None,
        random_state: object = None,
    ) -> None:  # fmt: skip
        self.model, self.shards, self.names, self.batches = model, shards, names, batches
        self.max_norm, self.update, self.learning_rate_at = max_norm, update, learning_rate_at
        self.random, self.num_steps, self.batches_left = random_state, 0, num_batches
        self.updates = [0] * len(shards)
        last = len(shards) - 1
        turn = [(FORWARD, i) for i in range(last)] + [(LOSS, last)] + [(BACKWARD, i) for i in reversed(range(last))]
        self.script = turn + [(UPDATE, i) for i in range(last + 1) if update == "later"]
        self.position = 0
        self.seconds = {
            (kind, i): GUESSED_SECONDS * GUESSES[kind] * max(1, shards[i].num_bytes("weights"))
            for kind, i in self.script
        }
        self.busy_seconds = 0.0
        self.coroutine = training(self)
        self.next_unit: Unit | None = None

    @property
    def remaining(self) -> float:
        """Seconds of all its units that have not started, by what they took last."""
        whole = sum(self.seconds[each] for each in self.script)
        return sum(self.seconds[each] for each in self.script[self.position :]) + (self.batches_left - 1) * whole

    def unit(self, kind: str, shard: int, **given: object) -> Unit:
        rate = self.learning_rate_at(self.num_steps) if self.learning_rate_at else None
        values = {"random": self.random, "learning_rate": rate, "update": self.update, **given}
        return Unit(self.model, shard, kind, self.version(shard), **values)  # type: ignore[arg-type]

    def following(self) -> Unit | None:
        """The unit after the next, as far as it is known now: enough to fetch its shard."""
        place = self.position + 1
        if place == len(self.script) and self.batches_left <= 1:
            return None
        kind, shard = self.script[place % len(self.script)]
        return Unit(self.model, shard, kind, self.version(shard), update=self.update)

    def start(self) -> None:
        self._take(next(self.coroutine, None))

    def advance(self, result: Result, seconds: float) -> Step | None:
        """Take in what its unit left; the step, where that was the last unit of a minibatch. Then resume()."""
        unit = self.next_unit
        assert unit is not None
        self.seconds[unit.kind, unit.shard] = seconds
        self.busy_seconds += seconds
        if unit.kind in (FORWARD, LOSS):
            self.random = result.random
        if unit.kind == UPDATE or (self.update != "later" and unit.kind != FORWARD):
            self.updates[unit.shard] += 1
        self.position += 1
        if self.position == len(self.script):
            self.position, self.batches_left = 0, self.batches_left - 1
        item = self.coroutine.send(result)
        if isinstance(item, Step):
            return item
        self._take(item)
        return None

    def resume(self) -> None:
        """Go on after a step."""
        self.start()

    def _take(self, item: Unit | Step | None) -> None:
        assert not isinstance(item, Step)
        self.next_unit = item

    def version(self, index: int) -> Version:
        lenders = set(self.shards[index].lenders.values())
        borrowed = sum(self.updates[other] for other, shard in enumerate(self.shards) if shard in lenders)
        return Version(self.updates[index], borrowed)

    def norm(self, norms: dict[int, list[Tensor]]) -> Tensor:
        """The global gradient norm, of each parameter's in the model's order."""
        found = {
            name: norm
            for index, shard in enumerate(self.shards)
            for name, norm in zip(shard.own, norms[index], strict=True)
        }
        return torch.linalg.vector_norm(torch.stack([found[name] for name in self.names]))


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


def take_turns(
    worker: Worker, tasks: Sequence[Task], policy: str = "lrtf", seed: int = 0
) -> Iterator[tuple[Task, Step]]:
    """Run all tasks to their ends on one device, here; yields each step when its last unit is queued."""
    key, draw, arrivals = key_of(policy), random.Random(seed).random, count()
    waiting: dict[Task, tuple[int, float]] = {}

    def wait(task: Task) -> None:
        if task.next_unit is not None:
            waiting[task] = (next(arrivals), draw())

    def first() -> Task:
        return min(waiting, key=lambda task: (key(Waiting(task.remaining, *waiting[task])), waiting[task]))

    for task in tasks:
        task.start()
        wait(task)
    while waiting:
        task = first()
        unit = task.next_unit
        assert unit is not None
        del waiting[task]
        other = first() if waiting else None
        following = other.next_unit if other is not None else task.following()
        started = time.perf_counter()
        result = worker.run(unit, following)
        step = task.advance(result, time.perf_counter() - started)
        if step is not None:
            yield task, step
            task.resume()
        wait(task)
