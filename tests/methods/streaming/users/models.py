"""Small models as users write them, and the oracle: the same script by plain PyTorch, each layer checkpointed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WORDS, TOKENS, WIDTH, HEADS, LAYERS = 61, 12, 32, 4, 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 10


class RootNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class LlamaLayer(nn.Module):
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU. Takes the angles by name, returns a tuple."""

    def __init__(self, ffn_size: int, kv_heads: int = 2) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.input_norm, self.post_norm = RootNorm(WIDTH), RootNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (
            nn.Linear(WIDTH, kv_heads * size, bias=False),
            nn.Linear(WIDTH, kv_heads * size, bias=True),
        )
        self.gate, self.up = nn.Linear(WIDTH, ffn_size, bias=False), nn.Linear(WIDTH, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, WIDTH, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor]:
        y = self.input_norm(x)
        q, k, v = (
            part(y).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = rotated(q, *angles), rotated(k, *angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.post_norm(x)
        return (x + self.down(F.silu(self.gate(y)) * self.up(y)),)


class Llama(nn.Module):
    """`ffn_sizes`: of each layer; unequal ones make unequal layers."""

    def __init__(self, ffn_sizes: tuple[int, ...] = (48,) * LAYERS, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(LlamaLayer(size) for size in ffn_sizes)
        self.norm, self.head = RootNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        size = WIDTH // HEADS
        self.register_buffer("rates", 1e4 ** -(torch.arange(0, size, 2) / size), persistent=False)
        self.recomputes = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        turns = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.rates.float()
        turns = torch.cat([turns, turns], dim=-1)
        angles = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
        for layer in self.layers:
            (x,) = called(self, layer, x, None, angles=angles)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def called(model: Any, layer: nn.Module, *args: Any, **options: Any) -> Any:
    return (
        checkpoint(layer, *args, use_reentrant=False, **options)
        if model.recomputes
        else layer(*args, **options)
    )


class Gpt2Layer(nn.Module):
    """LayerNorm, dropout, a causal mask in a buffer; a norm that may be shared; returns what it was told beside x."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), norm or nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril())

    def forward(self, x: Tensor, bias: Tensor | None = None) -> dict[str, Any]:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~self.mask, -1e4).softmax(-1)
        x = x + self.c_proj((scores @ v).transpose(1, 2).flatten(2))
        return {"x": x + self.mlp(self.ln_2(x)), "scores": scores.detach(), "name": "gpt2"}


class Gpt2(nn.Module):
    """`shares`: all layers use one norm, and a bias of the scores that the model hands to each of them."""

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        norm = nn.LayerNorm(WIDTH) if shares else None
        self.h = nn.ModuleList(Gpt2Layer(norm) for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS) / 10) if shares else None
        self.recomputes = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.h:
            x = called(self, layer, x, self.bias)["x"]
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1).float(), targets.flatten())


def llama() -> nn.Module:
    return Llama()


def tied() -> nn.Module:
    return Llama(tied=True)


def unequal() -> nn.Module:
    return Llama((48, 16, 96, 32, 64))


def gpt2() -> nn.Module:
    return Gpt2()


def shared() -> nn.Module:
    return Gpt2(shares=True)


MODELS = {model.__name__: model for model in (llama, tied, unequal, gpt2, shared)}


def new_model(name: str, dtype: str = "fp32") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(DTYPES[dtype])


def layers_of(model: Any) -> list[nn.Module]:
    return list(model.h if isinstance(model, Gpt2) else model.layers)


def batches(steps: int, parts: int = 1, device: str = "cpu") -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each step the tokens and targets of each micro-batch."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(WORDS, (parts, 2, TOKENS + 1), generator=generator).to(device)
        yield [(row[:, :-1], row[:, 1:]) for row in rows]


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """Three groups, with numbers of their own."""
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim > 2],
            "lr": 3e-3,
            "betas": (0.8, 0.95),
        },
        {"params": [parameter for parameter in parameters if parameter.ndim == 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, eps=1e-7, fused=True)


def schedule_of(optimizer: torch.optim.AdamW) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


class Course(NamedTuple):
    """A training's losses and gradient norms, and the fp32 weights that it leaves."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Course)
        same = self.weights.keys() == other.weights.keys()
        same = same and all(torch.equal(weight, other.weights[name]) for name, weight in self.weights.items())
        return same and (self.losses, self.norms) == (other.losses, other.norms)


def by_plain_torch(
    name: str,
    dtype: str = "fp32",
    clip: float = 1.0,
    *,
    parts: int = 1,
    steps: int = STEPS,
    scale: float = 1.0,
) -> Course:
    """The script without streaming: an fp32 master of each weight in bf16 and fp16."""
    model = new_model(name, dtype)
    model.recomputes = True
    names, weights = zip(*model.named_parameters(), strict=True)
    masters = (
        list(weights) if dtype == "fp32" else [nn.Parameter(weight.detach().float()) for weight in weights]
    )
    optimizer = optimizer_of(masters)
    schedule = schedule_of(optimizer)
    torch.manual_seed(7)
    losses, norms = [], []
    for step in batches(steps, parts):
        for tokens, targets in step:
            loss = model(tokens, targets) / parts
            (loss * scale).backward()
            losses.append(float(loss.detach()))
        if dtype != "fp32":
            for master, weight in zip(masters, weights, strict=True):
                master.grad, weight.grad = weight.grad.float() / scale, None
        norm = torch.nn.utils.clip_grad_norm_(masters, clip or math.inf)
        norms.append(float(norm))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dtype != "fp32":
            with torch.no_grad():
                torch._foreach_copy_(list(weights), [master.detach() for master in masters])
    return Course(losses, norms, {name: master.detach() for name, master in zip(names, masters, strict=True)})


def streamed(
    name: str,
    make: Callable[..., Any],
    dtype: str = "fp32",
    clip: float = 1.0,
    *,
    parts: int = 1,
    steps: int = STEPS,
    device: str = "cpu",
) -> Course:
    """The script with a trainer, which make() gives the model, its layers, an optimizer and options."""
    model = new_model(name, dtype)
    optimizer = optimizer_of(list(model.parameters()))
    schedule = schedule_of(optimizer)
    with make(model, layers_of(model), optimizer, max_norm=clip, device=device) as trainer:
        torch.manual_seed(7)
        losses, norms = [], []
        for step in batches(steps, parts, device):
            for tokens, targets in step:
                loss = model(tokens, targets) / parts
                trainer.scale(loss).backward()
                losses.append(float(loss.detach()))
            norms.append(float(trainer.step()))
            schedule.step()
        trainer.synchronize()
        weights = dict(model.named_parameters())
        if dtype != "fp32":
            weights = {key: state["master"] for key, state in trainer.named_states()}
        return Course(losses, norms, {key: weight.detach().cpu().clone() for key, weight in weights.items()})


def begun(
    make: Callable[..., Any], name: str = "llama", dtype: str = "fp32"
) -> tuple[Any, nn.Module, torch.optim.AdamW]:
    """A trainer before its first step, with the model and the optimizer that it was given."""
    model = new_model(name, dtype)
    optimizer = optimizer_of(list(model.parameters()))
    return make(model, layers_of(model), optimizer, max_norm=1.0, device="cpu"), model, optimizer
