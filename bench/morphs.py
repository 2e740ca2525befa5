"""The gate for morphs, by schedules of machines that leave, come and die, on this machine.

    .venv/bin/python -m bench.morphs [--schedules 30] [--first 0]

Machines are agents of their own here, with one rank each. Each random schedule has a seed, of which its first number of
machines, its changes and their moments follow: some leave or come by the list, some leave by SIGTERM, some die by kill
-9 without a word, and so does the launcher, which is started again. Each job must train as one process that nothing
disturbed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from harness.core.child_process import child_environment
from harness.core.method import ROOT
from harness.core.whole_file import write_whole
from methods.pipeline.launch.folder import read_lines
from methods.pipeline.launch.judge import Verdict, judge_folder

SCRIPT = ROOT / "bench" / "paced_gpt.py"
SMALL = ("--blocks", "3", "--width", "32", "--tokens", "16")
FAST, SLOW, SLOWEST = "0.02", "0.2", "0.7"  # seconds that a step takes at least; slowest while machines come
BATCH_SIZE, CHUNK_SIZE, CHECKPOINT_EVERY = 12, 2, 10
MOST_MACHINES = 4
LIMIT_SECONDS = 240.0
CAUSES = {"death": "a machine's death", "launcher": "the launcher's death", "list": "a change of the list",
          "notice": "a notice by SIGTERM"}  # fmt: skip


class Change(NamedTuple):
    """After this step: so many machines are to be there; those that go leave by the list, or die."""

    step: int
    num_machines: int
    by: str = "list"  # one of CAUSES; with the launcher's death the number of machines stays


class Schedule(NamedTuple):
    """What happens to a job. `num_machines`: at its start; `num_stages`: where there are as many workers."""

    num_machines: int
    num_stages: int
    changes: Sequence[Change] = ()

    def __str__(self) -> str:
        changes = ", ".join(f"{change.by} {change.num_machines} at {change.step}" for change in self.changes)
        return f"{self.num_machines} machines, {self.num_stages} stages at most, {changes}"


class Played(NamedTuple):
    code: int
    seconds: dict[str, list[float]]  # by cause, from a change to the next round's first step
    output: str


class Machines:
    """The list, the agents of the machines in it, and how fast they train."""

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
        with contextlib.suppress(ProcessLookupError):  # it has not come back yet
            os.kill(agents[-1], kind)

    def events(self, kind: str, since: float = 0.0) -> list[dict[str, Any]]:
        found = read_lines(self.job / "events.jsonl")
        return [line for line in found if line["event"] == kind and line["time"] > since]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return read_lines(self.job / "steps.jsonl")

    def next_step(self, began: float) -> float:
        """Time of the first step of a round that began after this moment; 0.0 if there is none yet."""
        first = min((line["time"] for line in self.events("round", began)), default=float("inf"))
        return min((line["time"] for line in self.steps if line["time"] > first), default=0.0)


def command(machines: Machines, num_stages: int, script: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "methods.varuna.run", "--machine_list", str(machines.list), "--gpus_per_node", "1",
        "--batch-size", str(BATCH_SIZE), "--nstages", str(num_stages), "--chunk_size", str(CHUNK_SIZE),
        "--checkpoint-every", str(CHECKPOINT_EVERY), "--folder", str(machines.job), str(SCRIPT), *script,
    ]  # fmt: skip


def play(folder: Path, schedule: Schedule, num_steps: int, script: Sequence[str] = SMALL) -> Played:
    """One job, with these changes. Raises TimeoutError where it does not go on."""
    machines = Machines(folder, schedule.num_machines)
    write_whole(machines.pace, FAST)
    call = command(machines, schedule.num_stages, [*script, "--steps", str(num_steps)])
    environment = child_environment() | {"PACE_FILE": str(machines.pace), "OMP_NUM_THREADS": "1"}
    seconds: dict[str, list[float]] = {by: [] for by in CAUSES}
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
                    time.sleep(1)  # lines that leave and come at once are no change
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


def random_schedule(seed: int, num_steps: int) -> Schedule:
    """Three to five changes."""
    draws = random.Random(seed)
    first = now = draws.randint(1, MOST_MACHINES)
    changes = []
    for step in sorted(draws.sample(range(2, num_steps - 2), draws.randint(3, 5))):
        kind = draws.choice(("come", "leave", "notice", "death", "death", "launcher"))
        if kind == "launcher":
            changes.append(Change(step, now, kind))
        elif (kind == "come" and now < MOST_MACHINES) or now == 1:
            now = draws.randint(now + 1, MOST_MACHINES)
            changes.append(Change(step, now))
        else:
            now = draws.randint(1, now - 1)
            changes.append(Change(step, now, kind if kind in CAUSES else "list"))
    return Schedule(first, draws.randint(1, MOST_MACHINES), changes)


def undisturbed(folder: Path, num_steps: int, script: Sequence[str] = SMALL) -> Path:
    """The same job by one process."""
    played = play(folder, Schedule(1, 1), num_steps, script)
    if played.code:
        raise RuntimeError(f"the undisturbed job ended with exit code {played.code}:\n{played.output}")
    return folder / "job"


@click.command()
@click.option("--schedules", default=30)
@click.option("--first", default=0, help="Seed of the first schedule.")
@click.option("--steps", default=40)
def main(schedules: int, first: int, steps: int) -> None:
    failed = 0
    seconds: dict[str, list[float]] = {by: [] for by in CAUSES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = undisturbed(folder / "alone", steps)
        for seed in range(first, first + schedules):
            schedule, mine, began = random_schedule(seed, steps), folder / str(seed), time.monotonic()
            played = Played(0, {}, "")
            try:
                played = play(mine, schedule, steps)
                verdict = judge_folder(mine / "job", alone, CHECKPOINT_EVERY)
                if played.code:
                    verdict = Verdict("exit-code", f"exit code {played.code}:\n{played.output}")
            except TimeoutError as error:
                verdict = Verdict("timeout", str(error))
            for by, found in played.seconds.items():
                seconds[by] += found
            failed += not verdict.passed
            lost = len(read_lines(mine / "job" / "lost_steps.jsonl"))
            end = "passed" if verdict.passed else f"FAILED ({verdict.reason})"
            took = f"{time.monotonic() - began:.0f} s"
            print(f"seed {seed}: {schedule}: {end}: {verdict.text}; {lost} steps done again, {took}", flush=True)
    print(f"{schedules - failed} of {schedules} schedules train as one undisturbed process")
    for by, text in CAUSES.items():
        if found := seconds[by]:
            middle, most = statistics.median(found), max(found)
            print(f"{len(found)} times from {text} to the next step: median {middle:.1f} s, largest {most:.1f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
