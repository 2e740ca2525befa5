"""Compares AutoConfig's predictions with measured steps, for all configurations of the ranks on this machine.

    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 4 -m bench.auto_config [--rounds 8]

Each round measures a profile, then the steps of all configurations, so that other load on the machine slows all of them
alike. The report compares each prediction with the measured steps of the same round, and each configuration with the
best configuration over all rounds. Configurations that leave a rank idle are not measured: class Varuna takes all ranks
of the process group, so each number of ranks would need its own processes and profiles, at another time.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import click
import scipy.stats
import torch
import torch.distributed as dist
from torch import Tensor, nn

from methods.varuna import AutoConfig, CutPoint, Profiler, Varuna

WORDS, TOKENS, WIDTH, NUM_BLOCKS = 1000, 64, 128, 6


class MeasuredModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(NUM_BLOCKS)
        )
        self.cutpoints = [CutPoint() for _ in range(NUM_BLOCKS)]

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block, cutpoint in zip(self.blocks, self.cutpoints, strict=True):
            x = cutpoint(block(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def get_batch(size: int, device: Any = None) -> dict[str, Tensor]:
    input_ids = torch.randint(WORDS, (size, TOKENS))
    return {"input_ids": input_ids, "labels": input_ids.roll(1, 1)}


def ratio(these: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the rounds' ratios (value of `these` / value of `others` in the same round), and
    both ends of the mean's 95 % t-interval."""
    logs = [math.log(one / other) for one, other in zip(these, others, strict=True)]
    middle = statistics.mean(logs)
    half = scipy.stats.t.ppf(0.975, len(logs) - 1) * statistics.stdev(logs) / len(logs) ** 0.5
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def report(
    rows: Sequence[tuple[int, ...]], predicted: Sequence[list[float]], measured: Sequence[list[float]]
) -> None:
    """Print the report. `rows`: stages, replicas and micro-batch size of each configuration. `predicted`, `measured`:
    each configuration's seconds by round.
    """
    middles = [statistics.median(seconds) for seconds in measured]
    best = min(range(len(rows)), key=lambda number: middles[number])
    print(
        "| stages x replicas | chunk | predicted s | measured s | predicted / measured | over the best, 95 % |"
    )
    print("|---|---|---|---|---|---|")
    for number in sorted(range(len(rows)), key=lambda number: middles[number]):
        stages, replicas, chunk = rows[number]
        foretold, *_ = ratio(predicted[number], measured[number])
        over, low, high = ratio(measured[number], measured[best])
        told = "" if number == best else f"{over - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})"
        seconds = f"{statistics.median(predicted[number]):.3f} | {middles[number]:.3f}"
        print(f"| {stages} x {replicas} | {chunk} | {seconds} | {foretold:.2f} | {told} |")
    middle = [[statistics.median(seconds)] * len(seconds) for seconds in predicted]
    for what, given in (("each round's own profile", predicted), ("all profiles", middle)):
        chosen = [min(range(len(rows)), key=at.__getitem__) for at in map(list, zip(*given, strict=True))]
        over, low, high = ratio(
            [measured[number][turn] for turn, number in enumerate(chosen)], measured[best]
        )
        names = sorted({rows[number] for number in chosen})
        print(f"chosen by {what}: {names}, {over - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}) over the best")


@click.command()
@click.option("--batch-size", default=12)
@click.option("--rounds", default=6)
@click.option("--steps", default=10, help="Timed steps of each configuration in each round.")
def main(batch_size: int, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    profiler = Profiler(MeasuredModel())
    profiler.initialize(get_batch)
    sizes = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    world_size, models = profiler.world_size, dict[tuple[int, ...], Varuna]()
    predicted: dict[tuple[int, ...], list[float]] = {}
    measured: dict[tuple[int, ...], list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            profile = profiler.profile_all(get_batch, sizes, out_folder=folder)
            table = AutoConfig(world_size, world_size, batch_size, profile).table()
        for row in table:
            key = (row.num_stages, row.num_replicas, row.chunk_size)
            if row.num_stages * row.num_replicas == world_size:
                predicted.setdefault(key, []).append(row.step_seconds)
        if not models:
            for row in table:
                if (key := (row.num_stages, row.num_replicas, row.chunk_size)) in predicted:
                    model = Varuna(
                        MeasuredModel(),
                        row.stage_to_rank_map,
                        get_batch,
                        batch_size,
                        row.chunk_size,
                        cuts=row.cuts,
                    )
                    model.set_optimizer(torch.optim.AdamW(model.parameters()))
                    models[key] = model
        seconds: dict[tuple[int, ...], list[float]] = {key: [] for key in models}
        for step in range(steps + 1):
            for key, model in models.items():
                inputs = get_batch(batch_size // key[1])
                dist.barrier()
                began = time.perf_counter()
                model.step(inputs)
                model.optimizer.step()
                dist.barrier()
                if step:
                    seconds[key].append(time.perf_counter() - began)
        for key, each in seconds.items():
            measured.setdefault(key, []).append(statistics.median(each))
    if profiler.rank == 0:
        keys = [*models]
        report(keys, [predicted[key] for key in keys], [measured[key] for key in keys])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
