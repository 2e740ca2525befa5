"""Chooses the number of stages and the micro-batch size: predicts the step time of every configuration from a profile,
by the rules of the schedule. Does not import torch.

    num_stages, chunk_size, step_seconds = AutoConfig(16, 4, 512, "profile").get_min()

Sections are the parts of a model between its CutPoints; they are grouped into stages by their time. The predicted time
of a step has three parts: the passes in the schedule's order, where every message takes as long as a message at the
slowest cut; the longest sum of gradients over replicas; and the longest update. If a single process made the profile,
it has no times of messages and sums; these then count as 0 s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

from harness.base.console import counted
from harness.core.job import gib
from harness.plan.resources import all_reduce_sent_bytes
from methods.pipeline.config.profile import GRADIENT_BYTES, GptCosts, Profile, read_profile
from methods.pipeline.rank_map import RankMap
from methods.pipeline.schedule import Pipeline, simulate_step_seconds

CONFIGS_AT_ONCE = 16  # number of configurations that are predicted in one simulation


class ConfigChoice(NamedTuple):
    num_stages: int
    chunk_size: int  # samples of a micro-batch
    step_seconds: float


@dataclass(frozen=True)
class ConfigRow:
    """A configuration, and the time and memory that it is predicted to need. `cuts`: numbers of the CutPoints between
    the stages, in the form that class Varuna takes."""

    num_stages: int
    num_replicas: int
    chunk_size: int
    num_micro_batches: int
    device_bytes: int  # bytes of device memory that the rank with the largest need takes
    fits: bool
    cuts: tuple[int, ...]
    passes: tuple[dict[str, float], ...]  # seconds of each stage's passes
    send_seconds: float
    sum_seconds: float
    update_seconds: float
    # ratio: time of a pass while all ranks of a machine compute / time of the pass alone
    crowding: float = 1.0
    easing_ratio: float = (
        0.0  # seconds by which a step gets shorter for each second that the average rank waits
    )
    schedule: str = "varuna"
    step_seconds: float = nan  # predicted seconds of a step; nan until these are computed

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_replicas

    @property
    def stage_to_rank_map(self) -> str:
        return str(RankMap.make(self.num_stages, self.num_replicas))

    @property
    def least_seconds(self) -> float:
        """Return a lower bound of the step time: the largest sum over the stages. A stage's sum is the wait for its
        first input from the stages below, the time of all its passes, and the time in which the stages below finish."""
        wait_seconds, longest_seconds = 0.0, 0.0
        for passes in self.passes:
            longest_seconds = max(
                longest_seconds, wait_seconds + self.num_micro_batches * sum(passes.values())
            )
            wait_seconds += passes["F"] + passes["B"] + 2 * self.send_seconds
        return longest_seconds + self.sum_seconds + self.update_seconds

    @property
    def binds(self) -> str:
        """Return the name of the part of the predicted step that takes the most time."""
        slowest_seconds = max(sum(passes.values()) for passes in self.passes)
        crowding = max(1.0, self.crowding)
        seconds_by_part = {
            "passes": crowding * self.num_micro_batches * slowest_seconds,
            "replicas' sums": self.sum_seconds,
            "updates": crowding * self.update_seconds,
        }
        seconds_by_part["waits for other stages"] = self.step_seconds - sum(seconds_by_part.values())
        return max(seconds_by_part, key=lambda part: seconds_by_part[part])


def predict_steps(configs: Sequence[ConfigRow]) -> list[float]:
    """Return the predicted seconds of a step for each configuration. All configurations must have the same schedule.

    If there are many micro-batches, the time is extrapolated from simulations of fewer: once the pipeline is full, each
    further micro-batch takes the same time.
    """
    # for each configuration: the numbers of micro-batches that are simulated
    simulated_counts: list[list[int]] = []
    pipelines: list[Pipeline] = []
    for config in configs:
        full_count = max(2 * config.num_stages, 64)
        counts = [config.num_micro_batches]
        if config.num_micro_batches > full_count:
            counts = [full_count // 2, full_count]
        simulated_counts.append(counts)
        pipelines += [(config.passes, count, config.send_seconds) for count in counts]
    simulated_seconds = iter(simulate_step_seconds(configs[0].schedule, pipelines))
    predicted_seconds = []
    for config, counts in zip(configs, simulated_counts, strict=True):
        *half_seconds, seconds = (next(simulated_seconds) for _ in counts)
        if half_seconds:
            num_further = config.num_micro_batches - counts[1]
            seconds += (seconds - half_seconds[0]) / (counts[1] - counts[0]) * num_further
        # Ranks that wait leave their share of the cores to the ranks that compute.
        seconds_of_stages = sum(sum(passes.values()) for passes in config.passes)
        busy_seconds = config.num_micro_batches * seconds_of_stages / config.num_stages
        seconds = max(seconds, config.crowding * seconds - config.easing_ratio * (seconds - busy_seconds))
        seconds += config.sum_seconds + config.update_seconds * max(1.0, config.crowding)
        predicted_seconds.append(max(seconds, config.least_seconds))
    return predicted_seconds


def _with_step_seconds(configs: Sequence[ConfigRow]) -> list[ConfigRow]:
    return [
        replace(config, step_seconds=seconds)
        for config, seconds in zip(configs, predict_steps(configs), strict=True)
    ]


class AutoConfig:
    """All configurations for `num_gpus` devices, `gpus_per_vm` of them on each machine, and a batch of `batch_size`
    samples over all replicas.

    `gpu_memory_capacity`: bytes that tensors may fill on a device; None: the bytes in the profile, which sets no limit
    for CPUs. `num_stages`: the numbers of stages to choose from; None: all. `takes_all`: True: only configurations that
    leave no device idle and have micro-batches of one size. Raises ValueError if a number is below 1, if the profile is
    not valid, or if the batch is smaller than every micro-batch size in the profile.
    """

    def __init__(
        self,
        num_gpus: int,
        gpus_per_vm: int,
        batch_size: int,
        profile_folder: str | Path | Profile | GptCosts,
        gpu_memory_capacity: int | None = None,
        *,
        num_stages: Sequence[int] | None = None,
        schedule: str = "varuna",
        takes_all: bool = False,
    ) -> None:
        values_by_name = {"num_gpus": num_gpus, "gpus_per_vm": gpus_per_vm, "batch_size": batch_size}
        if gpu_memory_capacity is not None:
            values_by_name["gpu_memory_capacity"] = gpu_memory_capacity
        for name, value in values_by_name.items():
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.num_gpus, self.gpus_per_vm, self.batch_size = num_gpus, gpus_per_vm, batch_size
        self.num_stages, self.schedule, self.takes_all = num_stages, schedule, takes_all
        self.costs = (
            read_profile(profile_folder) if isinstance(profile_folder, str | Path) else profile_folder
        )
        self.capacity_bytes = gpu_memory_capacity or self.costs.device_bytes
        messages, is_one_machine = self.costs.messages, num_gpus <= gpus_per_vm
        like_messages = [
            message for message in messages if message.is_one_machine == is_one_machine
        ] or messages
        self._messages = [(message.num_bytes, message.seconds) for message in like_messages]
        self._configs = [
            config for chunk_size in self.costs.sizes for config in self._configs_of_size(chunk_size)
        ]
        if not self._configs:
            raise ValueError(
                f"expected a profiled micro-batch size of at most {batch_size}, the batch size, got"
                f" {', '.join(map(str, self.costs.sizes)) or 'none'}; try to profile smaller micro-batches"
            )

    def get_min(self) -> ConfigChoice:
        """Return the fastest configuration that fits, as (num_stages, chunk_size, step_seconds). Raises ValueError if
        no configuration fits."""
        best_config = self.best()
        return ConfigChoice(best_config.num_stages, best_config.chunk_size, best_config.step_seconds)

    @property
    def fits(self) -> bool:
        return any(config.fits for config in self._configs)

    def best(self) -> ConfigRow:
        """Return the fastest configuration that fits. Among equally fast configurations take the one with the largest
        micro-batches. If no times are known, take the one with the most stages, and then the smallest micro-batches,
        which keep the stages busy. Raises ValueError if no configuration fits."""
        fitting_configs = [config for config in self._configs if config.fits]
        if not fitting_configs:
            raise ValueError(self.why_not())
        if not self.costs.is_timed:
            return max(fitting_configs, key=_sort_key_without_times)
        best_config: ConfigRow | None = None
        fitting_configs.sort(key=lambda config: config.least_seconds)
        for start in range(0, len(fitting_configs), CONFIGS_AT_ONCE):
            configs = fitting_configs[start : start + CONFIGS_AT_ONCE]
            if best_config:
                configs = [config for config in configs if _may_be_better(config.least_seconds, best_config)]
            if not configs:
                break
            timed_configs = _with_step_seconds(configs)
            best_config = min([*timed_configs, best_config] if best_config else timed_configs, key=_sort_key)
        assert best_config is not None
        return best_config

    def least(self) -> ConfigRow:
        """Return the configuration that needs the least memory."""
        least = min(self._configs, key=lambda config: config.device_bytes)
        return _with_step_seconds([least])[0] if self.costs.is_timed else least

    def why_not(self) -> str:
        """Return, in one line, why no configuration fits: how much memory is missing for the configuration that needs
        the least, and what to try."""
        least_config, capacity_bytes = self.least(), self.capacity_bytes or 0
        remedies = ["more devices" if least_config.num_stages == self.num_gpus else "more CutPoints"]
        remedies += ["smaller micro-batches"] * (
            least_config.chunk_size > min(config.chunk_size for config in self._configs)
        )
        lacking_bytes = least_config.device_bytes - capacity_bytes
        num_stages_text = counted(least_config.num_stages, "stage")
        return (
            f"nothing fits: in {num_stages_text} of micro-batches of {least_config.chunk_size} a device needs"
            f" {gib(least_config.device_bytes)} of memory, {gib(lacking_bytes)} more than the {gib(capacity_bytes)}"
            f" there are; try {', '.join(remedies)}, devices of more memory or a smaller model"
        )

    def table(self) -> list[ConfigRow]:
        """Return all configurations, the fastest first. Configurations that do not fit come last, those that need the
        least memory first."""
        configs = _with_step_seconds(self._configs)
        fitting_configs = sorted((config for config in configs if config.fits), key=_sort_key)
        other_configs = [config for config in configs if not config.fits]
        return [*fitting_configs, *sorted(other_configs, key=lambda config: config.device_bytes)]

    def _configs_of_size(self, chunk_size: int) -> Iterator[ConfigRow]:
        """Yield the configurations with micro-batches of `chunk_size` samples, at most one for each number of stages.
        Replicas get equal parts of the batch, so the number of replicas divides the batch size."""
        stage_counts = range(1, self.num_gpus + 1) if self.num_stages is None else self.num_stages
        for num_stages, cuts in self.costs.cuts(chunk_size, stage_counts).items():
            most_replicas = self.num_gpus // num_stages
            replica_counts = [most_replicas] if self.takes_all else range(most_replicas, 0, -1)
            num_replicas = next(
                (count for count in replica_counts if count and self.batch_size % count == 0), 0
            )
            replica_samples = self.batch_size // num_replicas if num_replicas else 0
            is_even = num_replicas * num_stages == self.num_gpus and replica_samples % chunk_size == 0
            if replica_samples < chunk_size or (self.takes_all and not is_even):
                continue
            if self.schedule != "1f1b" or -(-replica_samples // chunk_size) >= num_stages:
                yield self._config(chunk_size, cuts, num_replicas)

    def _config(self, chunk_size: int, cuts: list[int], num_replicas: int) -> ConfigRow:
        stages = self.costs.stages(chunk_size, cuts, self.batch_size, num_replicas)
        device_bytes = max(stage.device_bytes for stage in stages)
        num_served = self.costs.num_served or inf
        num_local = min(self.gpus_per_vm, len(stages) * num_replicas)
        message_seconds = [
            _interpolate_seconds(self._messages, stage.sent_bytes) + stage.copy_seconds
            for stage in stages[:-1]
        ]
        summed_bytes = GRADIENT_BYTES * max(stage.num_params for stage in stages)
        return ConfigRow(
            num_stages=len(stages),
            num_replicas=num_replicas,
            chunk_size=chunk_size,
            num_micro_batches=-(-self.batch_size // num_replicas // chunk_size),
            device_bytes=device_bytes,
            fits=self.capacity_bytes is None or device_bytes <= self.capacity_bytes,
            cuts=tuple(cuts),
            passes=tuple(stage.passes for stage in stages),
            send_seconds=max(message_seconds, default=0.0),
            sum_seconds=self._sum_seconds(summed_bytes, num_replicas),
            update_seconds=max(stage.update_seconds for stage in stages),
            crowding=self.costs.crowding + (num_local - self.costs.num_ranks) / num_served,
            easing_ratio=num_local / num_served,
            schedule=self.schedule,
        )

    def _sum_seconds(self, num_bytes: int, num_ranks: int) -> float:
        """Return the seconds of an all-reduce of `num_bytes` over `num_ranks` replicas. The seconds are taken from the
        measured ring with the nearest number of ranks, in proportion to the bytes that each rank sends. Return 0.0 for
        one replica, or if no ring was measured."""
        sums = self.costs.sums
        if num_ranks == 1 or not sums:
            return 0.0
        nearest_num_ranks = min((ring.num_ranks for ring in sums), key=lambda count: abs(count - num_ranks))
        seconds = _interpolate_seconds(
            [(ring.num_bytes, ring.seconds) for ring in sums if ring.num_ranks == nearest_num_ranks],
            num_bytes,
        )
        return seconds * all_reduce_sent_bytes(1, num_ranks) / all_reduce_sent_bytes(1, nearest_num_ranks)


def _sort_key(config: ConfigRow) -> tuple[float, int]:
    """Return a sort key: the rounded seconds, then the size of micro-batches, largest first."""
    return float(f"{config.step_seconds:.9g}"), -config.chunk_size


def _may_be_better(seconds: float, best_config: ConfigRow) -> bool:
    """Return whether a configuration whose step takes at least `seconds`, perhaps more, can still be better than
    `best_config`."""
    return float(f"{seconds:.9g}") <= _sort_key(best_config)[0]


def _sort_key_without_times(config: ConfigRow) -> tuple[int, int]:
    """Return a sort key for use without times; the row with the largest key is chosen. This row has the most stages and
    then the smallest micro-batches. Among rows with a single stage, the one with the largest micro-batches is chosen,
    because small ones would gain nothing."""
    return config.num_stages, -config.chunk_size if config.num_stages > 1 else config.chunk_size


def _interpolate_seconds(points: Sequence[tuple[int, float]], num_bytes: int) -> float:
    """Return the seconds for `num_bytes`, from measured points (bytes, seconds). Between two points interpolate; beyond
    the last point go in proportion to the bytes; before the first take its seconds. Without points return 0.0."""
    point_below = max((point for point in points if point[0] <= num_bytes), default=None)
    point_above = min((point for point in points if point[0] > num_bytes), default=None)
    if point_below is None or point_above is None:
        only_point = point_below or point_above
        if only_point is None:
            return 0.0
        return only_point[1] * max(1.0, num_bytes / only_point[0])
    share = (num_bytes - point_below[0]) / (point_above[0] - point_below[0])
    return point_below[1] + share * (point_above[1] - point_below[1])
