"""Two unlike models trained together by Hydra, on text that every Python has: the source of its own library.

One predicts the next character, the other the module that a line of code is from. To run it, optionally with the
number of processes on which the models alternate:

    .venv/bin/python examples/two_models.py 2
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import functools
import inspect
import sys
import tarfile
from types import ModuleType

import torch
from torch import Tensor, nn

from methods.hydra import ModelOrchestrator, ModelTask

MODULES: tuple[ModuleType, ...] = (argparse, datetime, decimal, tarfile)
TOKENS, WIDTH, BATCH, NUM_BATCHES = 32, 32, 8, 20


class Block(nn.Module):
    """One transformer block with a causal mask. (B, T, D) to (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.inner(x, mask, is_causal=True)


def next_character(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def characters(sources: list[str]) -> list[tuple[Tensor, Tensor]]:
    """Batches of (B, T) characters, and the characters that follow them."""
    codes = torch.tensor([min(ord(letter), 127) for letter in "".join(sources)])
    starts = torch.randint(
        len(codes) - TOKENS, (NUM_BATCHES, BATCH), generator=torch.Generator().manual_seed(1)
    )
    windows = [torch.stack([codes[start : start + TOKENS + 1] for start in row]) for row in starts]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def lines(sources: list[str]) -> list[tuple[Tensor, Tensor]]:
    """Batches of lines as counts of their letters, (B, 128), and the modules that the lines are from, (B,)."""
    found = [
        (line, module)
        for module, source in enumerate(sources)
        for line in source.splitlines()
        if len(line) > 30
    ]
    chosen = torch.randint(len(found), (NUM_BATCHES, BATCH), generator=torch.Generator().manual_seed(2))
    batches = []
    for row in chosen:
        counts = torch.zeros(BATCH, 128)
        for place, index in enumerate(row):
            for letter in found[index][0]:
                counts[place, min(ord(letter), 127)] += 1
        batches.append((counts, torch.tensor([found[index][1] for index in row])))
    return batches


def main(num_devices: int = 1) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small gain nothing from more threads
    sources = [inspect.getsource(module) for module in MODULES]
    writer = nn.Sequential(
        nn.Embedding(128, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)
    )
    reader = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, len(MODULES)))
    adamw = functools.partial(torch.optim.AdamW, weight_decay=0.01)
    tasks = [
        ModelTask("writer", writer, next_character, characters(sources), 3e-3, 2, adamw, max_norm=1.0),
        ModelTask("reader", reader, nn.functional.cross_entropy, lines(sources), 1e-3, 4, adamw),
    ]
    orchestrator = ModelOrchestrator(tasks, ["cpu"] * num_devices)
    for row in orchestrator.generate():
        print(
            f"{row['name']}: shards of {row['shards']} layers, {row['host_bytes'] / 2**20:.1f} MiB on the host"
        )
    report = orchestrator.train_models()
    for task in tasks:
        print(
            f"{task.name}: loss {task.losses[0]:.3f} at first, {task.losses[-1]:.3f} after {len(task.losses)} steps"
        )
    print(", ".join(f"{name} {value:.3g}" for name, value in report.summary.items()))


if __name__ == "__main__":
    words = sys.argv[1:]
    if len(words) > 1 or not all(word.isdecimal() and int(word) for word in words):
        print(
            f"error: expected one positive integer, the number of devices, got {' '.join(words)!r}",
            file=sys.stderr,
        )
        sys.exit(2)
    main(*map(int, words))
