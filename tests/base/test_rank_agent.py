"""Ranks of one round: which of them are told to have failed, and that none outlives its agent."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from harness.base.child_process import child_environment

CALL = """
import functools, os, time
from harness.base.rank_agent import OneRound

def work(rank, tells):
    os.write(tells, f"{{os.getpid()}} {{len(os.listdir('/proc/self/fd'))}}\\n".encode())
    {work}
    while True:
        time.sleep(1)

agent = OneRound(lambda rank, data: print(data.decode(), end="", flush=True))
failed = agent.run({{rank: functools.partial(work, rank) for rank in range(2)}})
print(failed, agent.is_interrupted)
"""


def started(work: str = "pass") -> tuple[subprocess.Popen[str], list[psutil.Process], set[str]]:
    """An agent, its two ranks, which do not end after their work, and how many descriptors each holds."""
    call = [sys.executable, "-c", CALL.format(work=work)]
    agent = subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=child_environment())
    assert agent.stdout
    lines = [agent.stdout.readline().split() for _ in range(2)]
    return agent, [psutil.Process(int(pid)) for pid, _ in lines], {held for _, held in lines}


def test_a_rank_that_fails_ends_the_others_and_is_alone_told_to_have_failed(tmp_path: Path) -> None:
    release = tmp_path / "release"
    agent, _, _ = started(
        f"while rank and not os.path.exists({str(release)!r}): time.sleep(0.01)\n    if rank: os._exit(3)"
    )
    release.touch()  # both ranks are at work
    assert agent.communicate()[0] == "{1: 3} False\n"


def test_a_signal_lets_ranks_end_by_themselves() -> None:
    agent, _, _ = started()
    agent.send_signal(signal.SIGTERM)
    assert agent.communicate()[0] == "{} True\n"


def test_ranks_die_with_their_agent() -> None:
    agent, ranks, _ = started()
    agent.kill()
    psutil.wait_procs(ranks)


def test_a_rank_holds_no_descriptor_of_the_agent_or_of_another_rank() -> None:
    agent, _, held = started()
    agent.kill()
    assert held == {"5"}  # three streams, its pipe, and the folder that it lists
