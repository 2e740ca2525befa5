"""AutoConfig judged by reality: all configurations of the ranks here measured beside what a profile predicts.

    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.auto_config [--rounds 5]

Rounds of all configurations, so that a busy while of the machine hits each of them. Configurations whose replicas and
stages leave a rank idle are not measured.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

from methods.varuna import AutoConfig, CutPoint, Profiler, Varuna

WORDS, TOKENS, WIDTH, NUM_BLOCKS = 1000, 64, 128, 6


class Model(nn.Module):
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


@click.command()
@click.option("--batch-size", default=16)
@click.option("--rounds", default=5)
@click.option("--steps", default=4, help="Of a configuration in a round; the first one does not count.")
def main(batch_size: int, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    profiler = Profiler(Model())
    profiler.initialize(get_batch)
    with tempfile.TemporaryDirectory() as folder:
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= batch_size]
        profile = profiler.profile_all(get_batch, sizes, out_folder=folder)
        profile.write(folder)  # each rank's own folder
        config = AutoConfig(profiler.world_size, profiler.world_size, batch_size, folder)
    rows = [row for row in config.table() if row.num_stages * row.num_replicas == profiler.world_size]
    models, found = [], [[] for _ in rows]
    for row in rows:
        model = Varuna(Model(), row.stage_to_rank_map, get_batch, batch_size, row.chunk_size, cuts=row.cuts)
        model.set_optimizer(torch.optim.AdamW(model.parameters()))
        models.append(model)
    for _ in range(rounds):
        for row, model, seconds in zip(rows, models, found, strict=True):
            inputs = get_batch(batch_size // row.num_replicas)
            for step in range(steps):
                dist.barrier()
                began = time.perf_counter()
                model.step(inputs)
                model.optimizer.step()
                dist.barrier()
                if step:
                    seconds.append(time.perf_counter() - began)
    if profiler.rank == 0:
        measured = [statistics.median(seconds) for seconds in found]
        print("| stages | replicas | chunk size | predicted s | measured s | predicted / measured | over the best |")
        print("|---|---|---|---|---|---|---|")
        for row, seconds in zip(rows, measured, strict=True):
            shape = f"{row.num_stages} | {row.num_replicas} | {row.chunk_size}"
            ratio, over = row.step_seconds / seconds, seconds / min(measured) - 1
            print(f"| {shape} | {row.step_seconds:.3f} | {seconds:.3f} | {ratio:.2f} | {over:.1%} |")
        print(f"chosen: {config.get_min()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
