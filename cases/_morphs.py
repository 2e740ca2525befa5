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
from harness.base.json_object import JsonObject
from harness.base.whole_file import write_whole
from methods.pipeline.launch.folder import read_lines

SCRIPT = ROOT / "cases" / "_paced_gpt.py"
SMALL_MODEL = ("--blocks", "3", "--width", "32", "--tokens", "16")  # the script's arguments
# least seconds of a step, as the pace file holds them; SLOWEST_PACE is used while machines come
FAST_PACE, SLOW_PACE, SLOWEST_PACE = "0.02", "0.2", "0.7"
BATCH_SIZE, CHUNK_SIZE, CHECKPOINT_EVERY = 12, 2, 10
NO_PROGRESS_SECONDS = 240.0  # a job without progress for so long has stopped
# The causes of a change, in this order: a machine is killed; the launcher is killed; the list of machines is edited; a
# machine gets SIGTERM.
CAUSES = ("death", "launcher", "list", "notice")


class Change(NamedTuple):
    """A change after step number `step`. The number of machines becomes `num_machines`."""

    step: int
    num_machines: int
    cause: str = "list"  # one of CAUSES; "launcher" does not change the number of machines


class Schedule(NamedTuple):
    """The changes of a job. `num_machines`: machines at the job's start. `num_stages`: the most stages of the pipeline;
    with fewer machines there are fewer stages.
    """

    num_machines: int
    num_stages: int
    changes: Sequence[Change] = ()

    def __str__(self) -> str:
        changes = ", ".join(
            f"{change.cause} {change.num_machines} at {change.step}" for change in self.changes
        )
        return f"{self.num_machines} machines, {self.num_stages} stages at most, {changes}"


class MorphedJob(NamedTuple):
    """A job that has ended after the changes of its schedule."""

    exit_code: int
    pause_seconds: dict[
        str, list[float]
    ]  # for each cause: seconds from a change to the next round's first step
    output: str


class Machines:
    """The simulated machines: the file that lists them, their agents, and the file that sets the training's pace."""

    def __init__(self, folder: Path, num_machines: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.list, self.job, self.pace = folder / "machines.txt", folder / "job", folder / "pace"
        self.num_machines = 0
        self.write_list(num_machines)

    def write_list(self, num_machines: int) -> None:
        self.num_machines = num_machines
        self.list.write_text("".join(f"127.0.0.{number + 1}\n" for number in range(num_machines)))

    def send_signal(self, number: int, signal_number: int) -> None:
        address = f"127.0.0.{number + 1}"
        agents = [line["agent"] for line in self.events("came") if line["machine"] == address]
        with contextlib.suppress(ProcessLookupError):  # the agent has died already, and is not restarted yet
            os.kill(agents[-1], signal_number)

    def events(self, kind: str, since: float = 0.0) -> list[JsonObject]:
        lines = read_lines(self.job / "events.jsonl")
        return [line for line in lines if line["event"] == kind and line["time"] > since]

    @property
    def steps(self) -> list[JsonObject]:
        return read_lines(self.job / "steps.jsonl")

    def time_of_next_step(self, began: float) -> float:
        """Return the time, in seconds since the epoch, at which the first step of a new round ended; 0.0 if no such
        step has ended yet. The new round began later than the time `began`."""
        round_start = min((line["time"] for line in self.events("round", began)), default=float("inf"))
        return min((line["time"] for line in self.steps if line["time"] > round_start), default=0.0)


def _launcher_command(machines: Machines, num_stages: int, script_arguments: Sequence[str]) -> list[str]:
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
        *script_arguments,
    ]


def run_morphing_job(
    folder: Path, schedule: Schedule, num_steps: int, script_arguments: Sequence[str] = SMALL_MODEL
) -> MorphedJob:
    """Run one job with the changes of the schedule, and return its exit code, times and output. Raises TimeoutError if
    the job stops making progress."""
    machines = Machines(folder, schedule.num_machines)
    write_whole(machines.pace, FAST_PACE)
    arguments = [*script_arguments, "--steps", str(num_steps)]
    command = _launcher_command(machines, schedule.num_stages, arguments)
    # Jobs are compared to the last digits, so all compute on the CPU: one worker alone would take a GPU, several not.
    environment = child_environment() | {
        "PACE_FILE": str(machines.pace),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    pause_seconds: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    with open(folder / "output.txt", "w") as output:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment)

        running = start()
        try:
            for change in schedule.changes:
                _wait(lambda: machines.steps and machines.steps[-1]["step"] >= change.step, running)  # noqa: B023
                if running.poll() is not None:
                    break
                write_whole(machines.pace, SLOW_PACE)
                began = time.time()
                if change.cause in ("death", "notice"):
                    for number in range(change.num_machines, machines.num_machines):
                        machines.send_signal(
                            number, signal.SIGKILL if change.cause == "death" else signal.SIGTERM
                        )
                elif change.cause == "launcher":
                    running.kill()
                    running.wait()
                    running = start()
                else:
                    machines.write_list(change.num_machines)
                write_whole(machines.pace, SLOWEST_PACE if change.cause == "list" else SLOW_PACE)
                _wait(lambda: machines.time_of_next_step(began), running)  # noqa: B023
                if running.poll() is not None:
                    break
                pause_seconds[change.cause].append(machines.time_of_next_step(began) - began)
                if machines.num_machines != change.num_machines:
                    machines.write_list(change.num_machines)
                    time.sleep(1)  # time for the launcher to see the shorter list before lines come back
                write_whole(machines.pace, FAST_PACE)
            running.wait(NO_PROGRESS_SECONDS)
        finally:
            if running.poll() is None:
                running.terminate()
                running.wait()
    return MorphedJob(running.returncode, pause_seconds, (folder / "output.txt").read_text())


def _wait(is_reached: Callable[[], Any], running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + NO_PROGRESS_SECONDS
    while running.poll() is None and not is_reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job did not go on in {NO_PROGRESS_SECONDS:g} s")
        time.sleep(0.05)


def run_undisturbed_job(folder: Path, num_steps: int, script_arguments: Sequence[str] = SMALL_MODEL) -> Path:
    """Run the job of run_morphing_job() on one machine, without changes; return the job's folder."""
    job = run_morphing_job(folder, Schedule(1, 1), num_steps, script_arguments)
    if job.exit_code:
        raise RuntimeError(f"the undisturbed job ended with exit code {job.exit_code}:\n{job.output}")
    return folder / "job"
