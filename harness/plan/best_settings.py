"""Finds the settings with which a method trains most tokens per second in given memories (a Room): the batch, and the
number of micro-batches. It compares plans; nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from harness.core.job import Plan, Room, Workload
from harness.plan.resources import Forecast, compute_seconds

MOST_TOKENS = 2**18  # most tokens of a step if the batch may be chosen
# of the batches with at least this share of the highest speed, the smallest is chosen
NEAR_SPEED_SHARE = 0.97
# the number of micro-batches is doubled if the step then runs more than LEAST_SPEEDUP times as fast
LEAST_SPEEDUP = 1.02
BATCHES_WITHOUT_RATES = (4, 2, 1)  # batches to try if no speed can be predicted
Options = dict[str, Any]  # a method's options by name


class Try(NamedTuple):
    """A plan for a workload. `forecast`: the predicted time of the plan's step; None if the machine's rates are not
    known."""

    workload: Workload
    options: Options  # the options that the caller gave
    plan: Plan
    room: Room
    forecast: Forecast | None

    @property
    def lacking_bytes(self) -> dict[str, int]:
        return self.plan.lacks(self.room)

    @property
    def tokens_per_second(self) -> float | None:
        load = self.workload
        return load.batch_size * load.seq_len / self.forecast.seconds if self.forecast else None

    @property
    def compute_share(self) -> float:
        """Return the share of the step's seconds that arithmetic on the device takes: 1 if arithmetic alone limits the
        speed, 0 if the rates are not known."""
        rates, num_ranks = self.room.rates, self.options.get("world_size", 1)
        if not self.forecast or not rates:
            return 0
        return sum(compute_seconds(self.workload, rates)) / num_ranks / self.forecast.seconds


def best_try(
    attempt: Callable[[Workload], Try],
    workload: Workload,
    searched_fields: frozenset[str],
    least_batch: int = 1,
) -> Try:
    """Return the best Try: of those nearly as fast as the fastest (NEAR_SPEED_SHARE), the one with the smallest batch.
    If no batch fits, return the Try with the smallest batch.

    `attempt`: function that plans a workload. `searched_fields`: contains batch_size and micro_batches if these may be
    chosen. `least_batch`: the first batch to try.
    """
    if "batch_size" not in searched_fields:
        return _best_split(attempt, workload, searched_fields)
    current = _best_split(attempt, replace(workload, batch_size=least_batch), searched_fields)
    if current.forecast is None:
        loads = [replace(workload, batch_size=batch_size) for batch_size in BATCHES_WITHOUT_RATES]
        tries = [_best_split(attempt, load, searched_fields) for load in loads]
        return next((attempted for attempted in tries if not attempted.lacking_bytes), tries[-1])
    fitting = _double_batches(attempt, workload, current, searched_fields)
    # the last batch is the first at which arithmetic limits the speed
    if fitting[-1].compute_share >= NEAR_SPEED_SHARE:
        return fitting[-1]
    highest_speed = max(map(_speed, fitting))
    return next(fit for fit in fitting if _speed(fit) >= NEAR_SPEED_SHARE * highest_speed)


def _double_batches(
    attempt: Callable[[Workload], Try], workload: Workload, smallest_try: Try, searched_fields: frozenset[str]
) -> list[Try]:
    """Return the first try, and those at its doubled batches that fit, each faster than the one before. The last try
    may have 1.5 times the batch of the one before."""
    fitting, current = [smallest_try], smallest_try
    while not current.lacking_bytes and current.compute_share < NEAR_SPEED_SHARE:
        batch_size, micro_batches = 2 * current.workload.batch_size, current.workload.micro_batches
        if batch_size * workload.seq_len > MOST_TOKENS:
            break
        larger = replace(workload, batch_size=batch_size, micro_batches=micro_batches)
        current = _best_split(attempt, larger, searched_fields)
        # this batch does not fit, so try three quarters of it, which is 1.5 times the last batch that fit
        if current.lacking_bytes and batch_size > 2:
            current = _best_split(attempt, replace(workload, batch_size=3 * batch_size // 4), searched_fields)
            if not current.lacking_bytes:
                fitting.append(current)
            break
        if current.lacking_bytes or _speed(current) < _speed(fitting[-1]):
            break
        fitting.append(current)
    return fitting


def _speed(attempted: Try) -> float:
    return attempted.tokens_per_second or 0.0


def _best_split(
    attempt: Callable[[Workload], Try], workload: Workload, searched_fields: frozenset[str]
) -> Try:
    """Return the Try with the best number of micro-batches. The number is doubled as long as each doubling lets the
    plan lack less memory or run faster."""
    current = attempt(workload)
    if "micro_batches" not in searched_fields or workload.dropout:
        return current
    while current.lacking_bytes or current.compute_share < NEAR_SPEED_SHARE:
        micro_batches = 2 * current.workload.micro_batches
        if workload.batch_size % micro_batches:
            break
        finer = attempt(replace(workload, micro_batches=micro_batches))
        if not _is_better(finer, current):
            break
        current = finer
    return current


def _is_better(finer: Try, current: Try) -> bool:
    """True if the try `finer` lacks less memory or, if both fit, is more than LEAST_SPEEDUP times as fast."""
    if finer.lacking_bytes or current.lacking_bytes:
        return _total_lacking_bytes(finer) < _total_lacking_bytes(current)
    return _speed(finer) > LEAST_SPEEDUP * _speed(current)


def _total_lacking_bytes(attempted: Try) -> int:
    return sum(attempted.lacking_bytes.values())
