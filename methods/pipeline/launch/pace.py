"""Finds slow ranks, which work longer on a step than the other ranks of their stage. Does not import torch."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from methods.pipeline.launch.choose import Spread
from methods.pipeline.rank_map import RankMap

STEPS = 5  # a rank's time is the median over its last STEPS steps
SLOW = 1.15  # a rank is slow if its time is more than SLOW times the median time of its stage's ranks


class Slow(NamedTuple):
    rank: int
    stage: int
    seconds: float
    ratio: float

    def __str__(self) -> str:
        more = f"{self.ratio - 1:.0%} above the median of stage {self.stage}"
        return f"rank {self.rank}: {self.seconds:.3g} s of work a step, {more}"


class Pace:
    """The seconds that each rank worked in the newest steps of a round. Waits for other ranks are left out."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.seconds: dict[int, deque[float]] = {}
        self.num_steps = 0
        self.named: list[str] = []

    def add(self, seconds: Mapping[int, float]) -> None:
        """Add each rank's seconds of work in a step. The first step of a round is left out."""
        self.num_steps += 1
        if self.num_steps > 1:
            for rank, busy in seconds.items():
                self.seconds.setdefault(rank, deque(maxlen=STEPS)).append(busy)

    def slow(self, spread: Spread) -> list[Slow]:
        slow = []
        if self.num_steps <= STEPS:
            return []
        for stage, replicas in enumerate(RankMap.make(spread.num_stages, spread.num_replicas).ranks):
            typical = {rank: statistics.median(self.seconds[rank]) for rank in replicas}
            median = statistics.median(typical.values())
            slow += [
                Slow(rank, stage, typical_seconds, typical_seconds / median)
                for rank, typical_seconds in typical.items()
                if typical_seconds > SLOW * median > 0
            ]
        return slow
