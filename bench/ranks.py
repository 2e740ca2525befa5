"""Checks that every method trains on several ranks as on one. Call: python -m bench.ranks [--results DIR] [--out FILE].

Each method trains a GPT of 4 layers, hidden size 64, on 2 and 4 ranks, in fp32, at learning rates up to 3e-3, clipped
at every step; Megatron-LM trains with each kind of parallelism. The table shows the gate's verdict, and how far losses
and gradient norms differ from those of `resident` on the whole batch: the largest relative differences. A repeated call
runs only the jobs that have no result yet.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.base.console import print_table
from harness.core import method
from harness.core.job import LR_WARMUP_STEPS, Job, Workload
from harness.core.record import Record
from harness.gate.probe import NONE
from harness.jobs.progress import reporter
from harness.jobs.sweep import Sweep
from harness.jobs.verdict_table import Table, write_markdown
from harness.plan.fit import resolve

STEPS, LAST_RATE = 10, 3e-3
WORKLOAD = Workload(
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    seq_len=32,
    batch_size=4,
    vocab_size=512,
    learning_rate=LAST_RATE * LR_WARMUP_STEPS / STEPS,
    clip_norm=0.1,
)
# By method, additional jobs: the number of ranks and the options. If the options use fewer ranks, replicas split the
# batch.
SPLITS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "megatron-lm": [
        (2, {"distributed_optimizer": True}),
        (2, {"tensor_parallel": 2}),
        (2, {"tensor_parallel": 2, "sequence_parallel": True}),
        (2, {"pipeline_parallel": 2}),
        (4, {"pipeline_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
        (4, {"pipeline_parallel": 4}),
        (4, {"tensor_parallel": 2, "sequence_parallel": True, "distributed_optimizer": True}),
    ],
    "varuna": [(2, {"num_stages": 2}), (4, {"num_stages": 2}), (4, {"num_stages": 4})],
    "stronghold": [(2, {"placement": "R2W2"}), (4, {"placement": "R2W2"})],
    "zero-infinity-nvme": [(2, {"pipelined": False})],
}
HEADS = ("method", "ranks", "options", "verdict", "losses", "gradient norms")


def jobs() -> Iterator[Job]:
    """Yield the reference's job, then all jobs of the methods that support several ranks."""
    yield Job(method.reference(), WORKLOAD, device="cpu", steps=STEPS, warmup=2)
    for name in method.having("world_size"):
        splits = [(2, {}), (4, {}), *SPLITS.get(name, [])]
        for num_ranks, options in sorted(splits, key=lambda split: split[0]):
            yield Job(
                name, WORKLOAD, {"world_size": num_ranks, **options}, device="cpu", steps=STEPS, warmup=2
            )


def difference(values: list[float], expected: list[float]) -> str:
    """Return the largest relative difference of any step as text; "-" if the numbers of steps differ."""
    if not values or len(values) != len(expected):
        return "-"
    return f"{max(abs(one - other) / abs(other) for one, other in zip(values, expected, strict=True)):.1e}"


def row(asked: Job, record: Record, reference: Record) -> tuple[str, ...]:
    others = ", ".join(f"{name}={value}" for name, value in asked.options.items() if name != "world_size")
    ended = record.gate.verdict if record.status == "ok" else f"{record.status}: {record.reason}"
    differences = (
        difference(record.losses, reference.losses),
        difference(record.grad_norms, reference.grad_norms),
    )
    return asked.method, str(asked.world_size), others, ended, *differences


@contextlib.contextmanager
def sweeping(results: Path | None) -> Iterator[Sweep]:
    """Yield a Sweep that writes records into the folder `results`; None: into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, reporter(as_json=False) as report:
        into = results or Path(folder)
        into.mkdir(parents=True, exist_ok=True)
        yield Sweep(into, report=report, probe=NONE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="folder of the runs' records; default: a temporary one")
    parser.add_argument("--out", type=Path, help="file of the table, in Markdown")
    given, asked = parser.parse_args(), list(jobs())
    with sweeping(given.results) as sweep:
        records = sweep.run([resolve(job) for job in asked])
    found = [row(job, record, records[0]) for job, record in zip(asked[1:], records[1:], strict=True)]
    print_table(HEADS, found, numbers=HEADS[-2:])
    title = "Ranks beside one process: the largest relative difference of any of 10 steps, fp32"
    if given.out:
        write_markdown(given.out, "python -m bench.ranks", Table(title, HEADS, found))


if __name__ == "__main__":
    main()
