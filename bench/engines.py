"""Compares the step time and host peak of every method with those of `resident` on this machine: medians over rounds
in which the methods take turns.

    .venv/bin/python -m bench.engines [--rounds 3] [--results DIR] [-m METHOD[:OPTION=VALUE] ...] [--against METHOD]

The model has 8 layers, hidden size 512, sequence 256, batch 4, vocabulary 8192, fp32; every layer is recomputed. Prints
a table in Markdown. Each ratio compares a method's run with the run of `resident` in the same round.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import click

from cli.job_options import parse_option
from harness.core import method
from harness.core.job import Job, Workload, gib
from harness.core.record import Record
from harness.devices import machine
from harness.gate.probe import NONE
from harness.jobs.sweep import Sweep
from harness.plan.fit import Planned, resolve

WORKLOAD = Workload(num_layers=8, hidden_size=512, num_heads=8, seq_len=256, batch_size=4, vocab_size=8192)


@click.command()
@click.option("--rounds", default=3)
@click.option("--steps", default=8)
@click.option("--results", type=click.Path(path_type=Path))
@click.option("-m", "chosen", multiple=True, help="Run this method and the reference; default: all methods.")
@click.option(
    "--against",
    default=method.reference(),
    help="Method by whose step times the others are divided: a name, or a value given to -m.",
)
def main(rounds: int, steps: int, results: Path | None, chosen: tuple[str, ...], against: str) -> None:
    reference = method.reference()
    others = list(chosen) or [name for name in method.names() if name != reference]
    plans = {text: planned(text, steps) for text in (reference, *others)}
    measured: dict[str, list[Record]] = {text: [] for text in (reference, *others)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = results or Path(temporary)
        folder.mkdir(exist_ok=True)
        for turn in range(rounds):
            # Every other round runs the methods in reverse order. The reference always runs first, because the gate
            # judges by its record.
            order = list(measured) if turn % 2 == 0 else [reference, *others[::-1]]
            records = Sweep(folder, rerun=True, probe=NONE).run([plans[text] for text in order])
            for text, record in zip(order, records, strict=True):
                measured[text].append(record)
                print(
                    f"  round {turn + 1}: {text}: {record.status}, {record.median_step_seconds}", flush=True
                )
    print(f"\n{machine.facts()['cpu']}, {machine.facts()['cores']} cores, {rounds} rounds of {steps} steps\n")
    print(
        f"| method | options | s/step | ratio to {against}: median (range) | host peak | gate |\n"
        "|---|---|---|---|---|---|"
    )
    references = next(
        records for text, records in measured.items() if against in (text, text.partition(":")[0])
    )
    for records in measured.values():
        print(row(records, references))


def planned(text: str, steps: int) -> Planned:
    """Return the planned job of `text`, which is METHOD or METHOD:OPTION=VALUE,OPTION=VALUE."""
    name, _, options = text.partition(":")
    given = dict(parse_option(pair) for pair in options.split(",") if pair)
    return resolve(Job(name, WORKLOAD, options=given, steps=steps, warmup=3))


def row(records: list[Record], references: list[Record]) -> str:
    last = records[-1]
    name = last.job.method
    options = ", ".join(f"{key}={value}" for key, value in last.job.options.items())
    pairs = [
        (ours.median_step_seconds, theirs.median_step_seconds)
        for ours, theirs in zip(records, references, strict=True)
        if ours.status == "ok" and ours.median_step_seconds and theirs.median_step_seconds
    ]
    if not pairs:
        return f"| {name} | {options} | {last.status} | | | {last.reason} |"
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    return (
        f"| {name} | {options} | {statistics.median(ours for ours, _ in pairs):.3f} |"
        f" {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        f" {gib(statistics.median(record.host_peak_bytes for record in records))} | {last.gate.verdict} |"
    )


if __name__ == "__main__":
    main()
