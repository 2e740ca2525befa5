"""Finds the memory use of a layer that computes in blocks of tokens (harness/models/token_blocks.py), for the fields
that harness/core/anatomy.py holds.

At first a narrow layer is computed in blocks and as a whole. If the outputs or gradients differ, the model's layer
computes as a whole, without blocks. It also does so if its attention keeps the scores of all pairs of tokens: beside
these scores, an MLP's tensors are small.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from harness.base.child_process import limit_memory
from harness.core import hub_config
from harness.core.job import Workload
from harness.models import model, token_blocks
from harness.models.gpt import DTYPES
from harness.plan.layer_memory import TOKENS, is_plain, peak, sample_tokens
from harness.plan.sketch import GRADIENT_TOLERANCE, MOST_BYTES, SAMPLES, count_unused, narrow, num_shown

# tokens of each block in the narrow layer; TOKENS is no multiple of PROVED, so the last block is shorter
PROVED = 5
FEW, MANY = 8, 32  # numbers of blocks at which a layer's memory is measured
LARGER = 16  # each of the MANY blocks has LARGER times `block_tokens` tokens, so that the sample is long


def sketch(workload: Workload, block_tokens: int, index: int = 0) -> dict[str, Any] | None:
    """Return the fields of TokenBlocks of layer `index`, or None if it computes as a whole."""
    layer = model.new_layer(workload, index)
    parts = token_blocks.parts_of(layer, workload.hidden_size)
    if not parts or is_plain(workload) or not computes_alike(narrow(workload), parts, index):
        return None
    weights = [weight for name in parts for weight in layer.get_submodule(name).parameters()]
    unused = count_unused(layer)
    layer(torch.empty((1, TOKENS, workload.hidden_size), device="meta"))
    matrix_params = sum(weight.numel() for weight in weights if weight.ndim > 1)
    return {
        "parts": parts,
        "token_flops": 2 * (matrix_params - sum(unused.values())),
        "lines": block_lines(workload, parts, block_tokens, index),
    }


def computes_alike(workload: Workload, parts: list[str], index: int) -> bool:
    """True if a layer that computes in blocks has the output and the gradients of the whole layer, except for
    rounding."""
    torch.manual_seed(1)
    layer, weights = model.new_layer(workload, index), []
    for name, weight in list(layer.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        weights.append(nn.Parameter(torch.randn(weight.shape)))
        setattr(layer.get_submodule(owner), leaf, weights[-1])
    x, dy = torch.randn(2, SAMPLES, TOKENS, workload.hidden_size)
    x.requires_grad_()

    def output_and_gradients() -> list[Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, [x, *weights], dy)]

    expected_tensors = output_and_gradients()
    token_blocks.set_blocks(layer, parts, PROVED, 0)
    pairs = [*zip(expected_tensors, output_and_gradients(), strict=True)]
    sizes = [float(expected.detach().norm()) for expected, _ in pairs]
    # some gradients are zero but for rounding, so the error of each is compared with the largest gradient
    sizes[1:] = [max(sizes[1:])] * len(sizes[1:])
    return all(
        float((in_blocks - expected).detach().norm()) <= GRADIENT_TOLERANCE * size
        for size, (expected, in_blocks) in zip(sizes, pairs, strict=True)
    )


def block_lines(
    workload: Workload, parts: list[str], block_tokens: int, index: int
) -> list[tuple[float, int]]:
    """Return two lines, which are linear functions of the bytes of the layer's input, each as (factor, bytes to add).
    The layer's memory is the larger of their two values.

    The first line is the memory of the MLP's backward pass. The second line is the memory of the rest of the backward
    pass, which is attention. With many blocks the second line is higher, because one block's memory is small beside
    attention's.
    """
    length, dtype = sample_tokens(workload), DTYPES[workload.dtype]
    sample = length * workload.hidden_size * dtype.itemsize

    def taken(samples: int, at_once: int, below: str | None = None) -> int:
        layer = model.new_layer(workload, index)
        token_blocks.set_blocks(layer, parts, at_once, 0)
        return peak(layer, (samples, length, workload.hidden_size), dtype, below)

    few, one, many = (-(-count * block_tokens // length) for count in (FEW, 1, MANY * LARGER))
    base = taken(few, block_tokens)
    inputs = (taken(few + one, block_tokens) - base) / (one * sample)
    below = taken(many, LARGER * block_tokens, token_blocks.MLP) / (many * sample)
    return [(inputs, round(base - inputs * few * sample)), (below, 0)]


def main() -> None:
    """Entry point for child_process.ask(): reads JSON with `config`, `is_half`, `block_tokens`, `layers` (indices) and,
    for adapters, fields of a Workload from standard input, and prints {"blocks": for each of these layers the fields of
    TokenBlocks, or null}."""
    question = json.load(sys.stdin)
    limit_memory(MOST_BYTES)
    config, is_half, layers = (question.pop(name) for name in ("config", "is_half", "layers"))
    block_tokens, sizes = question.pop("block_tokens"), hub_config.sizes_of(config)
    dtype = "bf16" if is_half else "fp32"
    workload = Workload(**sizes, seq_len=TOKENS, dtype=dtype, config=json.dumps(config), **question)
    shown = workload.at_depth(num_shown(workload, layers))
    print(json.dumps({"blocks": [sketch(shown, block_tokens, index) for index in layers]}))


if __name__ == "__main__":
    main()
