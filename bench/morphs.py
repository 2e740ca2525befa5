"""Tests morphs (a job changes its number of ranks while it trains) by random schedules of machines that leave, come and
die. All machines are simulated on this machine.

    .venv/bin/python -m bench.morphs [--schedules 30] [--first 0]

A schedule's seed determines the number of machines at the start, the changes, and when they happen. Machines come or
leave by an edit of the list of machines, leave after SIGTERM, or die by kill -9. The launcher may die by kill -9, too;
it is then started again. Each job must have the losses of one undisturbed process.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import click

from bench.judge_launch import Verdict, judge_folder
from cases._morphs import (
    CAUSES,
    CHECKPOINT_EVERY,
    Change,
    MorphedJob,
    Schedule,
    run_morphing_job,
    run_undisturbed_job,
)
from methods.pipeline.launch.folder import read_lines

MOST_MACHINES = 4
TEXTS = {
    "death": "a machine's death",
    "launcher": "the launcher's death",
    "list": "a change of the list",
    "notice": "a notice by SIGTERM",
}


def random_schedule(seed: int, num_steps: int) -> Schedule:
    """Return the schedule of this seed: three to five changes of machines before the last step."""
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


@click.command()
@click.option("--schedules", default=30)
@click.option("--first", default=0, help="Seed of the first schedule.")
@click.option("--steps", default=40)
def main(schedules: int, first: int, steps: int) -> None:
    failed = 0
    seconds: dict[str, list[float]] = {by: [] for by in CAUSES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = run_undisturbed_job(folder / "alone", steps)
        for seed in range(first, first + schedules):
            schedule, mine, began = random_schedule(seed, steps), folder / str(seed), time.monotonic()
            job = MorphedJob(0, {}, "")
            try:
                job = run_morphing_job(mine, schedule, steps)
                verdict = judge_folder(mine / "job", alone, CHECKPOINT_EVERY)
                if job.exit_code:
                    verdict = Verdict("exit-code", f"exit code {job.exit_code}:\n{job.output}")
            except TimeoutError as error:
                verdict = Verdict("timeout", str(error))
            for by, morph_seconds in job.pause_seconds.items():
                seconds[by] += morph_seconds
            failed += not verdict.passed
            lost = len(read_lines(mine / "job" / "lost_steps.jsonl"))
            end = "passed" if verdict.passed else f"FAILED ({verdict.reason})"
            took = f"{time.monotonic() - began:.0f} s"
            print(
                f"seed {seed}: {schedule}: {end}: {verdict.text}; {lost} steps done again, {took}", flush=True
            )
    print(f"{schedules - failed} of {schedules} schedules train as one undisturbed process")
    for by, text in TEXTS.items():
        if morph_seconds := seconds[by]:
            middle, most = statistics.median(morph_seconds), max(morph_seconds)
            print(
                f"{len(morph_seconds)} times from {text} to the next step: median {middle:.1f} s, largest {most:.1f} s"
            )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
