"""Finds the settings with which a method trains most tokens per second in given memories (a Room): the batch, and the
number of micro-batches. It compares plans; nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from harness.core.job import Plan, Room, Workload
from harness.plan.resources import Forecast, compute_seconds

MOST_TOKENS = 2**18  # most tokens of a step if the batch may be chosen
NEAR = 0.97  # of the batches with at least this share of the highest speed, the smallest is chosen
LEAST_SPEEDUP = (
    1.02  # the number of micro-batches is doubled if the step then runs more than LEAST_SPEEDUP times as fast
)
WITHOUT_RATES = (4, 2, 1)  # batches to try if no speed can be predicted


class Try(NamedTuple):
    """A plan for a workload. `step`: the predicted time of the plan's step; None if the machine's rates are not
    known."""

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
        """Return the share of the step's seconds that arithmetic on the device takes: 1 if arithmetic alone limits the
        speed, 0 if the rates are not known."""
        rates, num_ranks = self.room.rates, self.options.get("world_size", 1)
        return (
            sum(compute_seconds(self.workload, rates)) / num_ranks / self.step.seconds
            if self.step and rates
            else 0
        )


def best(
    attempt: Callable[[Workload], Try], workload: Workload, searched: frozenset[str], least: int = 1
) -> Try:
    """Return the best Try: of those nearly as fast as the fastest (NEAR), the one with the smallest batch. If no batch
    fits, return the Try with the smallest batch.

    `attempt`: function that plans a workload. `searched`: contains batch_size and micro_batches if these may be chosen.
    `least`: the first batch to try.
    """
    if "batch_size" not in searched:
        return _in_parts(attempt, workload, searched)
    current = _in_parts(attempt, replace(workload, batch_size=least), searched)
    if current.step is None:
        tries = [_in_parts(attempt, replace(workload, batch_size=size), searched) for size in WITHOUT_RATES]
        return next((attempted for attempted in tries if not attempted.lacks), tries[-1])
    fitting = _doubled(attempt, workload, current, searched)
    if fitting[-1].of_bound >= NEAR:  # this batch is the first at which arithmetic limits the speed
        return fitting[-1]
    most = max(map(_speed, fitting))
    return next(tried for tried in fitting if _speed(tried) >= NEAR * most)


def _doubled(
    attempt: Callable[[Workload], Try], workload: Workload, first: Try, searched: frozenset[str]
) -> list[Try]:
    """Return the first try, and those at its doubled batches that fit, each faster than the one before. The last try
    may have 1.5 times the batch of the one before."""
    fitting, current = [first], first
    while not current.lacks and current.of_bound < NEAR:
        size, parts = 2 * current.workload.batch_size, current.workload.micro_batches
        if size * workload.seq_len > MOST_TOKENS:
            break
        current = _in_parts(attempt, replace(workload, batch_size=size, micro_batches=parts), searched)
        # this batch does not fit, so try three quarters of it, which is 1.5 times the last batch that fit
        if current.lacks and size > 2:
            current = _in_parts(attempt, replace(workload, batch_size=3 * size // 4), searched)
            fitting += [] if current.lacks else [current]
            break
        if current.lacks or _speed(current) < _speed(fitting[-1]):
            break
        fitting.append(current)
    return fitting


def _speed(tried: Try) -> float:
    return tried.tokens_per_second or 0.0


def _in_parts(attempt: Callable[[Workload], Try], workload: Workload, searched: frozenset[str]) -> Try:
    """Return the Try with the best number of micro-batches. The number is doubled as long as each doubling lets the
    plan lack less memory or run faster."""
    current = attempt(workload)
    if "micro_batches" not in searched or workload.dropout:
        return current
    while current.lacks or current.of_bound < NEAR:
        parts = 2 * current.workload.micro_batches
        if workload.batch_size % parts:
            break
        finer = attempt(replace(workload, micro_batches=parts))
        if not _is_better(finer, current):
            break
        current = finer
    return current


def _is_better(finer: Try, current: Try) -> bool:
    """True if the try `finer` lacks less memory or, if both fit, is more than LEAST_SPEEDUP times as fast."""
    if finer.lacks or current.lacks:
        return _lacks(finer) < _lacks(current)
    return _speed(finer) > LEAST_SPEEDUP * _speed(current)


def _lacks(tried: Try) -> int:
    return sum(tried.lacks.values())
