"""A GPT of one's own, cut into stages, on machines that come and go: it trains on the source of Python's library.

    printf '127.0.0.1\n127.0.0.1\n' > machines.txt
    ./run.sh varuna launch --machine-list machines.txt --batch-size 12 --nstages 2 --chunk-size 2 examples/own_gpt.py

Add lines to the list, or remove some, while it trains.
"""

from __future__ import annotations

import argparse
import inspect
import math
import signal
import sys
import tarfile
from typing import Any

import torch
from torch import Tensor, nn

from methods.varuna import CutPoint, Varuna

WORDS = 128  # characters


class Block(nn.Module):
    """One transformer block with a causal mask. (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, num_heads: int = 4) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.first_norm(x)).chunk(3, dim=2)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second_norm(x))


class Gpt(nn.Module):
    """With a CutPoint after each block: places where it may be cut."""

    def __init__(self, num_blocks: int, width: int, num_tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(num_tokens, width))
        nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.cutpoints = [CutPoint() for _ in range(num_blocks)]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight  # on both sides of a cut: see shared_weights below

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.words(inputs) + self.places
        for block, cutpoint in zip(self.blocks, self.cutpoints, strict=True):
            x = cutpoint(block(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Text:
    """Samples in an order that the number of the step alone decides: so a resumed job sees each one once."""

    def __init__(self, num_tokens: int) -> None:
        text = inspect.getsource(tarfile)
        self.codes, self.num_tokens = (
            torch.tensor([min(ord(letter), WORDS - 1) for letter in text]),
            num_tokens,
        )

    def batch(self, step: int, batch_size: int) -> dict[str, Any]:
        """The global batch of a step. (B, T) each."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.codes) - self.num_tokens - 1, (batch_size,), generator=generator)
        rows = torch.stack([self.codes[start : start + self.num_tokens + 1] for start in starts])
        return {"inputs": rows[:, :-1], "targets": rows[:, 1:]}


def learning_rate(step: int, num_steps: int) -> float:
    """Of steps counted from 0: warm-up, then a cosine."""
    return 3e-3 * min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * step / num_steps))


def main(model_class: type[nn.Module] = Gpt, text_class: type[Text] = Text) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)  # these six come from the launcher
    parser.add_argument("--local_rank", type=int, required=True)
    parser.add_argument("--stage_to_rank_map", required=True)
    parser.add_argument("--chunk_size", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)  # of this process
    parser.add_argument("--resume_step", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)  # these are the script's own
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--fp16", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small gain nothing from more threads
    text = text_class(args.tokens)
    num_replicas = len(args.stage_to_rank_map.split(";")[0].split(","))
    batch_size = args.batch_size * num_replicas
    model = Varuna(
        model_class(args.blocks, args.width, args.tokens),
        args.stage_to_rank_map,
        lambda size, device=None: text.batch(0, size),
        batch_size,
        args.chunk_size,
        args.fp16,
        args.local_rank,
        shared_weights=[("words.weight", "head.weight")],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model.set_optimizer(optimizer, init_loss_scale=2.0**12)
    if args.resume_step:
        model.load_checkpoint(step=args.resume_step)

    def handler(signum: int, frame: Any) -> None:
        """The launcher asks for a checkpoint; Varuna calls this between two steps."""
        model.checkpoint().result()
        sys.exit()

    signal.signal(signal.SIGUSR1, handler)

    for step in range(args.resume_step, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        mine = slice(model.replica * args.batch_size, (model.replica + 1) * args.batch_size)
        inputs = {name: value[mine] for name, value in text.batch(step, batch_size).items()}
        loss, overflow = model.step(inputs, clip_grad_max_norm=1.0)
        if not overflow:
            optimizer.step()
        if args.rank == 0:
            print(f"step {step + 1}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
