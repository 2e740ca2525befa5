"""Measures on a CPU how much slower the harness is than a bare training loop, and how much slower STRONGHOLD is than
resident training.

    .venv/bin/python -m bench.cpu [--rounds 7]

Prints two ratios of step times at 8 layers, hidden size 512, sequence 256, batch 4: harness's loop / bare loop of the
same model, and STRONGHOLD (window 2) / resident training. In each round the two sides of a ratio take turns; a ratio is
the median over rounds. Also prints the seconds from the start of a process to the end of its first step.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import click
import torch

from harness.core import data
from harness.core.job import Job, Workload
from harness.core.record import Record
from harness.models.gpt import adamw
from harness.models.model import build
from harness.run import worker
from harness.run.launch import launch

LARGE = Workload(num_layers=8, hidden_size=512, num_heads=8, seq_len=256, batch_size=4, vocab_size=8192)
SMALL = Workload(num_layers=4, hidden_size=256, num_heads=8, seq_len=128, batch_size=4, vocab_size=2048)


def bare_step_seconds(workload: Workload, steps: int) -> list[float]:
    """Return the step times, in seconds, of a plain training loop without the harness."""
    tokens = torch.from_numpy(data.batches(workload, steps))
    model = build(workload)
    optimizer = adamw(model.parameters())
    seconds = []
    for step, batch in enumerate(tokens, start=1):
        began = time.perf_counter()
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - began)
    return seconds


def harness_step_seconds(workload: Workload, steps: int) -> list[float]:
    with contextlib.redirect_stdout(io.StringIO()):
        record = worker.train_here(Job("resident", workload, steps=steps), "bench", (), lambda event: None)
    return record.step_seconds


def compare(title: str, ours, theirs, rounds: int) -> None:
    """Measure `ours` and `theirs` in turns, and print the ratio ours / theirs. A measurement is one run's median step
    time, in seconds, after three warm-up steps.
    """
    pairs = []
    for _ in range(rounds):
        pairs.append(tuple(statistics.median(measure()[3:]) for measure in (ours, theirs)))
        print(f"  {title}: {pairs[-1][0]:.4f} s to {pairs[-1][1]:.4f} s", flush=True)
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    print(
        f"{title}: {medians[0]:.4f} s to {medians[1]:.4f} s a step, ratio of medians {medians[0] / medians[1]:.3f},"
        f" median of {rounds} ratios {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )


@click.command()
@click.option("--rounds", default=7)
def main(rounds: int) -> None:
    first_steps = []
    with tempfile.TemporaryDirectory() as folder:

        def run(method: str, **options: int) -> list[float]:
            record = Record.read(launch(Job(method, LARGE, options, steps=10), lambda: "bench", Path(folder)))
            assert record.status == "ok", record.reason
            first_steps.append(record.first_step_seconds)
            return record.step_seconds

        compare(
            "harness loop to bare loop",
            lambda: harness_step_seconds(SMALL, 20),
            lambda: bare_step_seconds(SMALL, 20),
            3 * rounds,
        )
        compare(
            "stronghold to resident",
            lambda: run("stronghold", window_size=2, resident_layers=0),
            lambda: run("resident"),
            rounds,
        )
    print(
        f"process start to end of first step: {statistics.median(first_steps):.2f} s, median of {len(first_steps)}"
    )


if __name__ == "__main__":
    main()
