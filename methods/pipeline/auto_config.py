"""Chooses stages and micro-batches by a profile: predicts the step of every configuration by the rules of the schedule;
standard library only.

    num_stages, chunk_size, step_seconds = AutoConfig(16, 4, 512, "profile").get_min()

Sections are grouped into stages by their time. A step is its passes in Varuna's order, each message as slow as the
slowest cut's, then the slowest stage's sum over replicas, and its update. A profile of one process has no times of
messages and sums, which then count as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

from harness.core.job import gib
from harness.forecast.resources import OPTIMIZER_BYTES
from methods.pipeline.grouping import group
from methods.pipeline.partition import BUCKET_BYTES
from methods.pipeline.profile import Profile, SectionCost, read
from methods.pipeline.rank_map import RankMap
from methods.pipeline.schedule import step_seconds

GRADIENT_BYTES = 4  # bytes of a gradient that replicas sum
# Bytes of a parameter: its weight, gradient, and Adam's state.
STATE_BYTES = {dtype: size + GRADIENT_BYTES + OPTIMIZER_BYTES[dtype] for dtype, size in (("fp32", 4), ("fp16", 2))}
AT_ONCE = 16  # configurations predicted side by side


class ConfigChoice(NamedTuple):
    num_stages: int
    chunk_size: int  # samples of a micro-batch
    step_seconds: float


@dataclass(frozen=True)
class ConfigRow:
    """A configuration, and what it is predicted to need. `cuts`: the CutPoints at which stages meet, for Varuna."""

    num_stages: int
    num_replicas: int
    chunk_size: int
    num_micro_batches: int
    device_bytes: int  # of the rank that needs most
    fits: bool
    cuts: tuple[int, ...]
    passes: tuple[dict[str, float], ...]  # seconds of each stage's passes
    send_seconds: float
    sum_seconds: float
    update_seconds: float
    crowding: float = 1.0  # a pass's time while all of a machine's ranks compute, relative to alone
    eased: float = 0.0  # how much faster passes get while ranks wait
    step_seconds: float = nan  # in a table

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_replicas

    @property
    def stage_to_rank_map(self) -> str:
        return str(RankMap.make(self.num_stages, self.num_replicas))

    @property
    def least_seconds(self) -> float:
        """No step is faster: a stage waits for those below, has its passes, and those below end after it."""
        waits, found = 0.0, 0.0
        for passes in self.passes:
            found = max(found, waits + self.num_micro_batches * sum(passes.values()))
            waits += passes["F"] + passes["B"] + 2 * self.send_seconds
        return found + self.sum_seconds + self.update_seconds

    @property
    def binds(self) -> str:
        """Name the part that takes most of the predicted step."""
        slowest = max(sum(passes.values()) for passes in self.passes)
        crowding = max(1.0, self.crowding)
        parts = {
            "passes": crowding * self.num_micro_batches * slowest, "replicas' sums": self.sum_seconds,
            "updates": crowding * self.update_seconds,
        }  # fmt: skip
        parts["waits for other stages"] = self.step_seconds - sum(parts.values())
        return max(parts, key=lambda part: parts[part])


def predict(rows: Sequence[ConfigRow]) -> list[float]:
    """Return the predicted step of each configuration in seconds. Beyond a number of micro-batches the pipeline is
    full, and each further one takes the same time."""
    numbers: list[list[int]] = []
    for row in rows:
        many = max(2 * row.num_stages, 64)
        numbers.append([many // 2, many] if row.num_micro_batches > many else [row.num_micro_batches])
    each = zip(rows, numbers, strict=True)
    found = iter(step_seconds("varuna", [(row.passes, one, row.send_seconds) for row, some in each for one in some]))
    predicted = []
    for row, some in zip(rows, numbers, strict=True):
        *half, seconds = (next(found) for _ in some)
        if half:
            seconds += (seconds - half[0]) / (some[1] - some[0]) * (row.num_micro_batches - some[1])
        # Waiting ranks leave their share of the cores to the others.
        busy = row.num_micro_batches * sum(sum(passes.values()) for passes in row.passes) / row.num_stages
        seconds = max(seconds, row.crowding * seconds - row.eased * (seconds - busy))
        seconds += row.sum_seconds + row.update_seconds * max(1.0, row.crowding)
        predicted.append(max(seconds, row.least_seconds))
    return predicted


class AutoConfig:
    """Of `num_gpus` devices, `gpus_per_vm` on a machine, for a global batch. `gpu_memory_capacity`: bytes of a device;
    None: of those profiled; CPUs' has no limit. Raises ValueError, one line, for what is no number or profile."""

    def __init__(
        self, num_gpus: int, gpus_per_vm: int, batch_size: int, profile_folder: str | Path | Profile,
        gpu_memory_capacity: int | None = None,
    ) -> None:  # fmt: skip
        numbers = {"num_gpus": num_gpus, "gpus_per_vm": gpus_per_vm, "batch_size": batch_size}
        if gpu_memory_capacity is not None:
            numbers["gpu_memory_capacity"] = gpu_memory_capacity
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.num_gpus, self.gpus_per_vm, self.batch_size = num_gpus, gpus_per_vm, batch_size
        self.profile = profile_folder if isinstance(profile_folder, Profile) else read(profile_folder)
        self.capacity = gpu_memory_capacity or self.profile.device_bytes
        messages = self.profile.messages
        alike = [each for each in messages if each.is_one_machine == (num_gpus <= gpus_per_vm)] or messages
        self._messages = [(each.num_bytes, each.seconds) for each in alike]
        self._rows = [found for size in self.profile.sizes for found in self._of_size(size)]
        if not self._rows:
            raise ValueError(
                f"no micro-batch of the sizes profiled ({', '.join(map(str, self.profile.sizes)) or 'none fit'}) is"
                f" within a batch of {batch_size}; try to profile smaller ones"
            )

    def get_min(self) -> ConfigChoice:
        """The fastest that fits. Raises ValueError, one line, if none does."""
        fitting = [row for row in self._rows if row.fits]
        if not fitting:
            raise ValueError(self.why_not())
        best: tuple[float, ConfigRow] | None = None
        fitting.sort(key=lambda row: row.least_seconds)
        for start in range(0, len(fitting), AT_ONCE):
            some = [row for row in fitting[start : start + AT_ONCE] if best is None or row.least_seconds < best[0]]
            if not some:
                break
            found = min(zip(predict(some), some, strict=True), key=lambda pair: pair[0])
            best = found if best is None or found[0] < best[0] else best
        assert best is not None
        return ConfigChoice(best[1].num_stages, best[1].chunk_size, best[0])

    def why_not(self) -> str:
        """Tell what the configuration that needs least lacks, if nothing fits."""
        least, capacity = min(self._rows, key=lambda row: row.device_bytes), self.capacity or 0
        tries = ["more devices" if least.num_stages == self.num_gpus else "more CutPoints"]
        tries += ["smaller micro-batches"] * (least.chunk_size > min(row.chunk_size for row in self._rows))
        return (
            f"nothing fits: {least.num_stages} stages of micro-batches of {least.chunk_size} need"
            f" {gib(least.device_bytes)} of a device's memory, {gib(least.device_bytes - capacity)} more than the"
            f" {gib(capacity)} there are; try {', '.join(tries)}, devices of more memory or a smaller model"
        )

    def table(self) -> list[ConfigRow]:
        """All configurations, the fastest first; last those that do not fit, by their memory."""
        each = zip(self._rows, predict(self._rows), strict=True)
        rows = [replace(row, step_seconds=seconds) for row, seconds in each]
        return sorted(rows, key=lambda row: (not row.fits, row.step_seconds if row.fits else row.device_bytes))

    def _of_size(self, size: int) -> list[ConfigRow]:
        """Return the configurations of this micro-batch for all numbers of stages. Replicas share a batch evenly, so
        their number divides it."""
        costs, params = self.profile.at(size), [section.num_params for section in self.profile.sections]
        below = [cost.forward_seconds + cost.recompute_seconds + cost.backward_seconds for cost in costs]
        last = [cost.recompute_seconds + cost.backward_seconds for cost in costs]
        found = []
        for number, cuts in enumerate(group(below, last, [count > 0 for count in params]), start=1):
            most = self.num_gpus // number
            num_replicas = max((count for count in range(1, most + 1) if self.batch_size % count == 0), default=0)
            if cuts is not None and num_replicas and self.batch_size // num_replicas >= size:
                found.append(self._row(size, cuts, num_replicas, costs, params))
        return found

    def _row(
        self, size: int, cuts: list[int], num_replicas: int, costs: Sequence[SectionCost], params: Sequence[int]
    ) -> ConfigRow:
        starts, num_micro_batches = [0, *(cut + 1 for cut in cuts)], -(-self.batch_size // num_replicas // size)
        stages = [slice(*ends) for ends in zip(starts, [*starts[1:], len(costs)], strict=True)]
        passes = [_passes(costs[stage], is_last=stage is stages[-1]) for stage in stages]
        counts = [sum(params[stage]) for stage in stages]
        # The last stage completes each micro-batch at once; the first one keeps the whole batch.
        received = [0, *(costs[cut].activation_bytes * num_micro_batches for cut in cuts[:-1]),
                    *(costs[cut].activation_bytes for cut in cuts[-1:])]  # fmt: skip
        summed = [GRADIENT_BYTES * count * (num_replicas > 1) for count in counts]
        needs = [
            STATE_BYTES["fp16" if self.profile.fp16 else "fp32"] * count
            + max(inputs + _graph_bytes(costs[stage]), min(BUCKET_BYTES, num_bytes))
            for stage, count, inputs, num_bytes in zip(stages, counts, received, summed, strict=True)
        ]
        served, here = self.profile.num_served or inf, min(self.gpus_per_vm, len(stages) * num_replicas)
        sends = [_at(self._messages, costs[cut].activation_bytes) + costs[cut].copy_seconds for cut in cuts]
        return ConfigRow(
            len(stages), num_replicas, size, num_micro_batches, max(needs),
            self.capacity is None or max(needs) <= self.capacity, tuple(cuts), tuple(passes), max(sends, default=0.0),
            self._sum_seconds(max(summed), num_replicas),
            max(sum(section.update_seconds for section in self.profile.sections[stage]) for stage in stages),
            self.profile.crowding + (here - self.profile.num_ranks) / served, here / served,
        )  # fmt: skip

    def _sum_seconds(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds of a sum, by the most similar measured ring: each rank passes on (n - 1) / n of the bytes,
        twice."""
        sums = self.profile.sums
        if num_ranks == 1 or not sums:
            return 0.0
        like = min((each.num_ranks for each in sums), key=lambda count: abs(count - num_ranks))
        seconds = _at([(each.num_bytes, each.seconds) for each in sums if each.num_ranks == like], num_bytes)
        return seconds * (1 - 1 / num_ranks) / (1 - 1 / like)


def _passes(costs: Sequence[SectionCost], *, is_last: bool) -> dict[str, float]:
    forward, recompute, backward = (
        sum(getattr(cost, f"{name}_seconds") for cost in costs) for name in ("forward", "recompute", "backward")
    )
    # The last stage keeps at once all that its backward pass needs.
    return {"F": recompute, "R": 0.0, "B": backward} if is_last else {"F": forward, "R": recompute, "B": backward}


def _graph_bytes(costs: Sequence[SectionCost]) -> int:
    """Return the peak bytes of a micro-batch's passes through these sections: each section's own peak beside the bytes
    that the sections before it keep."""
    kept, peak = 0, 0
    for cost in costs:
        peak = max(peak, kept + cost.peak_bytes)
        kept += cost.saved_bytes
    return peak


def _at(points: Sequence[tuple[int, float]], num_bytes: int) -> float:
    """Return the seconds for this many bytes: on the line between the two measured points around, in proportion beyond
    the last."""
    below = max((point for point in points if point[0] <= num_bytes), default=None)
    above = min((point for point in points if point[0] > num_bytes), default=None)
    if below is None or above is None:
        known = below or above
        if known is None:
            return 0.0
        return known[1] * max(1.0, num_bytes / known[0])
    share = (num_bytes - below[0]) / (above[0] - below[0])
    return below[1] + share * (above[1] - below[1])
