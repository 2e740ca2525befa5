"""An encoder of one's own, cut into stages, that predicts masked characters; all else is as in own_gpt.py.

./run.sh varuna launch --machine-list machines.txt --batch-size 12 --nstages 2 --chunk-size 2 examples/own_bert.py
"""

from __future__ import annotations

from typing import Any

import torch
from own_gpt import WORDS, Text, main
from torch import Tensor, nn

from methods.varuna import CutPoint

MASKED, MASK = 8, 0  # every eighth character of a sample, and what stands in its place


class Bert(nn.Module):
    """With a CutPoint after each block."""

    def __init__(self, num_blocks: int, width: int, num_tokens: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(num_tokens, width))
        nn.init.normal_(self.words.weight, std=0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(num_blocks)
        )
        self.cutpoints = [CutPoint() for _ in range(num_blocks)]
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.words(inputs) + self.places
        for block, cutpoint in zip(self.blocks, self.cutpoints, strict=True):
            x = cutpoint(block(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class MaskedText(Text):
    """The mean over micro-batches is that of the whole batch, because each sample has as many masked characters."""

    def batch(self, step: int, batch_size: int) -> dict[str, Any]:
        inputs = super().batch(step, batch_size)["inputs"].clone()
        order = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(step)).argsort(dim=1)
        masked = order < inputs.shape[1] // MASKED
        targets = inputs.where(masked, -100)  # which the loss leaves out
        return {"inputs": inputs.masked_fill(masked, MASK), "targets": targets}


if __name__ == "__main__":
    main(Bert, MaskedText)
