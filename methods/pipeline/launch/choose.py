"""Chooses the number of stages and replicas for the workers (ranks) that are available. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from methods.pipeline.config.auto_config import AutoConfig
from methods.pipeline.config.profile import read_profile
from methods.pipeline.rank_map import RankMap


@dataclass(frozen=True)
class Spread:
    num_stages: int
    num_replicas: int
    chunk_size: int
    cuts: tuple[int, ...] | None = None  # the CutPoints between the stages; None: class Varuna chooses them

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_replicas

    @property
    def stage_to_rank_map(self) -> str:
        return str(RankMap.make(self.num_stages, self.num_replicas))


@dataclass(frozen=True)
class SpreadChoice:
    """The user's settings: either `num_stages` and `chunk_size`, or a profile. Raises ValueError if neither or both are
    given, or if a number is below 1. `per_machine`: ranks on each machine."""

    batch_size: int
    per_machine: int
    num_stages: int | None = None
    chunk_size: int | None = None
    profile: Path | None = None

    def __post_init__(self) -> None:
        options = {
            "--batch-size": self.batch_size,
            "--gpus-per-node": self.per_machine,
            "--nstages": self.num_stages,
            "--chunk-size": self.chunk_size,
        }
        for option, value in options.items():
            if value is not None and value < 1:
                raise ValueError(f"{option}: expected at least 1, got {value}")
        if (self.num_stages is None or self.chunk_size is None) == (self.profile is None):
            raise ValueError("expected either --nstages and --chunk-size, or --profile FOLDER to choose both")
        if self.profile:
            read_profile(self.profile)

    def spread(self, num_workers: int) -> Spread:
        """Return a configuration of the job for at most `num_workers` ranks.

        If there are fewer workers than `num_stages`, each worker gets one stage. The number of replicas divides the
        batch size. Raises ValueError if no configuration fits.
        """
        if self.profile:
            row = AutoConfig(num_workers, self.per_machine, self.batch_size, self.profile).best()
            return Spread(row.num_stages, row.num_replicas, row.chunk_size, row.cuts)
        assert self.num_stages and self.chunk_size
        num_stages = min(self.num_stages, num_workers)
        most = num_workers // num_stages
        num_replicas = max(count for count in range(1, most + 1) if self.batch_size % count == 0)
        return Spread(num_stages, num_replicas, min(self.chunk_size, self.batch_size // num_replicas))
