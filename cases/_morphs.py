"""Runs a pipeline job on simulated machines, which leave, join and die by a schedule. A simulated machine is a process,
an agent of the launcher, with one rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.checkout import ROOT
from harness.base.child_process import child_environment
from harness.base.whole_file import write_whole
from methods.pipeline.launch.folder import read_lines

SCRIPT = ROOT / "cases" / "_paced_gpt.py"
SMALL = ("--blocks", "3", "--width", "32", "--tokens", "16")
FAST, SLOW, SLOWEST = "0.02", "0.2", "0.7"  # least seconds of a step; SLOWEST is used while machines come
BATCH_SIZE, CHUNK_SIZE, CHECKPOINT_EVERY = 12, 2, 10
LIMIT_SECONDS = 240.0
# The causes of a change, in this order: a machine is killed; the launcher is killed; the list of machines is edited; a
# machine gets SIGTERM.
CAUSES = ("death", "launcher", "list", "notice")


class Change(NamedTuple):
    """A change after step number `step`. The number of machines becomes `num_machines`. `by`: the cause."""

    step: int
    num_machines: int
    by: str = "list"  # one of CAUSES; "launcher" does not change the number of machines


class Schedule(NamedTuple):
    """The changes of a job. `num_machines`: machines at the job's start. `num_stages`: the most stages of the pipeline;
    with fewer machines there are fewer stages.
    """

    num_machines: int
    num_stages: int
    changes: Sequence[Change] = ()

    def __str__(self) -> str:
        changes = ", ".join(f"{change.by} {change.num_machines} at {change.step}" for change in self.changes)
        return f"{self.num_machines} machines, {self.num_stages} stages at most, {changes}"


class Played(NamedTuple):
    code: int
    seconds: dict[str, list[float]]  # for each cause: seconds from a change to the next round's first step
    output: str


class Machines:
    """The simulated machines: the file that lists them, their agents, and the file that sets the training's pace."""

    def __init__(self, folder: Path, num_machines: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.list, self.job, self.pace = folder / "machines.txt", folder / "job", folder / "pace"
        self.num_machines = 0
        self.set(num_machines)

    def set(self, num_machines: int) -> None:
        self.num_machines = num_machines
        self.list.write_text("".join(f"127.0.0.{number + 1}\n" for number in range(num_machines)))

    def signal(self, number: int, kind: int) -> None:
        name = f"127.0.0.{number + 1}"
        agents = [line["agent"] for line in self.events("came") if line["machine"] == name]
        with contextlib.suppress(ProcessLookupError):  # the agent has died already, and is not restarted yet
            os.kill(agents[-1], kind)

    def events(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        lines = read_lines(self.job / "events.jsonl")
        return [line for line in lines if line["event"] == kind and line["time"] > since]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return read_lines(self.job / "steps.jsonl")

    def next_step(self, began: float) -> float:
        """Return the time, in seconds since the epoch, at which the first step of a new round ended; 0.0 if no such
        step has ended yet. The new round began later than the time `began`."""
        first = min((line["time"] for line in self.events("round", began)), default=float("inf"))
        return min((line["time"] for line in self.steps if line["time"] > first), default=0.0)


def command(machines: Machines, num_stages: int, script: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        "-m",
        "methods.varuna.run",
        "--machine_list",
        str(machines.list),
        "--gpus_per_node",
        "1",
        "--batch-size",
        str(BATCH_SIZE),
        "--nstages",
        str(num_stages),
        "--chunk_size",
        str(CHUNK_SIZE),
        "--checkpoint-every",
        str(CHECKPOINT_EVERY),
        "--folder",
        str(machines.job),
        str(SCRIPT),
        *script,
    ]


def play(folder: Path, schedule: Schedule, num_steps: int, script: Sequence[str] = SMALL) -> Played:
    """Run one job with the changes of the schedule, and return its exit code, times and output. Raises TimeoutError if
    the job stops making progress."""
    machines = Machines(folder, schedule.num_machines)
    write_whole(machines.pace, FAST)
    call = command(machines, schedule.num_stages, [*script, "--steps", str(num_steps)])
    # Jobs are compared to the last digits, so all compute on the CPU: one worker alone would take a GPU, several not.
    environment = child_environment() | {
        "PACE_FILE": str(machines.pace),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    seconds: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    with open(folder / "output.txt", "w") as output:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(call, stdout=output, stderr=output, cwd=ROOT, env=environment)

        running = start()
        try:
            for change in schedule.changes:
                _wait(lambda: machines.steps and machines.steps[-1]["step"] >= change.step, running)  # noqa: B023
                if running.poll() is not None:
                    break
                write_whole(machines.pace, SLOW)
                began = time.time()
                if change.by in ("death", "notice"):
                    for number in range(change.num_machines, machines.num_machines):
                        machines.signal(number, signal.SIGKILL if change.by == "death" else signal.SIGTERM)
                elif change.by == "launcher":
                    running.kill()
                    running.wait()
                    running = start()
                else:
                    machines.set(change.num_machines)
                write_whole(machines.pace, SLOWEST if change.by == "list" else SLOW)
                _wait(lambda: machines.next_step(began), running)  # noqa: B023
                if running.poll() is not None:
                    break
                seconds[change.by].append(machines.next_step(began) - began)
                if machines.num_machines != change.num_machines:
                    machines.set(change.num_machines)
                    time.sleep(1)  # time for the launcher to see the shorter list before lines come back
                write_whole(machines.pace, FAST)
            running.wait(LIMIT_SECONDS)
        finally:
            if running.poll() is None:
                running.terminate()
                running.wait()
    return Played(running.returncode, seconds, (folder / "output.txt").read_text())


def _wait(until: Callable[[], Any], running: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while running.poll() is None and not until():
        if time.monotonic() > limit:
            raise TimeoutError(f"the job did not go on in {LIMIT_SECONDS:g} s")
        time.sleep(0.05)


def undisturbed(folder: Path, num_steps: int, script: Sequence[str] = SMALL) -> Path:
    """Run the job of play() on one machine, without changes; return the job's folder."""
    played = play(folder, Schedule(1, 1), num_steps, script)
    if played.code:
        raise RuntimeError(f"the undisturbed job ended with exit code {played.code}:\n{played.output}")
    return folder / "job"
