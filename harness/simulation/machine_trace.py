"""Simulates how many samples a job trains on machines that come and go. The job either morphs, which means that it
adapts to the machines present, or restarts from its last checkpoint, for example an hourly one.

Nothing here is measured: the trace is drawn at random, and the event core computes a step's time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def draw_trace(hours: float, num_machines: int, mean_hours: float, seed: int) -> list[MachineChange]:
    """Draw a trace of `hours` in which each of `num_machines` machines is present and absent in turns.

    Each duration is drawn from an exponential distribution. Its mean is `mean_hours` while the machine is present, and
    a third of that while it is absent.
    """
    draw, moments = random.Random(seed), list[tuple[float, int]]()
    for _ in range(num_machines):
        now, is_present = 0.0, True
        while True:
            now += draw.expovariate(1 / (mean_hours * HOUR * (1 if is_present else 1 / 3)))
            if now >= hours * HOUR:
                break
            is_present = not is_present
            moments.append((now, 1 if is_present else -1))
    trace, num_present = [MachineChange(0.0, num_machines)], num_machines
    for seconds, change in sorted(moments):
        num_present += change
        trace.append(MachineChange(seconds, num_present))
    return trace


@dataclass(frozen=True)
class ElasticJob:
    """A job on machines that come and go. `speed`: returns the samples per second on a number of machines.
    `pause_seconds`: time from a change of machines until steps go on. `is_told`: True if the job is told of changes, so
    that it saves its state before machines leave and uses new machines at once. If False, the job repeats all steps
    after its last checkpoint when a machine leaves, and uses new machines only then."""

    speed: Callable[[int], float]
    checkpoint_seconds: float
    pause_seconds: float
    is_told: bool

    def spans(self, trace: Sequence[MachineChange], end: float) -> list[MachineSpan]:
        """Return the spans of time in which the job trains on the machines of a trace, up to the time `end`."""
        if not self.is_told:
            pairs = itertools.pairwise(trace)
            trace = [trace[0], *(then for now, then in pairs if then.num_machines < now.num_machines)]
        spans, begin = [], 0.0
        for number, change in enumerate(trace):
            stop = trace[number + 1].seconds if number + 1 < len(trace) else end
            start = min(stop, max(begin, change.seconds + (self.pause_seconds if number else 0.0)))
            kept = stop - start
            if not self.is_told and number + 1 < len(trace):
                kept -= kept % self.checkpoint_seconds
            if stop > start:
                speed = self.speed(change.num_machines) * kept / (stop - start)
                spans.append(MachineSpan(start, stop, speed))
            begin = stop
        return spans


def total_samples(spans: Sequence[MachineSpan]) -> float:
    return sum((span.end - span.start) * span.samples_per_second for span in spans)
