"""The order of passes on each stage of a pipeline, by the rules of three schedules; standard library only.

A stage has three passes of a micro-batch: F forward, R recompute of the forward pass with what the backward pass needs,
B backward. Stages meet in the order of micro-batches: in each schedule every stage takes its forward passes in that
order, and so its backward passes.

- gpipe: all forward passes, then all backward passes.
- 1f1b: stage s of P begins with P - s forward passes; then backward and forward passes alternate.
- varuna: by rules on a clock of slots (F and R take one, B two). A free stage prefers B to R to F. R begins when the
  stage above has done half of its B, so that it ends when the gradient arrives. The last stage keeps what its forward
  pass made, and goes back at once.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2019 (1F1B); Athlur et al. 2022 (Varuna).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SCHEDULES = ("varuna", "1f1b", "gpipe")
SLOTS = {"F": 1, "R": 1, "B": 2}


class Pass(NamedTuple):
    """F, R or B of a micro-batch, counted from 0."""

    kind: str
    micro_batch: int


@functools.cache
def orders(schedule: str, num_stages: int, num_micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """Every stage's passes in order. Raises ValueError for a schedule that there is not."""
    if schedule == "varuna":
        return _by_rules(num_stages, num_micro_batches)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected {' or '.join(SCHEDULES)}, got {schedule!r}")
    forward = [Pass("F", number) for number in range(num_micro_batches)]
    found = []
    for stage in range(num_stages):
        ahead = num_micro_batches if schedule == "gpipe" else min(num_stages - stage, num_micro_batches)
        passes = forward[:ahead]
        for number in range(num_micro_batches):
            passes += [Pass("R", number), Pass("B", number), *forward[ahead + number : ahead + number + 1]]
        found.append(tuple(passes))
    return tuple(found)


def step_seconds(
    every_order: Sequence[Sequence[Pass]], seconds: Sequence[Mapping[str, float]], send_seconds: float = 0.0
) -> float:
    """Of all passes in these orders, where stage s takes seconds[s][kind] for a pass."""
    ends: dict[tuple[int, Pass], float] = {}
    free, place = [0.0] * len(every_order), [0] * len(every_order)
    last = len(every_order) - 1
    waiting = set(range(len(every_order)))
    while waiting:
        for stage in sorted(waiting):
            order = every_order[stage]
            while place[stage] < len(order):
                item = order[place[stage]]
                neighbor = {"F": stage - 1, "B": stage + 1}.get(item.kind, -1)
                arrives = 0.0
                if 0 <= neighbor <= last:
                    if (neighbor, item) not in ends:
                        break
                    arrives = ends[neighbor, item] + send_seconds
                free[stage] = max(free[stage], arrives) + seconds[stage][item.kind]
                ends[stage, item] = free[stage]
                place[stage] += 1
            else:
                waiting.discard(stage)
    return max(free)


def _by_rules(num_stages: int, num_micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """Varuna's order: every stage's choices, slot by slot."""
    last = num_stages - 1
    passes: list[list[Pass]] = [[] for _ in range(num_stages)]
    ends: list[dict[Pass, int]] = [{} for _ in range(num_stages)]  # slot in which each pass of a stage has ended
    free = [0] * num_stages  # slot from which a stage is free
    done = [{"F": 0, "R": 0, "B": 0} for _ in range(num_stages)]  # passes of each kind

    def is_ready(stage: int, kind: str, now: int) -> bool:
        number = done[stage][kind]
        if kind == "F":
            before = ends[stage - 1].get(Pass("F", number)) if stage else 0
            return number < num_micro_batches and before is not None and before <= now
        if kind == "B":
            is_kept = done[stage]["F" if stage == last else "R"] > number
            arrives = 0 if stage == last else ends[stage + 1].get(Pass("B", number))
            return is_kept and arrives is not None and arrives <= now
        above = None if stage == last else ends[stage + 1].get(Pass("B", number))
        return above is not None and above - SLOTS["B"] // 2 <= now and done[stage]["F"] > number

    now = 0
    while any(counts["B"] < num_micro_batches for counts in done):
        for stage in range(num_stages):
            if free[stage] > now:
                continue
            # Between R and its B a stage waits: only one micro-batch's intermediates are kept.
            holds = stage != last and done[stage]["R"] > done[stage]["B"]
            kinds = ("B",) if holds else ("B", "R", "F")
            for kind in kinds:
                if is_ready(stage, kind, now):
                    chosen = Pass(kind, done[stage][kind])
                    passes[stage].append(chosen)
                    done[stage][kind] += 1
                    free[stage] = now + SLOTS[kind]
                    ends[stage][chosen] = free[stage]
                    break
        now += 1
    return tuple(map(tuple, passes))
