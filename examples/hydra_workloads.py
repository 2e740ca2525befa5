"""Hydra's two workloads, scaled to minutes: twelve language models that differ in learning rate and batch size, on text
that every Python has, and twelve vision transformers on images that are made here.

    .venv/bin/python examples/hydra_workloads.py lm
    .venv/bin/python examples/hydra_workloads.py vit

Each model is a list of layers, so larger ones need a larger --layers and --width alone. The original's language models
have 48 layers of 1600.
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import Tensor, nn

from methods.hydra import ModelOrchestrator, ModelTask

RATES = (3e-1, 1e-1, 5e-2, 3e-2, 1e-2, 3e-3)
BATCH_SIZES = (16, 8)
# tokens a sample; of images: pixels a side, of a patch, kinds of pictures
TOKENS, SIDE, PATCH, CLASSES = 32, 16, 4, 4


class Block(nn.Module):
    """A transformer block, causal or not. (B, T, D) to (B, T, D)."""

    def __init__(self, width: int, is_causal: bool) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = (
            nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            if self.is_causal
            else None
        )
        return self.inner(x, mask, is_causal=self.is_causal)


class Patches(nn.Module):
    """Images (B, 1, SIDE, SIDE) to embedded patches with their positions, (B, T, D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(1, width, PATCH, PATCH)
        self.positions = nn.Parameter(torch.zeros((SIDE // PATCH) ** 2, width))

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2) + self.positions


class Mean(nn.Module):
    """The mean over the patches."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def language_model(layers: int, width: int) -> nn.Module:
    blocks = [Block(width, is_causal=True) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(128, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 128))


def vision_transformer(layers: int, width: int) -> nn.Module:
    blocks = [Block(width, is_causal=False) for _ in range(layers)]
    return nn.Sequential(Patches(width), *blocks, nn.LayerNorm(width), Mean(), nn.Linear(width, CLASSES))


def next_character(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def text(num_batches: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of (B, T) characters, and the characters that follow them."""
    codes = torch.tensor([min(ord(letter), 127) for letter in inspect.getsource(argparse)])
    starts = torch.randint(
        len(codes) - TOKENS, (num_batches, batch_size), generator=torch.Generator().manual_seed(1)
    )
    windows = [torch.stack([codes[start : start + TOKENS + 1] for start in row]) for row in starts]
    return [(window[:, :-1], window[:, 1:]) for window in windows]


def images(num_batches: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """Noisy stripes in CLASSES directions, and which."""
    generator = torch.Generator().manual_seed(2)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    pictures = torch.stack(
        [(each % 4 < 2).float() for each in (rows, columns, rows + columns, rows - columns)]
    )
    found = []
    for _ in range(num_batches):
        kinds = torch.randint(CLASSES, (batch_size,), generator=generator)
        noise = 0.5 * torch.randn(batch_size, SIDE, SIDE, generator=generator)
        found.append(((pictures[kinds] + noise)[:, None], kinds))
    return found


def tasks(kind: str, layers: int, width: int, num_batches: int) -> list[ModelTask]:
    """Six learning rates by two batch sizes, trained by SGD."""
    found = []
    for batch_size in BATCH_SIZES:
        for rate in RATES:
            torch.manual_seed(0)
            model = (language_model if kind == "lm" else vision_transformer)(layers, width)
            criterion = next_character if kind == "lm" else nn.functional.cross_entropy
            batches = (text if kind == "lm" else images)(num_batches, batch_size)
            found.append(ModelTask(f"{kind} b={batch_size} lr={rate:g}", model, criterion, batches, rate))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Train twelve models together by Hydra.")
    parser.add_argument("kind", choices=["lm", "vit"])
    for name, default in (("layers", 2), ("width", 32), ("batches", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from more threads
    together = tasks(asked.kind, asked.layers, asked.width, asked.batches)
    report = ModelOrchestrator(together).train_models()
    for task in sorted(together, key=lambda task: task.losses[-1]):
        print(
            f"{task.name}: loss {task.losses[0]:.3f} at first, {task.losses[-1]:.3f} after {len(task.losses)} steps"
        )
    print(", ".join(f"{name} {value:.3g}" for name, value in report.summary.items()))


if __name__ == "__main__":
    main()
