"""Maps stages to ranks by Varuna's text `stage_to_rank_map`. For example "0,2;1,3;" has two stages with two replicas
each. Needs only the standard library.

Stages are separated by semicolons, replicas by commas. The n-th ranks of all stages are one pipeline: the n-th replica
of the model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankMap:
    """The rank of each stage and replica: `ranks_by_stage[stage][replica]`. Raises ValueError unless all stages have
    equally many ranks and each rank occurs once."""

    ranks_by_stage: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        num_ranks_of_stages = [len(replicas) for replicas in self.ranks_by_stage]
        if not num_ranks_of_stages or min(num_ranks_of_stages) < 1 or len(set(num_ranks_of_stages)) > 1:
            raise ValueError(
                f"stage_to_rank_map: expected equally many ranks in each stage, got {num_ranks_of_stages} in {self}"
            )
        if sorted(rank for replicas in self.ranks_by_stage for rank in replicas) != list(
            range(sum(num_ranks_of_stages))
        ):
            raise ValueError(
                f"stage_to_rank_map: expected each rank from 0 to {sum(num_ranks_of_stages) - 1} once, got {self}"
            )

    @staticmethod
    def parse(text: str) -> RankMap:
        try:
            stage_texts = [stage_text for stage_text in text.split(";") if stage_text.strip()]
            return RankMap(tuple(map(_parse_ranks, stage_texts)))
        except ValueError as error:
            if "stage_to_rank_map" in str(error):
                raise
            raise ValueError(f"stage_to_rank_map: expected text such as '0,2;1,3', got {text!r}") from error

    @staticmethod
    def make(num_stages: int, num_replicas: int) -> RankMap:
        """Return a map in which each replica's pipeline has consecutive ranks."""
        return RankMap(
            tuple(
                tuple(stage + num_stages * replica for replica in range(num_replicas))
                for stage in range(num_stages)
            )
        )

    def __str__(self) -> str:
        return "".join(",".join(map(str, replicas)) + ";" for replicas in self.ranks_by_stage)

    @property
    def num_stages(self) -> int:
        return len(self.ranks_by_stage)

    @property
    def num_replicas(self) -> int:
        return len(self.ranks_by_stage[0])

    @property
    def world_size(self) -> int:
        return self.num_stages * self.num_replicas

    def stage_and_replica(self, rank: int) -> tuple[int, int]:
        """Return the stage and the replica of a rank. Raises ValueError if the map lacks the rank."""
        for stage, replicas in enumerate(self.ranks_by_stage):
            if rank in replicas:
                return stage, replicas.index(rank)
        raise ValueError(f"stage_to_rank_map: expected a map with rank {rank}, got {self}")

    def pipeline(self, replica: int) -> list[int]:
        """Return the ranks of one replica, in the order of stages."""
        return [replicas[replica] for replicas in self.ranks_by_stage]


def _parse_ranks(stage_text: str) -> tuple[int, ...]:
    return tuple(int(rank_text) for rank_text in stage_text.split(",") if rank_text.strip())
