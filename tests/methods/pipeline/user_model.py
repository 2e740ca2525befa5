"""A user's model with CutPoints, its data, and its training by one process: what a pipeline is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WORDS, TOKENS, WIDTH, NUM_BLOCKS = 11, 8, 16, 4
SHARED = [("wte.weight", "head.weight")]
LEARNING_RATE, MAX_NORM = 0.01, 0.5


class Block(nn.Module):
    """Its code may depend on the data: it is not traced."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask.is_meta and bool(mask.any()):
            x = x + self.dropout(self.linear(self.norm(x))) * mask[..., None]
        return x


class Writer(nn.Module):
    """A model whose head is its embedding, with a CutPoint after each block, in a plain list."""

    def __init__(self, dropout: float = 0.0, *, is_tied: bool = True) -> None:
        from methods.pipeline.cut import CutPoint  # as it is now: with a bug planted, it is loaded afresh

        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS))
        self.cutpoints: list[nn.Module] = [CutPoint() for _ in range(NUM_BLOCKS)]
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.wte.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        mask: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        if scale is not None:
            x = x * scale
        if bias is not None:
            x = x + bias
        for block, cutpoint in zip(self.blocks, self.cutpoints, strict=True):
            x = cutpoint(block(x, mask))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def make(**options: Any) -> Writer:
    torch.manual_seed(0)
    return Writer(**options)


def batch(step: int, size: int) -> dict[str, Any]:
    """Some items of batch 1, and a None, which go to every micro-batch."""
    draws = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (size, TOKENS), generator=draws)
    mask = torch.rand(size, TOKENS, generator=draws) > 0.3
    return {
        "input_ids": ids,
        "labels": ids.roll(1, 1),
        "mask": mask,
        "scale": torch.full((1, 1, 1), 1.5),
        "bias": None,
    }


def share(whole: dict[str, Any], replica: int, num_replicas: int) -> dict[str, Any]:
    """A replica's samples of a batch."""

    def mine(value: Any) -> Any:
        return (
            value.chunk(num_replicas)[replica] if isinstance(value, Tensor) and value.shape[0] > 1 else value
        )

    return {name: mine(value) for name, value in whole.items()}


def train_alone(steps: int, batch_size: int) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Losses, norms before clipping, and the trained weights."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(step, batch_size))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: weight.flatten().tolist() for name, weight in model.state_dict().items()}


class Draws:
    """The random numbers of several processes, in one: only one draws at a time."""

    def __init__(self, num_stages: int) -> None:
        self.states, self.stage = [], 0
        for stage in range(num_stages):
            torch.manual_seed(stage)
            self.states.append(torch.get_rng_state())

    def go_to(self, stage: int) -> None:
        self.states[self.stage], self.stage = torch.get_rng_state(), stage
        torch.set_rng_state(self.states[stage])


class Passage(nn.Module):
    """In the place of an active CutPoint: from here on another process draws."""

    def __init__(self, draws: Draws, stage: int) -> None:
        super().__init__()
        self.draws, self.stage = draws, stage

    def forward(self, x: Tensor) -> Tensor:
        self.draws.go_to(self.stage)
        return x


def train_with_dropout(
    steps: int, batch_size: int, chunk_size: int, active: list[int], dropout: float
) -> tuple[list[float], list[float]]:
    """Losses and norms of one process without recompute, which draws as the stages between the active cuts do."""
    model = make(dropout=dropout)
    draws = Draws(len(active) + 1)
    torch.set_rng_state(draws.states[0])
    for stage, number in enumerate(active, start=1):
        model.cutpoints[number] = Passage(draws, stage)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, norms = [], []
    num_chunks = batch_size // chunk_size
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(0.0)
        whole = batch(step, batch_size)
        for number in range(num_chunks):
            draws.go_to(0)
            loss = model(**share(whole, number, num_chunks)) / num_chunks
            loss.backward()
            losses[-1] += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return losses, norms
