"""A pipeline's step under a virtual clock: stages, messages between them, and the order of passes as it is chosen.

    simulate("varuna", [{"F": 1, "R": 1, "B": 2}] * 4, num_micro_batches=16, send_seconds=0.5).step_seconds

A message takes its time on the link between two stages, one after the other in each direction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from methods.pipeline.schedule import Pass, orders


class Done(NamedTuple):
    """A pass as it ran, in seconds."""

    stage: int
    work: Pass
    start: float
    end: float


@dataclass
class PipelineRun:
    passes: list[Done] = field(default_factory=list)

    @property
    def step_seconds(self) -> float:
        return max(done.end for done in self.passes)

    @property
    def bubble(self) -> float:
        """Share of all stages' time in which they wait."""
        num_stages = 1 + max(done.stage for done in self.passes)
        return 1 - sum(done.end - done.start for done in self.passes) / (num_stages * self.step_seconds)


def simulate(
    schedule: str, seconds: Sequence[Mapping[str, float]], num_micro_batches: int, send_seconds: float = 0.0, *,
    is_opportunistic: bool = True, noise: Callable[[float], float] = lambda seconds: seconds,
) -> PipelineRun:  # fmt: skip
    """`seconds`: of F, R and B on each stage; `noise`: of a duration, what it is this time."""
    return _Simulation(schedule, seconds, num_micro_batches, send_seconds, is_opportunistic, noise).run()


class _Simulation:
    def __init__(
        self, schedule: str, seconds: Sequence[Mapping[str, float]], num_micro_batches: int, send_seconds: float,
        is_opportunistic: bool, noise: Callable[[float], float],
    ) -> None:  # fmt: skip
        self.seconds, self.send_seconds, self.noise = seconds, send_seconds, noise
        self.last = len(seconds) - 1
        self.is_varuna = schedule == "varuna"
        self.is_opportunistic = is_opportunistic and self.is_varuna
        self.left = [list(order[::-1]) for order in orders(schedule, len(seconds), num_micro_batches)]  # next is last
        self.free = [0.0] * len(seconds)
        self.link_free: dict[tuple[int, str], float] = {}
        self.arrived: list[set[Pass]] = [set() for _ in seconds]  # what came from a neighbor, by the pass that needs it
        self.found = PipelineRun()

    def run(self) -> PipelineRun:
        """Moments in order: at each one a stage becomes free, or a message arrives."""
        self.moments: list[tuple[float, int, int, Pass | None]] = [
            (0.0, 0, stage, None) for stage in range(self.last + 1)
        ]
        number = 0
        while self.moments:
            now, _, stage, message = heapq.heappop(self.moments)
            if message:
                self.arrived[stage].add(message)
            if self.left[stage] and self.free[stage] <= now and (chosen := self._choose(stage)):
                number += 1
                self._start(stage, chosen, now, number)
        return self.found

    def _choose(self, stage: int) -> Pass | None:
        """The next pass of a free stage; None if it must wait."""
        left = self.left[stage]
        item = left[-1]
        if item.kind == "R" and self.is_opportunistic and not self._has(stage, "B", item.micro_batch):
            other = next((each for each in reversed(left) if each.kind == "F"), None)
            if other and self._has(stage, "F", other.micro_batch):
                return other
        if item.kind == "R":  # torch's schedules recompute within the backward pass
            return item if self.is_varuna or self._has(stage, "B", item.micro_batch) else None
        return item if self._has(stage, item.kind, item.micro_batch) else None

    def _has(self, stage: int, kind: str, micro_batch: int) -> bool:
        is_end = stage == 0 if kind == "F" else stage == self.last
        return is_end or Pass(kind, micro_batch) in self.arrived[stage]

    def _start(self, stage: int, item: Pass, now: float, number: int) -> None:
        self.left[stage].remove(item)
        end = now + self.noise(self.seconds[stage][item.kind])
        self.free[stage] = end
        self.found.passes.append(Done(stage, item, now, end))
        heapq.heappush(self.moments, (end, 2 * number, stage, None))
        neighbor = {"F": stage + 1, "B": stage - 1}.get(item.kind, -1)
        if 0 <= neighbor <= self.last:
            leaves = max(end, self.link_free.get((stage, item.kind), 0.0))
            arrives = leaves + (self.noise(self.send_seconds) if self.send_seconds else 0.0)
            self.link_free[stage, item.kind] = arrives
            heapq.heappush(self.moments, (arrives, 2 * number + 1, neighbor, item))
