"""The batch and the micro-batches with which a method trains most tokens a second in a room, by plans alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from harness.core.job import Plan, Room, Workload
from harness.forecast.resources import Forecast, compute_seconds

MOST_TOKENS = 2**18  # a step's, of a batch that is searched
NEAR = 0.97  # of the most tokens a second that a batch reaches, the least batch that reaches this much is taken
MORE = 1.02  # micro-batches are halved for more than this
WITHOUT_RATES = (4, 2, 1)  # batches to try, where no speed is foretold


class Try(NamedTuple):
    """A plan, and what a step of it should take; None where the rates are not known."""

    workload: Workload
    options: dict[str, Any]  # those that were asked for
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
        """The share of what the device's arithmetic would allow if nothing else took time."""
        rates, num_ranks = self.room.rates, self.options.get("world_size", 1)
        return sum(compute_seconds(self.workload, rates)) / num_ranks / self.step.seconds if self.step and rates else 0


def best(attempt: Callable[[Workload], Try], workload: Workload, searched: frozenset[str], least: int = 1) -> Try:
    """Return the fastest try; of those within NEAR the one of the least batch. If none fits, that of the least batch.

    `attempt`: plans a workload. `searched`: of batch_size and micro_batches those that may change. `least`: batch to
    begin with.
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
        if now.lacks and size > 2:  # half again the last one may fit
            now = _in_parts(attempt, replace(workload, batch_size=3 * size // 4), searched)
            found += [] if now.lacks else [now]
            break
        if now.lacks or _speed(now) < _speed(found[-1]):
            break
        found.append(now)
    if found[-1].of_bound >= NEAR:  # and none before it
        return found[-1]
    most = max(map(_speed, found))
    return next(each for each in found if _speed(each) >= NEAR * most)


def _speed(found: Try) -> float:
    return found.tokens_per_second or 0.0


def _in_parts(attempt: Callable[[Workload], Try], workload: Workload, searched: frozenset[str]) -> Try:
    """Return the try of the fewest micro-batches of which twice as many gain nothing: they leave room for layers."""
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
