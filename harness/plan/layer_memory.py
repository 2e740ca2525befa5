"""Measures what a layer of a model takes of the device's memory beside its weights, and what the model takes beside its
layers, on tensors without memory.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from harness.core import hub_config
from harness.core.job import Workload
from harness.devices.memory_account import SIM_NAME
from harness.devices.memory_rehearsal import without_memory
from harness.models import grouped_experts, model
from harness.models.gpt import DTYPES
from harness.models.hub_model import HubEnds, parts_of

TOKENS = 16  # of a sample of the narrow model; a sliding window that samples exceed is sketched with fewer
COUNTED_TOKENS = (64, 128)  # lengths of the two samples whose operations are counted
# Number of tokens in which activations are measured. It is so large that a weight's memory is negligible beside the
# activations' memory.
MEASURED_TOKENS = 2**16
GPT_COLUMNS = 256  # hidden size of the published GPT whose layer with adapters is measured
# Likewise, the fewest and the most tokens of a mixture of experts. The gradients of its matrices are as large as the
# activations of many more tokens than a dense layer's.
FEW_TOKENS, MANY_TOKENS = 16, 2**20
# How often the range between the lowest and the highest line of a mixture's memory is divided by a further line, and
# then both parts: 3 times give at most 7 lines.
MOST_DIVISIONS = 3
SAME_SHARE = 1e-3  # a line that is higher than others by a smaller share is left out
LEAST_FIXED = 2**16  # bytes; matrices whose gradients are smaller need no further line
MOST_SAMPLE_TOKENS = 1024  # most tokens of one sample while activations are measured
# likewise, if attention stores the scores and masks of all pairs of a sample's tokens
MOST_PAIRED_TOKENS = 256


def is_beyond(workload: Workload) -> bool:
    """True if the model is sketched for samples beyond its sliding window, which is then shorter than TOKENS."""
    return hub_config.is_beyond_window(parts_of(workload).base.config.to_dict(), TOKENS)


def are_masked(workload: Workload) -> list[bool]:
    """Return, for each layer, whether the model's loop passes it a mask: a tensor with an element for each pair of
    tokens."""
    tokens = TOKENS + 1  # an odd number, which is no width of a tensor of angles
    x = torch.zeros((), dtype=DTYPES[workload.dtype]).expand(1, tokens, workload.hidden_size)
    heard, pair = parts_of(workload).heard(x), (tokens, tokens)
    return [
        any(isinstance(leaf, Tensor) and leaf.shape[-2:] == pair for leaf in tree_leaves(arguments))
        for arguments in heard
    ]


def is_plain(workload: Workload) -> bool:
    """True if attention stores the scores of all pairs of tokens, as transformers' eager attention does."""
    return bool(parts_of(workload).base.config._attn_implementation == "eager")


def keeps_pairs(workload: Workload, index: int) -> bool:
    """True if the attention of layer `index` may store something for each pair of tokens: its scores, or its mask in
    another dtype."""
    return is_plain(workload) or (is_beyond(workload) and are_masked(workload)[index])


def activation_memory(workload: Workload, index: int) -> dict[str, Any]:
    """Return the memory of activations of layer `index` in this workload's dtype, as fields of a LayerKind."""
    tokens = sample_tokens(workload)
    if grouped_experts.experts_of(model.new_layer(workload, index)):
        return mixture_layer_memory(workload, index, tokens)
    return dense_layer_memory(workload, index, tokens)


