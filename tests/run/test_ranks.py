"""Jobs of several ranks: that they train as one process does, and how they end when one of them does."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.core.job import Budget, Job, Workload
from harness.core.record import Record, read_all
from harness.jobs.sweep import Sweep
from harness.plan import run_time
from harness.plan.fit import resolve
from harness.run.ranks import first_to_fail
from tests.support import cli
from tests.support.cli import start, wait_for_steps
from tests.support.tiny import TINY, write_ending
from tests.support.until import until

SHARDED = Job("fsdp2-offload", TINY, {"world_size": 2}, steps=8, warmup=2)
MEETING = """
from dataclasses import dataclass
from harness.core.method import Method, Step, Trained
from harness.core.job import Plan

@dataclass(frozen=True)
class Meeting(Method):
    world_size: int = 2
    raises_at: int = 0
    is_alone: bool = False
    is_endless: bool = False
    is_apart: bool = False

    def plan(self, workload, budget):
        return Plan(device={"weights": 1})

    def train(self, workload, batches, device):
        import time, torch, torch.distributed as dist
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if self.is_alone else {}
        dist.init_process_group("gloo", **alone)
        for step, batch in enumerate(batches, start=1):
            if step == self.raises_at and dist.get_rank() == 1:
                raise ZeroDivisionError("rank 1 divides by zero")
            number = torch.ones(1)
            dist.all_reduce(number)
            yield Step(number[0])
            while self.is_endless and step == 10:
                if not self.is_apart:
                    dist.all_reduce(number)
                time.sleep(0.05)
        return Trained([])
"""


@pytest.fixture
def methods(tmp_path: Path) -> Iterator[Path]:
    """The folder of a method whose two ranks meet in every step; nothing of a run may be left."""
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "meeting.py").write_text(MEETING)
    yield folder
    until(lambda: holders(tmp_path) == [])
    assert not list(tmp_path.glob(".ranks-*"))


def meeting(folder: Path, at_step_10: Callable[[], object] | None = None, **options: Any) -> Record:
    """The record of a run of two ranks, in the folder above their method's, which `at_step_10`, if given, ends."""
    options |= {"world_size": 2, "is_endless": at_step_10 is not None}
    job = resolve(Job("meeting", TINY, options, steps=12, warmup=2), (folder,))[0]

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 10 and at_step_10:
            at_step_10()

    (record,) = Sweep(folder.parent, (folder,), report).run([resolve(job, (folder,))])
    return record


def interrupt() -> None:
    """As Ctrl-C does while the launcher follows its worker."""
    raise KeyboardInterrupt


