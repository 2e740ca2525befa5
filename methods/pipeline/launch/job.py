"""A job to launch: its configuration for the ranks that are available, its rounds, the orders that start the ranks of
a round, and the ranks that are slow in it. Does not import torch."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from harness.base.json_object import JsonObject
from harness.base.rank_agent import LOOPBACK, Rendezvous
from harness.core.identity import source_hash
from methods.pipeline.config.auto_config import AutoConfig
from methods.pipeline.config.profile import read_profile
from methods.pipeline.launch.machines import Remote
from methods.pipeline.rank_map import RankMap

NUM_TIMED_STEPS = 5  # a rank's time is the median over its last NUM_TIMED_STEPS steps
SLOW_RATIO = (
    1.15  # a rank is slow if its time is more than SLOW_RATIO times the median time of its stage's ranks
)


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
            config = AutoConfig(num_workers, self.per_machine, self.batch_size, self.profile).best()
            return Spread(config.num_stages, config.num_replicas, config.chunk_size, config.cuts)
        assert self.num_stages and self.chunk_size
        num_stages = min(self.num_stages, num_workers)
        most_replicas = num_workers // num_stages
        num_replicas = max(count for count in range(1, most_replicas + 1) if self.batch_size % count == 0)
        return Spread(num_stages, num_replicas, min(self.chunk_size, self.batch_size // num_replicas))


@dataclass(frozen=True)
class LaunchJob:
    """A job to launch. `arguments`: the script's own arguments. `code_dir`: working folder of the ranks.
    `checkpoint_every`: most steps that are trained again after a rank has died; None: the script saves its checkpoints
    by itself. `stall_seconds`: the job ends after so many seconds without progress."""

    machine_list: Path
    script: str
    arguments: Sequence[str]
    code_dir: Path
    choice: SpreadChoice
    checkpoint_every: int | None = 100
    stall_seconds: float = 1800.0

    def identity(self) -> JsonObject:
        return {
            "script": self.script,
            "arguments": list(self.arguments),
            "batch_size": self.choice.batch_size,
        }

    def code(self) -> str:
        """Return the hash of the script's present code, and of what it imports; "" if the script is gone."""
        with contextlib.suppress(OSError):  # the ranks will say so
            return source_hash(self.code_dir / self.script)
        return ""


@dataclass
class Round:
    """The ranks that train together in a round, and their reports so far."""

    number: int
    spread: Spread
    machines: list[Remote]
    resume_step: int | None
    # For each rank: its machine, and its number among the ranks of the same host. Lines of the list may share a host.
    seats: list[tuple[Remote, int]]
    running_ranks: set[int] = field(default_factory=set)
    exit_codes: dict[int, int] = field(default_factory=dict)
    error_texts: dict[int, str] = field(default_factory=dict)
    step_reports: dict[int, dict[int, JsonObject]] = field(default_factory=dict)  # by step and rank
    # by step: ranks whose script saved this step's state
    savers_by_step: dict[int, set[int]] = field(default_factory=dict)
    is_seated: bool = False  # True: the ranks run and can receive signals
    is_stopping: bool = False  # True: the ranks have agreed to stop
    asked_to_stop_at: float | None = None
    failed_at: float | None = None
    heard_at: float = field(default_factory=time.monotonic)


def assign_seats(num_ranks: int, machines: Sequence[Remote], per_machine: int) -> list[tuple[Remote, int]]:
    """Return the field `seats` of a Round. `per_machine`: ranks on each machine of the list."""
    agents = [machines[rank // per_machine] for rank in range(num_ranks)]
    next_local_ranks: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return [(agent, next(next_local_ranks[agent.line.host])) for agent in agents]


def make_rank_orders(
    job: LaunchJob, folder: Path, current_round: Round, address: str, port: int
) -> dict[Remote, list[JsonObject]]:
    """Return, for each machine of a round, the entries of its ranks in the order `start`. `folder`: the job's folder.
    `address`, `port`: where the ranks find one another, on the first machine."""
    spread = current_round.spread
    replica_samples = job.choice.batch_size // spread.num_replicas
    link = {
        "folder": str(folder / "checkpoints"),
        "checkpoint_every": job.checkpoint_every,
        "cuts": spread.cuts,
        "round": current_round.number,
    }
    num_local = Counter(agent.line.host for agent, _ in current_round.seats)
    hosts = list(num_local)
    is_one_machine = hosts == [LOOPBACK]
    run_id = str(current_round.number)
    shared_arguments = [
        f"--stage_to_rank_map={spread.stage_to_rank_map}",
        f"--chunk_size={spread.chunk_size}",
        f"--batch-size={replica_samples}",
    ]
    if current_round.resume_step:
        shared_arguments.append(f"--resume_step={current_round.resume_step}")
    ranks: dict[Remote, list[JsonObject]] = {agent: [] for agent in current_round.machines}
    for rank, (agent, local_rank) in enumerate(current_round.seats):
        arguments = [f"--rank={rank}", f"--local_rank={local_rank}", *shared_arguments]
        host = agent.line.host
        rendezvous = Rendezvous(address, port, hosts.index(host), is_one_machine, run_id=run_id)
        ranks[agent].append(
            {
                "rank": rank,
                "arguments": [*arguments, *job.arguments],
                "environment": rendezvous.variables(rank, local_rank, spread.num_ranks, num_local[host]),
                "link": {**link, "rank": rank},
                "log": str(folder / "logs" / f"rank-{rank}.txt"),
            }
        )
    return ranks


class SlowRank(NamedTuple):
    rank: int
    stage: int
    seconds: float
    ratio: float

    def __str__(self) -> str:
        excess_text = f"{self.ratio - 1:.0%} above the median of stage {self.stage}"
        return f"rank {self.rank}: {self.seconds:.3g} s of work a step, {excess_text}"


class Pace:
    """The seconds that each rank worked in the newest steps of a round. Waits for other ranks are left out."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.seconds_by_rank: dict[int, deque[float]] = {}
        self.num_steps = 0
        self.named_lines: list[str] = []

    def add(self, seconds: Mapping[int, float]) -> None:
        """Add each rank's seconds of work in a step. The first step of a round is left out."""
        self.num_steps += 1
        if self.num_steps > 1:
            for rank, busy_seconds in seconds.items():
                self.seconds_by_rank.setdefault(rank, deque(maxlen=NUM_TIMED_STEPS)).append(busy_seconds)

    def slow_ranks(self, spread: Spread) -> list[SlowRank]:
        slow_ranks = []
        if self.num_steps <= NUM_TIMED_STEPS:
            return []
        for stage, replicas in enumerate(RankMap.make(spread.num_stages, spread.num_replicas).ranks_by_stage):
            typical_seconds_by_rank = {
                rank: statistics.median(self.seconds_by_rank[rank]) for rank in replicas
            }
            median = statistics.median(typical_seconds_by_rank.values())
            slow_ranks += [
                SlowRank(rank, stage, typical_seconds, typical_seconds / median)
                for rank, typical_seconds in typical_seconds_by_rank.items()
                if typical_seconds > SLOW_RATIO * median > 0
            ]
        return slow_ranks
