"""A job to launch, its rounds, and the orders that start the ranks of a round. Does not import torch."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.base.rank_agent import LOOPBACK, Rendezvous
from harness.core.identity import source_hash
from methods.pipeline.launch.choose import Spread, SpreadChoice
from methods.pipeline.launch.machines import Remote


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

    def identity(self) -> dict[str, Any]:
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
    running: set[int] = field(default_factory=set)
    codes: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    step_reports: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)  # by step and rank
    # by step: ranks whose script saved this step's state
    saved: dict[int, set[int]] = field(default_factory=dict)
    is_seated: bool = False  # True: the ranks run and can receive signals
    is_stopping: bool = False  # True: the ranks have agreed to stop
    asked_to_stop: float | None = None
    failed_at: float | None = None
    heard: float = field(default_factory=time.monotonic)


def seated(num_ranks: int, machines: Sequence[Remote], per_machine: int) -> list[tuple[Remote, int]]:
    """Return the field `seats` of a Round. `per_machine`: ranks on each machine of the list."""
    agents = [machines[rank // per_machine] for rank in range(num_ranks)]
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    return [(agent, next(numbers[agent.line.host])) for agent in agents]


def rank_orders(
    job: LaunchJob, folder: Path, running: Round, address: str, port: int
) -> dict[Remote, list[dict[str, Any]]]:
    """Return, for each machine of a round, the entries of its ranks in the order `start`. `folder`: the job's folder.
    `address`, `port`: where the ranks find one another, on the first machine."""
    spread = running.spread
    share = job.choice.batch_size // spread.num_replicas
    link = {
        "folder": str(folder / "checkpoints"),
        "checkpoint_every": job.checkpoint_every,
        "cuts": spread.cuts,
        "round": running.number,
    }
    num_local = Counter(agent.line.host for agent, _ in running.seats)
    hosts = list(num_local)
    is_one_machine = hosts == [LOOPBACK]
    ranks: dict[Remote, list[dict[str, Any]]] = {agent: [] for agent in running.machines}
    for rank, (agent, local) in enumerate(running.seats):
        arguments = [
            f"--rank={rank}",
            f"--local_rank={local}",
            f"--stage_to_rank_map={spread.stage_to_rank_map}",
            f"--chunk_size={spread.chunk_size}",
            f"--batch-size={share}",
        ]
        if running.resume_step:
            arguments.append(f"--resume_step={running.resume_step}")
        host = agent.line.host
        rendezvous = Rendezvous(address, port, hosts.index(host), is_one_machine, run_id=str(running.number))
        ranks[agent].append(
            {
                "rank": rank,
                "arguments": [*arguments, *job.arguments],
                "environment": rendezvous.variables(rank, local, spread.num_ranks, num_local[host]),
                "link": {**link, "rank": rank},
                "log": str(folder / "logs" / f"rank-{rank}.txt"),
            }
        )
    return ranks
