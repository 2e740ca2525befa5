"""Measures which faults the gate detects in methods whose dropout drops other elements than the reference's.

The losses of a method with such dropout differ from the reference's. The gate divides this difference by the change
that dropout itself causes, and allows quotients up to a limit. Here a quotient is called a multiple. This script
measures the multiples of correct runs and of faults. The correct runs are those of megatron-lm, and of the reference
with another dropout seed. The faults of bench/faults/planted.py run with that other seed, too. The script judges only
the run itself; the gate's probe, which has no dropout, detects further faults. The script takes minutes on two cores;
`--case` runs only the cases with these names, as they are printed.

    .venv/bin/python -m bench.dropout_rule [--out results/dropout-rule.json] [--case "other seed 3"]
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.gate_power import SIZE, train_all
from harness.base.whole_file import write_whole
from harness.core.cpu_cores import available_cores
from harness.core.job import Job, Workload
from harness.core.record import Record
from harness.gate import evidence, limits
from harness.gate.departures import TENSOR_FAILURES
from harness.gate.verdict import judge

SIZES = [
    replace(SIZE, **{"dropout": 0.1, **changes})
    for changes in (
        {"num_layers": 2, "seed": 1},
        {"num_layers": 4, "seed": 2},
        {"num_layers": 1, "hidden_size": 32, "seed": 3},
        {"num_layers": 3, "hidden_size": 96, "num_heads": 6, "seq_len": 64, "vocab_size": 257, "seed": 4},
        {"num_layers": 2, "batch_size": 2, "seed": 5},
        {"num_layers": 2, "batch_size": 8, "seq_len": 16, "seed": 6},
        {"num_layers": 2, "hidden_size": 128, "seed": 7},
        {"num_layers": 2, "learning_rate": 0.01, "seed": 8},
        {"num_layers": 2, "dtype": "bf16", "seed": 9},
        {"num_layers": 2, "dtype": "fp16", "seed": 10},
        # The rule's limit was chosen without the cases below.
        {
            "num_layers": 3,
            "hidden_size": 48,
            "num_heads": 3,
            "seq_len": 48,
            "vocab_size": 300,
            "dropout": 0.01,
            "seed": 21,
        },
        {"num_layers": 2, "hidden_size": 80, "num_heads": 5, "vocab_size": 200, "dropout": 0.02, "seed": 22},
        {"num_layers": 5, "hidden_size": 48, "num_heads": 3, "batch_size": 3, "dropout": 0.05, "seed": 23},
        {"num_layers": 6, "hidden_size": 32, "num_heads": 2, "dropout": 0.003, "seed": 24},
        {"num_layers": 2, "hidden_size": 96, "num_heads": 6, "dropout": 0.3, "seed": 25},
        {"num_layers": 4, "hidden_size": 48, "num_heads": 3, "dropout": 0.01, "dtype": "bf16", "seed": 26},
        {"num_layers": 2, "hidden_size": 80, "num_heads": 5, "dropout": 0.03, "dtype": "bf16", "seed": 27},
        {"num_layers": 3, "hidden_size": 48, "num_heads": 3, "dropout": 0.01, "dtype": "fp16", "seed": 28},
    )
]
FAULTED = SIZES[1]
FAULTS = (
    "no dropout",
    "twice the probability",
    "five times the probability",
    "what stays is not scaled",
    "attention without dropout",
    "the same elements at each step",
    "other elements in recompute",
    "gradients doubled",
    "a layer's update skipped always",
    "a sample dropped",
    "no bias correction",
    "weights a step stale",
    "mask off by one",
    "tied gradient from the head only",
    "constant rate on some layers",
)


def ratio(record: Record, reference: Record, undropped: Record) -> tuple[float, str]:
    """Return the record's largest distance from the reference, as a multiple of the change that dropout itself causes,
    and the name of the fact that has this distance, such as loss.
    """
    floor = limits.rounding_floor(reference, [undropped]).alike()
    pairs_of_facts = {
        "loss": zip(
            evidence.relative_differences(record.losses, reference.losses), floor.losses, strict=True
        ),
        "norm": zip(
            evidence.relative_differences(record.grad_norms, reference.grad_norms), floor.norms, strict=True
        ),
    }
    multiples = {
        fact: max(distance / limit for distance, limit in pairs) for fact, pairs in pairs_of_facts.items()
    }
    for part, (reason, _) in TENSOR_FAILURES.items():
        distances = evidence.COMPARISONS[part](record, reference)
        multiples[f"{part} ({reason})"] = max(
            (distance / floor.tensors[part][name] for name, distance in distances.items()), default=0.0
        )
    worst = max(multiples, key=lambda fact: math.inf if math.isnan(multiples[fact]) else multiples[fact])
    return multiples[worst], worst


def job(method: str, size: Workload, **options: Any) -> Job:
    return Job(method, size, options, steps=20, warmup=0)


def references_of(case: Job) -> tuple[Job, Job]:
    """Return the reference's job, and the same without dropout."""
    return job("resident", case.workload), job("resident", replace(case.workload, dropout=0.0))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("results/dropout-rule.json"))
@click.option("--cores", type=int, default=available_cores())
@click.option(
    "--case",
    "chosen",
    multiple=True,
    metavar="NAME",
    help="Run only the case that the output prints under this name; may be repeated.",
)
def main(out: Path, cores: int, chosen: tuple[str, ...]) -> None:
    """Train all cases, or only the cases named in `chosen`; print each case's multiple, and write all multiples to the
    file `out`."""
    cases = [
        (f"megatron-lm {number}", job("megatron-lm", size)) for number, size in enumerate(SIZES, start=1)
    ]
    cases += [
        (f"other seed {n}", job("planted", size, dropout_seed=77)) for n, size in enumerate(SIZES, start=1)
    ]
    cases += [(fault, job("planted", FAULTED, dropout_seed=77, fault=fault)) for fault in FAULTS]
    names = [name for name, _ in cases]
    if unknown := set(chosen) - set(names):
        raise click.BadParameter(f"expected a case, got {min(unknown)!r}; try one of {', '.join(names)}")
    jobs = {name: case for name, case in cases if not chosen or name in chosen}
    references = [reference for case in jobs.values() for reference in references_of(case)]
    records = train_all([*jobs.values(), *references], cores)
    rows: list[dict[str, Any]] = []
    for name, case in jobs.items():
        record = records[case.key()]
        reference, undropped = (records[of_case.key()] for of_case in references_of(case))
        if record.status != "ok":
            print(f"left out: {name}: {record.status}: {record.reason}")
            continue
        times, where = ratio(record, reference, undropped)
        verdict = judge(record, reference, undropped=undropped).verdict
        print(f"{name:35} {times:8.2f}  {where:30} {verdict}", flush=True)
        written = round(times, 2) if math.isfinite(times) else None  # JSON has no infinity
        rows.append({"name": name, "times": written, "where": where, "verdict": verdict})
    write_whole(out, json.dumps({"allowed": limits.DROPOUT_MULTIPLE, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
