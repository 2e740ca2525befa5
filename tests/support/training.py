"""What the tests train: tiny models, their batches, any method run to its end here, and a plain GPT to judge them by.

plain_loss() and plain_losses() share nothing with harness/ and methods/ but the initial values: no modules, no
checkpoints, attention with an explicit mask, torch's default AdamW. What agrees with them is a GPT, trained.

Shapes: B batch, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.core.data import token_batches
from harness.core.job import Room, Workload
from harness.core.method import Method, Trained, create
from harness.devices.memory_account import Tracker
from harness.models.gpt import initial

STEPS = 20
EDGE = 2.0**18  # the smallest loss scale at which a gradient of overflowing() is not finite

# Tiny matrices gain nothing from threads, and threads that spin for a busy core make a test take minutes.
torch.set_num_threads(1)


class TrainingResult(NamedTuple):
    """Every step's loss and gradient norm, and what the method left behind."""

    losses: list[float]
    grad_norms: list[float]
    trained: Trained


def tiny(**changes: Any) -> Workload:
    """A model whose sizes fill no vector register evenly, at a learning rate that makes a stale weight show."""
    sizes = {
        "num_layers": 2,
        "hidden_size": 36,
        "num_heads": 3,
        "seq_len": 16,
        "batch_size": 2,
        "vocab_size": 101,
    }
    return Workload(**{**sizes, "learning_rate": 1.0, **changes})


def losses_free_and_at_the_peak(workload: Workload, **options: Any) -> tuple[list[float], list[float]]:
    """STRONGHOLD's losses on sim without budgets, and within budgets of that training's very peaks."""
    free, few_numbers = Tracker(), 64  # bytes that threads may or may not hold at the same moment
    with free:
        expected = train("stronghold", workload, 2, device="sim", **options).losses
    with Tracker(free.stats()["device_peak"], free.stats()["host_peak"] + few_numbers):
        return expected, train("stronghold", workload, 2, device="sim", **options).losses


def small_bytes(workload: Workload) -> int:
    """What a plan counts for many small tensors of the device: by layer 12 norms, some numbers of a step, and for each
    token of each head two floats."""
    tokens = workload.batch_size * workload.seq_len
    return 512 * (12 * workload.num_layers + 32) + 8 * workload.num_heads * tokens


def overflowing(**changes: Any) -> Workload:
    """fp16 with few words: the gradient of the embedding, which is known last, is the first to overflow."""
    sizes = {"num_layers": 5, "hidden_size": 32, "num_heads": 2, "vocab_size": 3, "batch_size": 8}
    return tiny(**{**sizes, "dtype": "fp16", **changes})


def settled(method: str, options: dict[str, Any], workload: Workload) -> Method:
    made = create(method, options)
    return made.settled(made.plan(workload, Room()))


def train(
    method: str, workload: Workload, steps: int = STEPS, device: str = "cpu", **options: Any
) -> TrainingResult:
    """Run a method to its end on the CPU, or on a device of it, seeded as the worker seeds it."""
    torch.manual_seed(workload.seed)
    batches = [(inputs.to(device), targets.to(device)) for inputs, targets in token_batches(workload, steps)]
    training = settled(method, options, workload).train(workload, batches, device)
    losses, norms = [], []
    while True:
        try:
            step = next(training)
        except StopIteration as end:
            return TrainingResult(losses, norms, end.value)
        assert step.grad_norm is not None
        losses.append(step.loss.item())
        norms.append(step.grad_norm.item())


def answers_within(monkeypatch: Any) -> list[bool]:
    """Grows by what each update ahead of the norm is told: whether the norm so far allows it."""
    from methods.offload.clip import Clip

    said: list[bool] = []
    is_within = Clip.is_within

    def spy(self: Clip) -> Any:
        answer = is_within(self)
        return lambda: said.append(answer()) or said[-1]

    monkeypatch.setattr(Clip, "is_within", spy)
    return said


@functools.cache
def train_resident(workload: Workload, steps: int = STEPS) -> TrainingResult:
    """Resident training, once per workload."""
    return train("resident", workload, steps)


def plain_weights(workload: Workload) -> dict[str, Tensor]:
    """Every parameter's fp32 starting value by its name, from a list of names and shapes written by hand."""
    size = workload.hidden_size
    shapes = {
        "ends.wte.weight": (workload.vocab_size, size),
        "ends.wpe.weight": (workload.seq_len, size),
        "ends.lnf.weight": (size,),
        "ends.lnf.bias": (size,),
    }
    for index in range(workload.num_layers):
        for norm in ("ln1", "ln2"):
            shapes |= {f"layers.{index}.{norm}.weight": (size,), f"layers.{index}.{norm}.bias": (size,)}
        for name, rows, columns in (
            ("qkv", 3 * size, size),
            ("proj", size, size),
            ("fc1", 4 * size, size),
            ("fc2", size, 4 * size),
        ):
            shapes |= {
                f"layers.{index}.{name}.weight": (rows, columns),
                f"layers.{index}.{name}.bias": (rows,),
            }
    return {name: initial(name, torch.Size(shape), workload) for name, shape in shapes.items()}


def plain_loss(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor, workload: Workload) -> Tensor:
    """The mean cross-entropy of the published GPT, without dropout."""
    x = weights["ends.wte.weight"][inputs] + weights["ends.wpe.weight"][: inputs.shape[1]]
    for index in range(workload.num_layers):
        layer = {
            name.split(".", 2)[2]: value
            for name, value in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        x = x + _linear(
            _attention(_linear(_norm(x, layer, "ln1"), layer, "qkv"), workload.num_heads), layer, "proj"
        )
        x = x + _linear(_gelu(_linear(_norm(x, layer, "ln2"), layer, "fc1")), layer, "fc2")
    logits = _norm(x, weights, "ends.lnf") @ weights["ends.wte.weight"].T
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (logits.exp().sum(-1).log() - chosen).mean()


def plain_losses(workload: Workload, steps: int) -> list[float]:
    """Every step's loss of a training loop as one would write it first: AdamW, clipping, linear warm-up."""
    weights = {name: value.requires_grad_() for name, value in plain_weights(workload).items()}
    groups = [
        {"params": [value for value in weights.values() if value.ndim == 2], "weight_decay": 0.01},
        {"params": [value for value in weights.values() if value.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step, (inputs, targets) in enumerate(token_batches(workload, steps), start=1):
        optimizer.zero_grad()
        loss = plain_loss(weights, inputs, targets, workload)
        loss.backward()
        if workload.clip_norm:
            torch.nn.utils.clip_grad_norm_(weights.values(), workload.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate * step / 3200
        optimizer.step()
        losses.append(loss.item())
    return losses


def _linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    scale = (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centered / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def _attention(qkv: Tensor, num_heads: int) -> Tensor:
    """Head by head, every token on itself and those before it. (B, T, 3 D) to (B, T, D)."""
    tokens, size = qkv.shape[1], qkv.shape[2] // 3
    head_size = size // num_heads
    is_future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mixed = []
    for start in range(0, size, head_size):
        query, key, value = (qkv[..., part * size + start :][..., :head_size] for part in range(3))
        scores = (query @ key.transpose(1, 2) / math.sqrt(head_size)).masked_fill(is_future, -math.inf)
        mixed.append(scores.softmax(-1) @ value)
    return torch.cat(mixed, dim=-1)
