"""Our model in megatron-core: our attention in its layer, our weights in its shapes, and, without CUDA, stand-ins for
the few calls to CUDA of its data-parallel buffers and optimizer.

megatron-core 0.16.1; docstrings name the lines that make these calls.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex and Transformer Engine are absent
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from megatron.core import parallel_state as parallel_state
    from megatron.core.transformer.module import MegatronModule

NAMES = {
    "ends.wte.weight": "embedding.word_embeddings.weight",
    "ends.wpe.weight": "embedding.position_embeddings.weight",
    "ends.lnf": "decoder.final_layernorm",
    "ln1": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "ln2": "pre_mlp_layernorm",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
OURS = {theirs: ours for ours, theirs in NAMES.items()}


def our_name(name: str) -> str:
    """The name in harness.core.gpt.GPT of a parameter of GPTModel."""
    if name in OURS:
        return OURS[name]
    match = re.fullmatch(r"(decoder\.layers\.(\d+)\.)?(.+)\.(weight|bias)", name)
    assert match, name
    layer = f"layers.{match[2]}." if match[1] else ""
    return f"{layer}{OURS[match[3]]}.{match[4]}"


def reordered(name: str, tensor: Tensor, num_heads: int, *, to_megatron: bool) -> Tensor:
    """The rows of a fused QKV are (3, heads, head size) with us and (heads, 3, head size) in Megatron; others as is."""
    if ".qkv." not in name:
        return tensor
    outer, inner = (3, num_heads) if to_megatron else (num_heads, 3)
    rows = tensor.view(outer, inner, tensor.shape[0] // (3 * num_heads), *tensor.shape[1:])
    return rows.transpose(0, 1).reshape(tensor.shape)


class FusedAttention(MegatronModule):
    """torch's scaled_dot_product_attention in the place of core attention: flash kernels on a GPU without Transformer
    Engine, where Megatron's own would hold (B, heads, T, T). query, key, value: (T, B, heads, head size)."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class _OtherForCuda(TorchFunctionMode):
    """device='cuda' makes tensors on this device, .cuda() leaves them there, .type() says torch.cuda.*: assumed by
    param_and_grad_buffer.py:806, optimizer.py:473 and 671, clip_grads.py:90 and 167."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = self.device
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return f"torch.cuda.{result.rpartition('.')[2]}"
        return result


@contextmanager
def cuda_questions_answered(device: str) -> Iterator[None]:
    """Without CUDA, let Megatron's optimizer find this device where it looks for a CUDA device."""
    if device == "cuda":
        yield
        return
    with _OtherForCuda(device), mock.patch("torch.cuda.current_device", lambda: device):
        yield
