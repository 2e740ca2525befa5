"""Finds the batch and the number of micro-batches with which a method trains most tokens per second in given memories
(a Room). It compares plans; nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from harness.core.job import Plan, Room, Workload
from harness.forecast.resources import Forecast, compute_seconds

MOST_TOKENS = 2**18  # most tokens of a step, if the batch may be chosen
NEAR = 0.97  # the smallest batch with at least this share of the highest speed is taken
MORE = 1.02  # the number of micro-batches is doubled if that is more than this many times as fast
WITHOUT_RATES = (4, 2, 1)  # batches to try, if no speed can be predicted


class Try(NamedTuple):
    """A plan, and the predicted time of its step, which is None if the machine's rates are not known."""

    workload: Workload
    options: dict[str, Any]  # the options that the caller gave
    plan: Plan
    room: Room
    step: Forecast | None

    @property
    def lacks(self) -> dict[str, int]:
        return self.plan.lacks(self.room)

    @property
    def tokens_per_second(self) -> float | None:
        load = self.workload
        return load.batch_size * load.seq_len / self.step.seconds if self.step else None

    @property
    def of_bound(self) -> float:
        """Return the device's seconds of arithmetic divided by the step's seconds: 1 if arithmetic is the only limit, 0
        if unknown."""
        rates, num_ranks = self.room.rates, self.options.get("world_size", 1)
        return sum(compute_seconds(self.workload, rates)) / num_ranks / self.step.seconds if self.step and rates else 0


def best(attempt: Callable[[Workload], Try], workload: Workload, searched: frozenset[str], least: int = 1) -> Try:
    """Return the try with the smallest batch among those nearly as fast as the fastest (NEAR), or, if none fits, the
    try with the smallest batch of all.

    `attempt`: plans a workload. `searched`: has batch_size and micro_batches if these may be chosen. `least`: the batch
    to begin with.
    """
    if "batch_size" not in searched:
        return _in_parts(attempt, workload, searched)
    now = _in_parts(attempt, replace(workload, batch_size=least), searched)
    if now.step is None:
        tries = [_in_parts(attempt, replace(workload, batch_size=size), searched) for size in WITHOUT_RATES]
        return next((each for each in tries if not each.lacks), tries[-1])
    found = [now]
    while not now.lacks and now.of_bound < NEAR and 2 * now.workload.batch_size * workload.seq_len <= MOST_TOKENS:
        size, parts = 2 * now.workload.batch_size, now.workload.micro_batches
        now = _in_parts(attempt, replace(workload, batch_size=size, micro_batches=parts), searched)
        if now.lacks and size > 2:  # one and a half times the last batch may fit
            now = _in_parts(attempt, replace(workload, batch_size=3 * size // 4), searched)
            found += [] if now.lacks else [now]
            break
        if now.lacks or _speed(now) < _speed(found[-1]):
            break
        found.append(now)
    if found[-1].of_bound >= NEAR:  # this batch is the first that is limited by arithmetic
        return found[-1]
    most = max(map(_speed, found))
    return next(each for each in found if _speed(each) >= NEAR * most)


def _speed(found: Try) -> float:
    return found.tokens_per_second or 0.0


def _in_parts(attempt: Callable[[Workload], Try], workload: Workload, searched: frozenset[str]) -> Try:
    """Double the number of micro-batches as long as each doubling makes the plan lack less memory or run faster; return
    the last try that does."""
    now = attempt(workload)
    while (
        "micro_batches" in searched
        and (now.lacks or now.of_bound < NEAR)
        and not workload.dropout
        and workload.batch_size % (2 * now.workload.micro_batches) == 0
    ):
        more = attempt(replace(workload, micro_batches=2 * now.workload.micro_batches))
        is_better = _speed(more) > MORE * _speed(now) if not (more.lacks or now.lacks) else _lacks(more) < _lacks(now)
        if not is_better:
            break
        now = more
    return now


def _lacks(found: Try) -> int:
    return sum(found.lacks.values())
