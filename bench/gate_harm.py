"""Measures which faults in the path of bf16 alone are more than a rounding, and how many of these the gate sees.

Each fault of gate_power.path_cases("bf16") trains 150 steps on the reference's batches: at the published schedule, and
at RATE, at which the reference learns the most in 150 steps (of 1e-3, 2e-3, 4e-3 and so on). Half of the tokens
follow from the token before, so there is much to learn: at RATE the mean loss of the last 30 steps is far below the
entropy of single tokens. Honest runs, the reference and one run with each of the roundings of
methods/shared/roundings.py, scatter around the mean of their losses. A fault is more than a rounding if it ends, at one
of the two rates and in either direction, more than FACTOR times as far from this mean as the farthest honest run. What
shows at RATE is not trained at the published schedule.

    .venv/bin/python -m bench.gate_harm [--out FILE] [--cores 1]
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bench import gate_power
from bench.gate_power import SEEDS, UNSEEN, PowerCase
from harness.base.whole_file import write_whole
from harness.core.cpu_cores import available_cores
from harness.core.job import Job
from harness.core.record import Record
from methods.shared.roundings import ROUNDINGS

STEPS, LAST = 150, 30
RATE = {"learning_rate": 4e-3, "lr_warmup_steps": STEPS // 10, "lr_decay_steps": STEPS}
RATES: dict[str, dict[str, Any]] = {"learning": RATE, "published": {}}  # by name: fields of the workload
# Of 26 honest runs whose losses scatter normally, the farthest is about 2 standard deviations off. One honest run in
# 15,000 is 4 deviations off. The gate, too, names what is beyond twice the roundings' distance (NAMING).
FACTOR = 2.0
SIZE = dataclasses.replace(gate_power.SIZE, dtype="bf16")
# By seed and name, a method and its options. Roundings that the gate's floor includes train with the first seed only.
HONEST: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    seed: {"reference": ("resident", {}), **{name: ("planted", {"rounding": name}) for name in names}}
    for seed, names in zip(SEEDS, (ROUNDINGS, UNSEEN), strict=True)
}


def jobs_of(method: str, options: dict[str, Any], seed: int) -> dict[str, Job]:
    """Return, by the name of the rate, the jobs of 150 steps."""
    loads = {name: dataclasses.replace(SIZE, seed=seed, **fields) for name, fields in RATES.items()}
    return {name: Job(method, load, options, steps=STEPS, warmup=0) for name, load in loads.items()}


def of_case(case: PowerCase) -> dict[str, Job]:
    return jobs_of(case.method, case.options, case.seed)


def losses_of(jobs: dict[str, Job], records: dict[str, Record]) -> dict[str, float]:
    """Return, by the name of the rate, the mean loss of the last steps of each job that trained."""
    trained = {name: records[job.key()] for name, job in jobs.items() if job.key() in records}
    return {name: statistics.fmean(record.losses[-LAST:]) for name, record in trained.items()}  # type: ignore


def departures(losses: dict[str, float], center: dict[str, float]) -> dict[str, float]:
    return {name: loss / center[name] - 1 for name, loss in losses.items()}


def figures(cases: Sequence[PowerCase], records: dict[str, Record]) -> dict[str, Any]:
    """Return how far honest runs and faults depart, which faults are more than a rounding, and which the gate sees."""
    honest, centers = {}, {}
    for seed, runs in HONEST.items():
        losses = {name: losses_of(jobs_of(*run, seed), records) for name, run in runs.items()}
        centers[seed] = {name: statistics.fmean(each[name] for each in losses.values()) for name in RATES}
        honest |= {f"{name} {seed}": departures(each, centers[seed]) for name, each in losses.items()}
    most = {name: max(abs(each[name]) for each in honest.values()) for name in RATES}
    faults: dict[str, dict[str, Any]] = {}
    for case in cases:
        found = departures(losses_of(of_case(case), records), centers[case.seed])
        verdict = gate_power.outcome(case, records).verdicts["cpu"]
        times = max(abs(far) / most[name] for name, far in found.items())
        faults[case.fault] = {
            **found,
            "times": times,
            "seen": verdict.verdict == "failed",
            "said": verdict.text,
        }
    harmful = {fault: row for fault, row in faults.items() if row["times"] > FACTOR}
    return {
        "harmful": len(harmful),
        "seen": sum(row["seen"] for row in harmful.values()),
        "unseen": [fault for fault, row in harmful.items() if not row["seen"]],
        "others": len(faults) - len(harmful),
        "others_seen": sum(row["seen"] for fault, row in faults.items() if fault not in harmful),
        "most_of_honest": most,
        "losses": centers,
        "faults": faults,
        "honest": honest,
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("results/gate-harm.json"))
@click.option("--cores", type=int, default=available_cores())
def main(out: Path, cores: int) -> None:
    """Train all, print a line for each fault, those that lose most first, and write the numbers to a file."""
    started = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = [case for case in gate_power.path_cases("bf16") if gate_power.is_trainable(case)]
    jobs = [job for case in cases for job in case.jobs()]
    jobs += [
        job for seed, runs in HONEST.items() for run in runs.values() for job in jobs_of(*run, seed).values()
    ]
    jobs += [of_case(case)["learning"] for case in cases]
    records = gate_power.train_all(jobs, cores)
    found = figures(cases, records)
    left = [case for case in cases if found["faults"][case.fault]["times"] <= FACTOR]
    found = figures(
        cases, records | gate_power.train_all([of_case(case)["published"] for case in left], cores)
    )
    seconds = round(time.monotonic() - started)
    write_whole(out, json.dumps({**found, "factor": FACTOR, "seconds": seconds, "cores": cores}, indent=1))
    for fault, row in sorted(found["faults"].items(), key=lambda item: -item[1]["times"]):
        print(
            f"{row['times']:9.1f} times {'seen' if row['seen'] else 'UNSEEN':6} {fault}: {row['said'][:80]}"
        )
    print(
        f"{found['seen']} of {found['harmful']} faults that are more than a rounding are seen; {seconds} s: {out}"
    )


if __name__ == "__main__":
    main()
