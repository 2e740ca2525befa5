"""Simulates how many samples a job trains on machines that come and go. The job either morphs, which means that it
adapts to the machines present, or restarts from its last checkpoint, for example an hourly one.

Nothing here is measured: the trace is drawn at random, and the event core computes a step's time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

HOUR = 3600.0


class MachineChange(NamedTuple):
    """The number of machines that are present from the moment `seconds` on."""

    seconds: float
    num_machines: int


class MachineSpan(NamedTuple):
    start: float
    end: float
    samples_per_second: float  # counts only samples of steps that are not repeated later


def synthetic(hours: float, most: int, mean_hours: float, seed: int) -> list[MachineChange]:
    """Draw a trace of `hours` in which each of `most` machines is present and absent in turns.

    Each duration is drawn from an exponential distribution. Its mean is `mean_hours` while the machine is present, and
    a third of that while it is absent.
    """
    draw, moments = random.Random(seed), list[tuple[float, int]]()
    for _ in range(most):
        now, is_there = 0.0, True
        while True:
            now += draw.expovariate(1 / (mean_hours * HOUR * (1 if is_there else 1 / 3)))
            if now >= hours * HOUR:
                break
            is_there = not is_there
            moments.append((now, 1 if is_there else -1))
    trace, number = [MachineChange(0.0, most)], most
    for seconds, change in sorted(moments):
        number += change
        trace.append(MachineChange(seconds, number))
    return trace


def through(
    trace: Sequence[MachineChange],
    end: float,
    speed: Callable[[int], float],
    *,
    checkpoint_seconds: float,
    pause_seconds: float,
    tells: bool,
) -> list[MachineSpan]:
    """Return the spans of time in which a job trains on the machines of a trace, up to the time `end`.

    `speed`: returns the samples per second on a number of machines. `pause_seconds`: time from a change of machines
    until steps go on. `tells`: True if the job is told of changes, so that it saves its state before machines leave and
    uses new machines at once. If False, the job repeats all steps after its last checkpoint when a machine leaves, and
    uses new machines only then.
    """
    if not tells:
        trace = [
            trace[0],
            *(then for now, then in itertools.pairwise(trace) if then.num_machines < now.num_machines),
        ]
    spans, begin = [], 0.0
    for number, change in enumerate(trace):
        stop = trace[number + 1].seconds if number + 1 < len(trace) else end
        start = min(stop, max(begin, change.seconds + (pause_seconds if number else 0.0)))
        kept = stop - start
        if not tells and number + 1 < len(trace):
            kept -= kept % checkpoint_seconds
        if stop > start:
            spans.append(MachineSpan(start, stop, speed(change.num_machines) * kept / (stop - start)))
        begin = stop
    return spans


def samples(spans: Sequence[MachineSpan]) -> float:
    return sum((span.end - span.start) * span.samples_per_second for span in spans)