def holders(folder: Path) -> list[psutil.Process]:
    """The processes that hold a file of this folder open, as a call, its agent and its ranks do their log."""
    processes = []
    for process in psutil.process_iter():
        try:
            if any(file.path.startswith(f"{folder}/") for file in process.open_files()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def training_ranks(folder: Path) -> dict[int, psutil.Process]:
    """The ranks of a call, once they train."""
    wait_for_steps(folder)
    return {
        int(process.name()[5:]): process for process in holders(folder) if process.name().startswith("rank ")
    }


def only_record(folder: Path) -> Record:
    (record,) = read_all(folder)[0].values()
    return record


def test_two_ranks_train_as_the_reference_does(tmp_path: Path) -> None:
    (record,) = Sweep(tmp_path).run([resolve(SHARDED)])
    assert record.gate.verdict == "tolerance" and record.gate.evidence["tolerance"] == 1e-5, record.gate.text
    ranks = record.machine["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert record.host_peak_bytes > max(rank["resident_peak_bytes"] for rank in ranks)  # it is the sum
    assert len(record.tensors) == 28 and not list(tmp_path.glob(".ranks-*"))


def test_nothing_listens_beyond_this_machine(methods: Path, tmp_path: Path) -> None:
    """torch's own rendezvous listens on all addresses, and unpickles what it is sent."""
    addresses: list[str] = []

    def look() -> None:
        (agent,) = {rank.parent() for rank in training_ranks(tmp_path).values()}
        for process in (agent, *agent.children(recursive=True)):
            connections = process.net_connections()
            addresses.extend(one.laddr.ip for one in connections if one.status == "LISTEN")
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        meeting(methods, look)
    assert set(addresses) == {"127.0.0.1"}


def test_a_run_of_one_process_listens_nowhere(tmp_path: Path) -> None:
    line = "import psutil; print('status:', [one.status for one in psutil.Process().net_connections()], flush=True)"
    methods = write_ending(tmp_path, line)
    Sweep(tmp_path, (methods,)).run([resolve(Job("ending", TINY, steps=2, warmup=0), (methods,))])
    (log,) = tmp_path.glob("log_ending*.txt")
    assert "status: []" in log.read_text()


@pytest.mark.heavy
def test_a_killed_rank_ends_the_job_at_once_and_is_named(methods: Path, tmp_path: Path) -> None:
    record = meeting(methods, lambda: training_ranks(tmp_path)[1].kill())
    assert record.status == "killed" and record.reason.startswith("rank 1 of 2: killed by SIGKILL")
    assert record.evidence["rank"] == 1 and len(record.losses) == 10


@pytest.mark.heavy
def test_a_killed_rank_is_noticed_by_its_end_alone(
    methods: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No limit of seconds ends the job, and no other rank, for none meets the killed one."""
    for limit in ("deadline_seconds", "silence_seconds"):
        monkeypatch.setattr(run_time, limit, lambda job: math.inf)
    record = meeting(methods, lambda: training_ranks(tmp_path)[1].kill(), is_apart=True)
    assert record.reason.startswith("rank 1 of 2: killed by SIGKILL")


@pytest.mark.heavy
def test_an_interrupt_ends_all_ranks_and_keeps_what_was_measured(methods: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        meeting(methods, interrupt)
    record = only_record(tmp_path)
    assert record.status == "interrupted" and len(record.losses) == 10


@pytest.mark.heavy
def test_ranks_end_with_their_agent(methods: Path, tmp_path: Path) -> None:
    ranks: list[psutil.Process] = []

    def kill_agent() -> None:
        ranks.extend(training_ranks(tmp_path).values())
        ranks[0].parent().kill()

    assert meeting(methods, kill_agent).status == "killed"
    psutil.wait_procs(ranks)


@pytest.mark.heavy
@pytest.mark.parametrize("is_agent_killed", [False, True])
def test_ranks_end_with_the_caller(methods: Path, tmp_path: Path, is_agent_killed: bool) -> None:
    call = "-m meeting --ranks 2 -l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97 --steps 12".split()
    run = start(*call, "--option", "is_endless=true", "--methods", methods, "--results", tmp_path)
    ranks = training_ranks(tmp_path)
    agent = ranks[0].parent()
    assert agent
    run.kill()
    if is_agent_killed:
        agent.kill()
    psutil.wait_procs([*ranks.values(), agent])
    assert run.wait() == -signal.SIGKILL
    if is_agent_killed:  # nobody is left to write a record, or to take away what the ranks had written
        shutil.rmtree(next(tmp_path.glob(".ranks-*")))
    else:
        assert only_record(tmp_path).status == "interrupted"  # written by the agent


@pytest.mark.heavy
def test_the_first_rank_to_raise_is_named(methods: Path) -> None:
    record = meeting(methods, raises_at=3)
    assert record.status == "crash" and record.evidence["rank"] == 1
    assert record.reason.startswith("rank 1 of 2: ZeroDivisionError: rank 1 divides by zero at step 3")
    assert "rank 1 divides by zero" in record.evidence["traceback"]


@pytest.mark.heavy
def test_ranks_that_train_alone_are_refused(methods: Path) -> None:
    """Each would train the whole batch as the reference does, and count for all."""
    record = meeting(methods, is_alone=True)
    assert record.status == "crash" and "expected torch.distributed to join 2 ranks" in record.reason, (
        record.reason
    )


@pytest.mark.heavy
def test_ranks_that_run_out_of_time_are_a_timeout(methods: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is over once ten steps are done."""
    record = meeting(methods, lambda: monkeypatch.setattr(run_time, "deadline_seconds", lambda job: 0.0))
    assert record.status == "timeout" and len(record.losses) == 10, record.reason


def test_the_cause_is_not_who_lost_another_rank() -> None:
    def left(reason: str, status: str = "crash", lost_ranks: Sequence[int] = ()) -> Record:
        return Record(SHARDED, "", status, reason=reason, evidence={"lost_ranks": list(lost_ranks)})

    lost = left("RuntimeError: Connection closed by peer [127.0.0.1]:3000 at step 3")
    cases = (
        ({0: 1, 1: -9}, {0: lost}, 1),  # both seen at once
        ({0: 1, 1: 1}, {0: lost, 1: left("ValueError: no")}, 1),
        ({0: 1, 1: 1}, {0: left("ValueError: no"), 1: lost}, 0),
        ({0: 1, 1: 1}, {0: left("", "interrupted"), 1: left("ValueError: no")}, 1),
        ({1: -15, 0: 1}, {0: lost}, 1),  # somebody's SIGTERM
        (
            {2: 1, 0: 1},
            {2: left("", lost_ranks=[0]), 0: left("", lost_ranks=[1])},
            0,
        ),
    )
    assert [first_to_fail(failed, ended) for failed, ended, _ in cases] == [first for _, _, first in cases]


def test_a_plan_halves_what_is_sharded() -> None:
    """By hand: the host holds 16 bytes a parameter, of which each of two ranks has half; boundaries halve, too."""
    load = Workload(num_layers=8, batch_size=4)
    job = Job("fsdp2-offload", load)
    one, two = (resolve(dataclasses.replace(job, options={"world_size": n}))[1] for n in (1, 2))
    assert one.host_bytes == 16 * load.num_params and 2 * two.host_bytes == one.host_bytes
    assert two.device["weights"] == one.device["weights"]
    assert one.device["activations"] - two.device["activations"] >= load.num_layers * load.boundary_bytes // 2


def test_a_host_must_hold_all_ranks() -> None:
    need = 16 * TINY.num_params  # of one process or of all ranks, what is gathered aside
    for world_size in (1, 2):
        job = dataclasses.replace(SHARDED, options={"world_size": world_size}, budget=Budget(host_bytes=need))
        shortfall = resolve(job)[2]
        assert shortfall and ("each of 2 ranks" in shortfall) == (world_size == 2)


@pytest.mark.parametrize(
    ("words_", "message"),
    [
        ("-m fsdp2-offload --ranks 3", "a batch of 2 samples splits over 1, 2 ranks, not over 3"),
        ("-m resident --ranks 2", "--ranks does not apply to resident: leave it out, or try -m deepspeed"),
        ("-m fsdp2-offload --ranks 2 --dropout 0.1", "dropout and --ranks exclude each other"),
        ("-m fsdp2-offload --ranks 2 --device sim", "--ranks: expected 1 on sim"),
    ],
)
def test_ranks_that_cannot_be_are_one_line(words_: str, message: str, tmp_path: Path) -> None:
    done = cli.run(*words_.split(), *"-l 2 -h 32 -b 2 --heads 2 --seq 16 --results".split(), tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and message in done.stderr, done.stderr
    assert os.listdir(tmp_path) == []
