"""One model on two devices: halves of each batch are two chains of units, which join before the updates.

The host sums their gradients, the first half's first: to the bits of training on two micro-batches whose losses are
halved, if the criterion is a mean over the batch. The second half has random numbers of its own. A batch of odd size is
one chain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from methods.offload.clip import norms_of
from methods.sharding.task import Coroutine, Task, passes, updates


class First(Task):
    """The model, with the first half of its batches."""

    def __init__(self, *args: Any, second_random: object, **words: Any) -> None:
        super().__init__(*args, **words)
        self.can_split = False
        self.second = Second(self, second_random)
        self.coroutine, self.is_parked = first_half(self), False

    def wakes(self) -> bool:
        if not (self.is_parked and self.second.is_done):
            return False
        self.is_parked = False
        item: Any = self.coroutine.send(None)
        self.next_unit, self.position = item, len(self.script) - len(self.shards)
        return True

    def fail(self, text: str) -> None:
        super().fail(text)
        if not self.second.failure:
            self.second.fail(text)


class Second(Task):
    """The second half of its batches: no updates, and no steps."""

    def __init__(self, first: First, random_state: object) -> None:
        super().__init__(
            first.model, first.shards, [], (), None, update="later", random_state=random_state,
            keeps_graphs=first.keeps_graphs,
        )  # fmt: skip
        self.first, self.can_split = first, False
        self.updates, self.script = first.updates, self.script[: -len(self.shards)]
        self.loss: Tensor | None = None
        self.is_done = self.is_new = False
        self.coroutine = second_half(self)
        next(self.coroutine)

    @property
    def remaining(self) -> float:
        self.batches_left = self.first.batches_left
        return super().remaining

    @property
    def rounds(self) -> int:
        return self.first.rounds

    def start(self) -> None:
        self.is_new = False

    def begin(self, inputs: Any, targets: Any) -> None:
        self.is_new, self.is_done, self.position = True, False, 0
        item: Any = self.coroutine.send((inputs, targets))  # type: ignore[arg-type]
        self.next_unit = item

    def wakes(self) -> bool:
        was_new, self.is_new = self.is_new, False
        return was_new

    def fail(self, text: str) -> None:
        super().fail(text)
        if not self.first.failure:
            self.first.fail(text)


def first_half(task: First) -> Coroutine:
    for inputs, targets in task.batches:
        task.num_steps += 1
        if len(inputs) % 2:
            loss, norms = yield from passes(task, inputs, targets)
        else:
            (inputs, others), (targets, their_targets) = inputs.chunk(2), targets.chunk(2)
            task.second.begin(others, their_targets)
            loss, _ = yield from passes(task, inputs, targets, part=0)
            if not task.second.is_done:
                task.is_parked = True
                yield None
            assert task.second.loss is not None
            loss, norms = loss + task.second.loss, join(task)
        yield from updates(task, loss, norms)


def second_half(task: Second) -> Coroutine:
    while True:
        batch: Any = yield None
        inputs, targets = batch
        task.loss, _ = yield from passes(task, inputs, targets, part=1)
        task.is_done = True


def join(task: Task) -> dict[str, Tensor]:
    """Sum both gradients at home; their norms."""
    norms: dict[str, Tensor] = {}
    for shard in task.shards:
        if shard.trained:
            grads = [shard.at_home(name, "grads") for name in shard.trained]
            torch._foreach_add_(grads, [shard.at_home(name, "seconds") for name in shard.trained])
            norms |= zip(shard.trained, norms_of(grads), strict=True)
    return norms
