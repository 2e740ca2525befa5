"""Runs one job by turns on this machine and in a container, and compares the medians of the step time, of the time of
the whole call, and of the host's peaks by kind of memory.

.venv/bin/python -m bench.places --image IMAGE [--rounds 5]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from harness.core.job import Job, Workload
from harness.devices import machine
from harness.gate.probe import NONE
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from places.docker import Docker

WORKLOAD = Workload(num_layers=4, hidden_size=256, num_heads=8, seq_len=128, batch_size=4, vocab_size=2048)
PEAKS = ("host_anonymous", "host_shared")


@click.command()
@click.option("--image", required=True)
@click.option("--rounds", default=5)
@click.option("--steps", default=20)
def main(image: str, rounds: int, steps: int) -> None:
    planned = resolve(Job("resident", WORKLOAD, steps=steps, warmup=3))
    places: dict[str, Any] = {"here": None, "in a container": Docker(image)}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in places}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for name in places if turn % 2 == 0 else reversed(places):
                started = time.monotonic()
                (record,) = Sweep(Path(folder), rerun=True, place=places[name], probe=NONE).run([planned])
                found = {
                    "step_seconds": record.median_step_seconds,
                    "call_seconds": time.monotonic() - started,
                }
                found |= {f"{kind}_mib": record.peaks[kind] / 2**20 for kind in PEAKS}
                measured[name].append(found)
                print(
                    f"  round {turn + 1}, {name}: { ({key: round(value, 4) for key, value in found.items()}) }",
                    flush=True,
                )
    print(f"\n{machine.facts()['cpu']}, {machine.facts()['cores']} cores, {rounds} rounds of {steps} steps\n")
    heads = list(measured["here"][0])
    print(f"| where | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for name, found in measured.items():
        print(
            f"| {name} | {' | '.join(f'{statistics.median(each[head] for each in found):.4g}' for head in heads)} |"
        )


if __name__ == "__main__":
    main()
