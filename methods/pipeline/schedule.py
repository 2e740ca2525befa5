"""The order of passes on each stage of a pipeline, by the rules of three schedules. Does not import torch.

A stage has three passes for each micro-batch: the forward pass F; its recompute R, which keeps what the backward pass
needs; and the backward pass B. In each schedule every stage runs its forward passes in the order of micro-batches, and
its backward passes in the same order.

- gpipe: all forward passes, then all backward passes.
- 1f1b: stage s of P stages begins with P - s forward passes; then backward and forward passes alternate.
- varuna: by rules on a clock of slots; F and R take one slot, B takes two. A free stage prefers B to R, and R to F. R
  begins when the stage above has done half of its B, so that R ends when the gradient arrives. The last stage needs no
  R: it keeps all that its F computed, and runs B at once.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2019 (1F1B); Athlur et al. 2022 (Varuna).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from harness.simulation.event_core import KINDS, B, F, Line, R, run_lines

if TYPE_CHECKING:
    from harness.simulation.event_core import Array

SCHEDULES = ("varuna", "1f1b", "gpipe")
SLOTS = {"F": 1, "R": 1, "B": 2}


class Pass(NamedTuple):
    """One pass of a micro-batch. `kind`: F, R or B. `micro_batch`: its number, counted from 0."""

    kind: str
    micro_batch: int


# A pipeline: the seconds of F, R and B on each stage; the number of micro-batches; the seconds of a message, as one
# number for all cuts or one for each cut.
Pipeline = tuple[Sequence[Mapping[str, float]], int, float | Sequence[float]]


def event_lines(schedule: str, pipelines: Sequence[Pipeline], *, is_opportunistic: bool = True) -> list[Line]:
    """Return each pipeline as a Line, the form in which the event core simulates a pipeline. `is_opportunistic`: True:
    in `varuna`, a forward pass may run before a recompute whose gradient is late."""
    unit_arrays = units(
        schedule, [(len(seconds), num_micro_batches) for seconds, num_micro_batches, _ in pipelines]
    )
    # in torch's schedules R is part of the backward pass, so R waits for the gradient
    is_varuna = schedule == "varuna"
    return [
        Line(
            units_of_pipeline,
            seconds,
            num_micro_batches,
            [message_seconds] * (len(seconds) - 1)
            if isinstance(message_seconds, int | float)
            else message_seconds,
            not is_varuna,
            is_varuna and is_opportunistic,
        )
        for units_of_pipeline, (seconds, num_micro_batches, message_seconds) in zip(
            unit_arrays, pipelines, strict=True
        )
    ]


def simulate_step_seconds(
    schedule: str, pipelines: Sequence[Pipeline], *, is_opportunistic: bool = True
) -> list[float]:
    """Return the seconds of a step of each pipeline. The number of messages under way at once is not limited."""
    simulated = run_lines(event_lines(schedule, pipelines, is_opportunistic=is_opportunistic))
    return [float(run.ended.max()) for run in simulated]


@functools.lru_cache(maxsize=32)
def orders(schedule: str, num_stages: int, num_micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """Return every stage's passes in order. Raises ValueError for an unknown schedule."""
    stage_orders = []
    for stage_units in units(schedule, [(num_stages, num_micro_batches)])[0]:
        counts = {code: itertools.count() for code in (F, R, B)}
        stage_orders.append(tuple(Pass(KINDS[code - 1], next(counts[code])) for code in stage_units if code))
    return tuple(stage_orders)


def units(schedule: str, shapes: Sequence[tuple[int, int]]) -> list[Array]:
    """Return an array for each pipeline. `shapes`: each pipeline's number of stages and number of micro-batches. A row
    of the array has one stage's passes F, R and B in order. Raises ValueError for an unknown schedule."""
    import numpy as np

    if schedule == "varuna":
        return _units_by_rules(shapes)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected {' or '.join(SCHEDULES)}, got {schedule!r}")
    arrays = []
    for num_stages, num_micro_batches in shapes:
        num_first_forwards = [
            num_micro_batches if schedule == "gpipe" else min(num_stages - stage, num_micro_batches)
            for stage in range(num_stages)
        ]
        stage_rows = [
            [F] * num_first + [R, B, F] * (num_micro_batches - num_first) + [R, B] * num_first
            for num_first in num_first_forwards
        ]
        arrays.append(np.array(stage_rows, np.uint8))
    return arrays


def _units_by_rules(shapes: Sequence[tuple[int, int]]) -> list[Array]:
    """Return the result of units() for Varuna. The choices of all stages of all pipelines are computed together, slot
    by slot. Rows are padded with 0."""
    import numpy as np

    stage_counts = [num_stages for num_stages, _ in shapes]
    first_rows = np.cumsum([0, *stage_counts])
    num_passes = np.repeat([num_micro_batches for _, num_micro_batches in shapes], stage_counts)
    is_first, is_last = np.zeros((2, first_rows[-1]), bool)
    is_first[first_rows[:-1]] = is_last[first_rows[1:] - 1] = True
    passes = np.zeros((first_rows[-1], 3 * int(num_passes.max())), np.uint8)
    # by stage: F, R and B begun; next free column of `passes`; slot at which it is free again; kind of its last pass
    num_forward, num_recomputed, num_backward, next_column, free_at, running_kind = np.zeros(
        (6, first_rows[-1]), int
    )
    slot = 0
    while (num_backward < num_passes).any():
        is_free = free_at <= slot
        # Numbers of passes that have ended: of the passes that have begun, at most one still runs.
        ended_forward = num_forward - (~is_free & (running_kind == F))
        ended_backward = num_backward - (~is_free & (running_kind == B))
        from_below = np.where(is_first, num_passes, np.roll(ended_forward, 1))
        from_above = np.where(is_last, num_passes, np.roll(ended_backward, -1))
        # Between R and its B a stage runs no other pass, because it keeps only one micro-batch's intermediates.
        holds = ~is_last & (num_recomputed > num_backward)
        goes_back = (
            is_free
            & (np.where(is_last, num_forward, num_recomputed) > num_backward)
            & (from_above > num_backward)
        )
        half_done = np.roll(num_backward, -1)  # how many B the stage above began at least one slot ago
        recomputes = (
            is_free & ~is_last & ~holds & (half_done > num_recomputed) & (num_forward > num_recomputed)
        )
        has_input = (from_below > num_forward) & (num_forward < num_passes)
        goes_on = is_free & ~holds & ~goes_back & ~recomputes & has_input
        choices = ((F, goes_on, num_forward), (R, recomputes, num_recomputed), (B, goes_back, num_backward))
        for kind, is_chosen, counts in choices:
            chosen_stages = np.flatnonzero(is_chosen)
            passes[chosen_stages, next_column[chosen_stages]] = running_kind[chosen_stages] = kind
            next_column[chosen_stages] += 1
            counts[chosen_stages] += 1
            free_at[chosen_stages] = slot + SLOTS[KINDS[kind - 1]]
        slot += 1
    return [
        passes[start:end, : 3 * num_micro_batches]
        for start, end, (_, num_micro_batches) in zip(first_rows, first_rows[1:], shapes, strict=False)
    ]