def dense_layer_memory(workload: Workload, index: int, tokens: int) -> dict[str, Any]:
    """Return the memory of activations of a dense layer, as activation_memory() does. `tokens`: the length of a
    sample."""
    at_all, pair = boundaries(workload, index, tokens), 0.0
    if keeps_pairs(workload, index):
        # a second length tells which part of the memory grows with a sample's length
        pair = (at_all - boundaries(workload, index, tokens // 2)) / (tokens - tokens // 2)
    return {"boundaries": at_all - pair * tokens, "pair_boundaries": pair, "lines": []}


def mixture_layer_memory(workload: Workload, index: int, tokens: int) -> dict[str, Any]:
    """Return the memory of activations of a mixture of experts, as activation_memory() does, where the gradients of the
    experts' matrices are no smaller than the activations of many tokens. `tokens`: the length of a sample."""
    lines = [(factor, 0.0, fixed) for factor, fixed in memory_lines(workload, index, tokens)]
    factor, pair = max(lines)[0], 0.0
    if keeps_pairs(workload, index):
        # then one line above all, because each line would grow otherwise with a sample's length
        pair = (factor - max(memory_lines(workload, index, tokens // 2))[0]) / (tokens - tokens // 2)
        factor -= pair * tokens
        lines = [(factor, pair, max(fixed for _, _, fixed in lines))]
    return {"boundaries": factor, "pair_boundaries": pair, "lines": lines}


def memory_lines(workload: Workload, index: int, tokens: int) -> list[tuple[float, int]]:
    """Return lines (factor, fixed): the recompute and backward pass of layer `index` on an input of x bytes takes at
    most the largest of factor * x + fixed bytes. At few tokens it is the line with the gradients of the experts'
    matrices, at many tokens the line with the activations. `tokens`: the length of the samples, shorter if there is
    only one."""
    dtype = DTYPES[workload.dtype]
    token_bytes = workload.hidden_size * dtype.itemsize

    def taken(num_tokens: int) -> int:
        length = min(tokens, num_tokens)
        size = (num_tokens // length, length, workload.hidden_size)
        return peak(model.new_layer(workload, index), size, dtype)

    def line_at(num_tokens: int, step: int) -> tuple[float, int]:
        at_first, at_second = taken(num_tokens), taken(num_tokens + step)
        factor = (at_second - at_first) / (step * token_bytes)
        return factor, round(at_first - factor * num_tokens * token_bytes)

    def between(low: tuple[float, int], high: tuple[float, int], divisions: int) -> list[tuple[float, int]]:
        """Return the lines that are above both lines `low` and `high` where these meet. `divisions`: how often the
        range between both is divided."""
        if divisions == 0 or high[0] <= low[0] or low[1] - high[1] < LEAST_FIXED:
            return []
        meeting = (low[1] - high[1]) / ((high[0] - low[0]) * token_bytes)
        num_tokens = max(1, round(meeting / tokens)) * tokens if meeting > tokens else max(1, round(meeting))
        if taken(num_tokens) <= (1 + SAME_SHARE) * (low[0] * num_tokens * token_bytes + low[1]):
            return []
        line = line_at(num_tokens, min(num_tokens, tokens))
        return [*between(low, line, divisions - 1), line, *between(line, high, divisions - 1)]

    low = line_at(FEW_TOKENS, FEW_TOKENS)
    # half as many where layers may have two masks, which have memory
    many = MANY_TOKENS // 2 if is_beyond(workload) else MANY_TOKENS
    high = line_at(many, many)
    return [low, *between(low, high, MOST_DIVISIONS), high]


def gpt_adapter_memory(targets: str) -> dict[str, tuple[float, float]]:
    """Return, by dtype, the memory of activations of a layer of the published GPT with adapters of its linear modules
    `targets`: two numbers a and b, so that the memory is (a + b * rank / hidden size) times the layer's input."""

    def measured(dtype: str, rank: int) -> float:
        workload = Workload(
            num_layers=1,
            hidden_size=GPT_COLUMNS,
            num_heads=GPT_COLUMNS // 64,
            dtype=dtype,
            lora=str(rank),
            lora_targets=targets,
        )
        return boundaries(workload, 0, MOST_SAMPLE_TOKENS)

    memory = {}
    for name, dtype in (("fp32", "fp32"), ("half", "bf16")):
        at_low, at_high = measured(dtype, 1), measured(dtype, GPT_COLUMNS // 4)
        per_share = (at_high - at_low) / (1 / 4 - 1 / GPT_COLUMNS)
        memory[name] = (at_low - per_share / GPT_COLUMNS, per_share)
    return memory


def sample_tokens(workload: Workload) -> int:
    """Return the number of tokens of each sample on which activations are measured."""
    config = hub_config.parsed(str(workload.config))
    may_exceed = is_beyond(workload)
    limits = ("max_position_embeddings",) if may_exceed else ("sliding_window", "max_position_embeddings")
    most = min(config.get(name) or MOST_SAMPLE_TOKENS for name in limits)
    return min(MOST_PAIRED_TOKENS if may_exceed or is_plain(workload) else MOST_SAMPLE_TOKENS, most)


def boundaries(workload: Workload, index: int, tokens: int) -> float:
    """Return the peak memory of the recompute and backward pass of layer `index`, divided by the bytes of the layer's
    input. `tokens`: the length of a sample."""
    size, dtype = (MEASURED_TOKENS // tokens, tokens, workload.hidden_size), DTYPES[workload.dtype]
    return peak(model.new_layer(workload, index), size, dtype) / (math.prod(size) * dtype.itemsize)


def peak(layer: nn.Module, size: tuple[int, int, int], dtype: torch.dtype, below: str | None = None) -> int:
    """Return the most bytes that the recompute and backward pass of a layer hold beside its weights. `size`: the shape
    (B, T, D) of the input. `below`: name of a child; the peak is then taken only after the backward pass of this child
    has ended; None: the whole pass. Weight gradients are freed one by one, so at most one of them counts."""
    with without_memory() as tracker:

        def when_passed(child: nn.Module, args: tuple[Tensor]) -> None:
            args[0].register_hook(lambda grad: tracker.reset_peaks())

        if below is not None:
            layer.get_submodule(below).register_forward_pre_hook(when_passed)
        has_adapters = not all(weight.requires_grad for weight in layer.parameters())
        for name, weight in list(layer.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            # an adapter is fp32 beside weights in half precision
            weight_dtype = torch.float32 if has_adapters and weight.requires_grad else dtype
            room = torch.empty(weight.shape, dtype=weight_dtype, device=SIM_NAME)
            parameter = nn.Parameter(room, requires_grad=weight.requires_grad)
            if weight.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
            setattr(layer.get_submodule(owner), leaf, parameter)
        weights = tracker.stats()["device_allocated"]
        x = torch.empty(size, dtype=dtype, device=SIM_NAME, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False)
        dy = torch.empty_like(y)
        torch.autograd.backward(y, dy)
        return tracker.stats()["device_peak"] - weights


def model_memory(workload: Workload) -> dict[str, Any]:
    """Return the memory of activations beside the layers in this workload's dtype, as fields of an Anatomy."""
    return {"head_boundaries": head_boundaries(workload), **given_bytes(workload)}


def head_boundaries(workload: Workload) -> float:
    """Return the memory that the norm before the head keeps for its backward pass, divided by the bytes of the norm's
    input. The norm's input and output themselves do not count."""
    ends, dtype = HubEnds(workload), DTYPES[workload.dtype]
    with without_memory() as tracker:
        for name, weight in list(ends.named_parameters()):
            if weight.ndim == 1:
                owner, _, leaf = name.rpartition(".")
                setattr(
                    ends.get_submodule(owner),
                    leaf,
                    nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=SIM_NAME)),
                )
        before = tracker.stats()["device_allocated"]
        x = torch.empty(
            (MEASURED_TOKENS, workload.hidden_size), dtype=dtype, device=SIM_NAME, requires_grad=True
        )
        y = ends.normalized(x)
        return (
            max(0.0, (tracker.stats()["device_allocated"] - before) / (x.nbytes) - 2)
            if y.requires_grad
            else 0.0
        )


def given_bytes(workload: Workload) -> dict[str, int]:
    """Return the bytes of the tensors that layers get beside their input, as fields of an Anatomy: for each token of a
    sample, for each pair of its tokens, and for each pair of tokens of masks that all samples share."""

    def taken(samples: int, tokens: int) -> int:
        x = torch.zeros((), dtype=DTYPES[workload.dtype]).expand(samples, tokens, workload.hidden_size)
        heard = parts_of(workload).heard(x)
        tensors = {id(leaf): leaf for leaf in tree_leaves(heard) if isinstance(leaf, Tensor)}
        return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors.values())

    few, many = COUNTED_TOKENS
    token_bytes = [-(-taken(1, tokens) // tokens) for tokens in COUNTED_TOKENS]
    pair = (token_bytes[1] - token_bytes[0]) // (many - few)
    of_samples = (taken(2, many) - taken(2, few) - taken(1, many) + taken(1, few)) // (many**2 - few**2)
    return {
        "given_bytes": token_bytes[1] - pair * many,
        "pair_given_bytes": of_samples,
        "pair_shared_bytes": pair - of_samples,
    }
