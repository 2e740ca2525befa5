"""The gate for morphs, by schedules of machines that leave, come and die, on this machine.

    .venv/bin/python -m bench.morphs [--schedules 30] [--first 0]

Machines are agents of their own here, with one rank each. Each random schedule has a seed, of which its first number of
machines, its changes and their moments follow: some leave or come by the list, some die by kill -9 without a word, and
so does the launcher, which is started again. Each job must train as one process that nothing disturbed.
"""

from __future__ import annotations

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
from methods.pipeline.launch.folder import read_lines
from methods.pipeline.launch.judge import Verdict, judge_folder

SCRIPT = ROOT / "bench" / "paced_gpt.py"
SMALL = ("--blocks", "3", "--width", "32", "--tokens", "16")
FAST, SLOW = "0", "0.7"  # seconds that a step takes at least: slow ones while machines come
BATCH_SIZE, NUM_STAGES, CHUNK_SIZE, CHECKPOINT_EVERY = 12, 2, 2, 10
MOST_MACHINES = 4
LIMIT_SECONDS = 240.0


class Change(NamedTuple):
    """After this step: so many machines are to be there; those that go leave by the list, or die."""

    step: int
    num_machines: int
    by: str = "list"  # or death, launcher: its death, with the number of machines as it was


class Played(NamedTuple):
    code: int
    recoveries: list[float]  # seconds from a death to the next step
    morphs: list[float]  # seconds from a change of the list to the next round's first step
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

    def kill(self, number: int) -> None:
        name = f"127.0.0.{number + 1}"
        agents = [line["agent"] for line in self.events("came") if line["machine"] == name]
        os.kill(agents[-1], signal.SIGKILL)

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


def command(machines: Machines, script: Sequence[str]) -> list[str]:
    return [
        sys.executable, "-m", "methods.varuna.run", "--machine_list", str(machines.list), "--gpus_per_node", "1",
        "--batch-size", str(BATCH_SIZE), "--nstages", str(NUM_STAGES), "--chunk_size", str(CHUNK_SIZE),
        "--checkpoint-every", str(CHECKPOINT_EVERY), "--folder", str(machines.job), str(SCRIPT), *script,
    ]  # fmt: skip


def play(folder: Path, num_machines: int, changes: Sequence[Change], num_steps: int, script: Sequence[str]) -> Played:
    """One job, with these changes. Raises TimeoutError where it does not go on."""
    machines = Machines(folder, num_machines)
    machines.pace.write_text(FAST)
    call = command(machines, [*script, "--steps", str(num_steps)])
    environment = child_environment() | {"PACE_FILE": str(machines.pace), "OMP_NUM_THREADS": "1"}
    recoveries: list[float] = []
    morphs: list[float] = []
    with open(folder / "output.txt", "w") as output:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(call, stdout=output, stderr=output, cwd=ROOT, env=environment)

        running = start()
        try:
            for change in changes:
                _wait(lambda: machines.steps and machines.steps[-1]["step"] >= change.step, running)  # noqa: B023
                if running.poll() is not None:
                    break
                machines.pace.write_text(SLOW)
                began = time.time()
                if change.by == "death":
                    for number in range(change.num_machines, machines.num_machines):
                        machines.kill(number)
                elif change.by == "launcher":
                    running.kill()
                    running.wait()
                    running = start()
                else:
                    machines.set(change.num_machines)
                machines.pace.write_text(FAST if change.by != "list" else SLOW)
                _wait(lambda: machines.next_step(began), running)  # noqa: B023
                (morphs if change.by == "list" else recoveries).append(machines.next_step(began) - began)
                machines.set(change.num_machines)
                machines.pace.write_text(FAST)
            running.wait(LIMIT_SECONDS)
        finally:
            if running.poll() is None:
                running.terminate()
                running.wait()
    return Played(running.returncode, recoveries, morphs, (folder / "output.txt").read_text())


def _wait(until: Callable[[], Any], running: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while running.poll() is None and not until():
        if time.monotonic() > limit:
            raise TimeoutError(f"the job did not go on in {LIMIT_SECONDS:g} s")
        time.sleep(0.05)


def random_schedule(seed: int, num_steps: int) -> tuple[int, list[Change]]:
    """The first number of machines, and three to five changes."""
    draws = random.Random(seed)
    first = now = draws.randint(1, MOST_MACHINES)
    steps = sorted(draws.sample(range(2, num_steps - 2), draws.randint(3, 5)))
    changes = []
    for step in steps:
        kind = draws.choice(("come", "leave", "death", "death", "launcher"))
        if kind == "launcher":
            changes.append(Change(step, now, "launcher"))
            continue
        if (kind == "come" and now < MOST_MACHINES) or now == 1:
            now = draws.randint(now + 1, MOST_MACHINES)
            changes.append(Change(step, now))
        else:
            now = draws.randint(1, now - 1)
            changes.append(Change(step, now, "death" if kind == "death" else "list"))
    return first, changes


def undisturbed(folder: Path, num_steps: int, script: Sequence[str]) -> Path:
    """The same job by one process."""
    played = play(folder, 1, [], num_steps, script)
    if played.code:
        raise RuntimeError(f"the undisturbed job ended with exit code {played.code}:\n{played.output}")
    return folder / "job"


@click.command()
@click.option("--schedules", default=30)
@click.option("--first", default=0, help="Seed of the first schedule.")
@click.option("--steps", default=40)
def main(schedules: int, first: int, steps: int) -> None:
    failed, deaths, morphs = 0, [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = undisturbed(folder / "alone", steps, SMALL)
        for seed in range(first, first + schedules):
            num_machines, changes = random_schedule(seed, steps)
            began = time.monotonic()
            try:
                played = play(folder / str(seed), num_machines, changes, steps, SMALL)
                verdict = judge_folder(folder / str(seed) / "job", alone, CHECKPOINT_EVERY)
                deaths += played.recoveries
                morphs += played.morphs
                if played.code:
                    verdict = Verdict("exit-code", f"exit code {played.code}:\n{played.output}")
                slowest = f"{max(played.recoveries):.1f} s" if played.recoveries else "no death"
            except TimeoutError as error:
                verdict, slowest = Verdict("timeout", str(error)), "none"
            failed += not verdict.passed
            told = " ".join(f"{change.by}:{change.num_machines}@{change.step}" for change in changes)
            lost = len(read_lines(folder / str(seed) / "job" / "lost_steps.jsonl"))
            end = "passed" if verdict.passed else f"FAILED ({verdict.reason})"
            print(f"seed {seed}: {num_machines} machines, {told}: {end}: {verdict.text}; {lost} steps done again,"
                  f" slowest recovery {slowest}, {time.monotonic() - began:.0f} s", flush=True)  # fmt: skip
    print(f"{schedules - failed} of {schedules} schedules train as one undisturbed process")
    for what, seconds in (("a death", deaths), ("a change of the list", morphs)):
        if seconds:
            print(f"{len(seconds)} times from {what} to the next step: median {statistics.median(seconds):.1f} s,"
                  f" largest {max(seconds):.1f} s")  # fmt: skip
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
