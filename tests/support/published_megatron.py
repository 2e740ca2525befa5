"""The published artifact's Megatron-LM, as memory: its operations in its order, on tensors that have sizes only.

Megatron-LM 2.6 as it ran in July 2022: fp32, every layer checkpointed, no fused kernel in reach (fp32 rules out its
softmax, PYTORCH_JIT=0 the others), dropout 0.1, gradients in one contiguous buffer for good, Apex' Adam. Written from
what the published logs and sources say, to be held against the log: 29,775.17 MiB at 32 layers.

Shapes: B batch, T tokens, D hidden, N heads, V vocabulary; activations are (T, B, D), as there.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.core.job import Workload
from harness.devices.memory_account import SIM_NAME
from harness.devices.memory_rehearsal import STEPS, Prediction, without_memory

DROPOUT = 0.1


def published_megatron(workload: Workload) -> Prediction:
    """Peak bytes of its training on the device."""
    started = time.perf_counter()
    with without_memory() as tracker:
        model = _Model(workload)
        for _ in range(STEPS):
            model.step()
        stats = tracker.stats()
    return Prediction(stats["device_peak"], 0, time.perf_counter() - started)


class _Model:
    """Parameters with a view of the gradient buffer and two moments each."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        size, wide = workload.hidden_size, 4 * workload.hidden_size
        layer = [(size,), (size,), (3 * size, size), (3 * size,), (size, size), (size,)]
        layer += [(size,), (size,), (wide, size), (wide,), (size, wide), (size,)]
        ends = [(workload.vocab_size, size), (workload.seq_len, size), (size,), (size,)]
        self.ends = [self._parameter(shape) for shape in ends]
        self.layers = [[self._parameter(shape) for shape in layer] for _ in range(workload.num_layers)]
        self.parameters = [*self.ends, *(parameter for layer in self.layers for parameter in layer)]
        self.buffer = torch.zeros(sum(parameter.numel() for parameter in self.parameters), device=SIM_NAME)
        self.moments: list[Tensor] = []
        end = 0
        for parameter in self.parameters:
            start, end = end, end + parameter.numel()
            _add_to_buffer(parameter, self.buffer[start:end].view(parameter.shape))

    @staticmethod
    def _parameter(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device=SIM_NAME, requires_grad=True)

    def step(self) -> None:
        workload = self.workload
        tokens = torch.empty(workload.batch_size, workload.seq_len, dtype=torch.int64, device=SIM_NAME)
        mask = torch.empty(1, 1, workload.seq_len, workload.seq_len, dtype=torch.bool, device=SIM_NAME)
        self.buffer.zero_()
        word, position, norm, norm_bias = self.ends
        x = _dropout(F.embedding(tokens, word) + F.embedding(tokens[0], position))
        x = x.transpose(0, 1).contiguous()
        for number, layer in enumerate(self.layers, start=1):
            x = checkpoint(
                _layer,
                layer,
                x,
                mask,
                number,
                workload.num_heads,
                use_reentrant=True,
                preserve_rng_state=False,
            )
        x = F.layer_norm(x, x.shape[-1:], norm, norm_bias).transpose(0, 1).contiguous()
        losses: Any = _CrossEntropy.apply(F.linear(x, word), tokens)
        losses.mean().backward()
        if not self.moments:
            self.moments = [torch.zeros_like(parameter) for parameter in self.parameters for _ in range(2)]


def _add_to_buffer(parameter: Tensor, room: Tensor) -> None:
    def add(filled: Tensor) -> None:
        assert filled.grad is not None
        room.add_(filled.grad)
        filled.grad = None

    parameter.register_post_accumulate_grad_hook(add)


def _layer(weights: list[Tensor], x: Tensor, mask: Tensor, number: int, num_heads: int) -> Tensor:
    ln1, ln1_bias, qkv, qkv_bias, proj, proj_bias, ln2, ln2_bias, fc1, fc1_bias, fc2, fc2_bias = weights
    normed = F.layer_norm(x, x.shape[-1:], ln1, ln1_bias)
    mixed = _attention(F.linear(normed, qkv, qkv_bias), mask, number, num_heads)
    x = x + _dropout(F.linear(mixed, proj) + proj_bias)
    normed = F.layer_norm(x, x.shape[-1:], ln2, ln2_bias)
    wide: Any = _BiasGelu.apply(F.linear(normed, fc1), fc1_bias)
    return x + _dropout(F.linear(wide, fc2) + fc2_bias)


def _attention(qkv: Tensor, mask: Tensor, number: int, num_heads: int) -> Tensor:
    """Scores of every pair of tokens, (B N, T, T), masked in place; scaled by the layer's number, as there."""
    tokens, batch, _ = qkv.shape
    query, key, value = (
        part.view(tokens, batch * num_heads, -1).transpose(0, 1)
        for part in qkv.view(tokens, batch, num_heads, -1).chunk(3, dim=-1)
    )
    scores = torch.empty(batch * num_heads, tokens, tokens, device=SIM_NAME)
    scale = 1 / (math.sqrt(query.shape[-1]) * number)
    scores = torch.baddbmm(scores, query, key.transpose(1, 2), beta=0.0, alpha=scale)
    scores = (scores.view(batch, num_heads, tokens, tokens) * number).masked_fill_(mask, -10000.0)
    weights: Any = _Softmax.apply(scores)
    probabilities = _dropout(weights)
    mixed = torch.bmm(probabilities.view(batch * num_heads, tokens, tokens), value)
    return mixed.view(batch, num_heads, tokens, -1).permute(2, 0, 1, 3).contiguous().flatten(2)


def _dropout(x: Tensor) -> Tensor:
    """With a mask of one byte an element, as on CUDA."""
    return torch.native_dropout(x, DROPOUT, True)[0]


class _Softmax(torch.autograd.Function):
    """As in torch 1.10, which kept the input, too, and did not need it (pytorch/pytorch#64000)."""

    @staticmethod
    def forward(context: Any, scores: Tensor) -> Tensor:
        weights = torch.softmax(scores, dim=-1)
        context.save_for_backward(scores, weights)
        return weights

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        _, weights = context.saved_tensors
        return torch._softmax_backward_data(gradient, weights, -1, weights.dtype)


class _BiasGelu(torch.autograd.Function):
    """GELU by tanh of input and bias, both kept; every operation on its own."""

    @staticmethod
    def forward(context: Any, y: Tensor, bias: Tensor) -> Tensor:
        context.save_for_backward(y, bias)
        x = y + bias
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        y, bias = context.saved_tensors
        x = y + bias
        tanh = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh)
        return slope * gradient, (slope * gradient).sum(dim=(0, 1))


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token; softmax and its gradient take the logits' place."""

    @staticmethod
    def forward(context: Any, logits: Tensor, targets: Tensor) -> Tensor:
        highest = logits.max(dim=-1)[0]
        logits.sub_(highest.unsqueeze(-1))
        flat = logits.view(-1, logits.shape[-1])
        chosen = flat[torch.arange(flat.shape[0], device=SIM_NAME), targets.flatten()].view_as(targets)
        total = torch.exp(logits, out=logits).sum(dim=-1)
        logits.div_(total.unsqueeze(-1))
        context.save_for_backward(logits, targets)
        return torch.log(total) - chosen

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        softmax, targets = context.saved_tensors
        flat = softmax.view(-1, softmax.shape[-1])
        flat[torch.arange(flat.shape[0], device=SIM_NAME), targets.flatten()] -= 1.0
        return softmax.mul_(gradient.unsqueeze(-1)), None
