"""Trains one model on two devices. Each half of a batch is a chain of units; the two chains join before the updates.

The host adds the second half's gradients to the first half's. If the criterion is a mean over the batch, the result has
the bits of a training on two micro-batches whose losses are halved. The second half has random numbers of its own. Each
half has as many micro-batches as the whole batch would have. A batch whose halves would not split into them evenly, or
of other values than two tensors, is not halved.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from harness.core.method import Step
from methods.offload.clip import norms_of
from methods.sharding.task import Task, TaskSettings


class First(Task):
    """The chain of the first half of each batch: it updates the model and yields the steps."""

    def __init__(self, *args: Any, settings: TaskSettings, second_random: object) -> None:
        super().__init__(*args, settings=dataclasses.replace(settings, update="later"))
        self.can_split, self.twin = False, Second(self, second_random)

    def begin(self, inputs: Any, targets: Any, part: int | None = None) -> None:
        is_split = isinstance(inputs, Tensor) and isinstance(targets, Tensor) and len(inputs) == len(targets)
        if is_split and len(inputs) % (2 * self.settings.micro_batches) == 0:
            (inputs, others), (targets, their_targets), part = inputs.chunk(2), targets.chunk(2), 0
            self.twin.begin(others, their_targets, 1)
        super().begin(inputs, targets, part)

    def _join(self) -> Step | None:
        """If the second half still runs, return None: the second half calls this method again at its end. If both
        halves have ended, sum the losses of both halves and, on the host, their gradients."""
        if self.twin.next_unit is not None:
            self.next_unit = None
            return None
        if self.part is not None:
            self.part, self.loss = None, self.loss + self.twin.loss
            for shard in (shard for shard in self.shards if shard.trained):
                grads = [shard.at_home(name, "grads") for name in shard.trained]
                torch._foreach_add_(grads, [shard.at_home(name, "seconds") for name in shard.trained])
                self.norms |= zip(shard.trained, norms_of(grads, in_blocks=True), strict=True)
        return super()._join()


class Second(Task):
    """The chain of the second half of each batch: it has no updates, and yields no steps."""

    def __init__(self, first: First, random_state: object) -> None:
        settings = TaskSettings(
            random_state=random_state,
            keeps_graphs=first.keeps_graphs,
            micro_batches=first.settings.micro_batches,
        )
        super().__init__(first.model, first.shards, [], (), settings=settings)
        self.can_split, self.twin = False, first
        self.updates, self.script = first.updates, self.script[: -len(self.shards)]

    @property
    def remaining(self) -> float:
        self.batches_left = self.twin.batches_left
        return super().remaining

    @property
    def rounds(self) -> int:
        return self.twin.rounds

    def _join(self) -> None:
        self._next()
        if self.twin.next_unit is None:  # the first half has ended, and waits for this half
            self.twin._join()
