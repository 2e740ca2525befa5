"""Attention with fewer heads of keys and values than of queries (grouped-query attention).

torch's attention takes grouped heads. But on a GPU only the flash kernels do, which compute in half precision and need
compute capability 8.0. In all other cases torch stores the scores of all pairs of tokens, (B, heads, T, T). If the
heads of keys and values are repeated, torch has a kernel that stores no scores.

Source: can_use_flash_attention() and can_use_mem_efficient_attention() of torch 2.13, ATen/native/transformers/cuda.
"""

from __future__ import annotations

import torch
from torch import Tensor


def takes_groups(key: Tensor) -> bool:
    """True if torch should get the heads of `key` grouped. In fp32 this is False on every device, so that a plan, which
    is measured on a CPU, counts the repeated heads."""
    is_old = key.is_cuda and torch.cuda.get_device_capability(key.device)[0] < 8
    return key.dtype != torch.float32 and not is_old


def repeated(heads: Tensor, num_heads: int) -> Tensor:
    """Return keys or values, (B, groups, T, head size), with a head for each of the queries' `num_heads` heads."""
    if heads.shape[1] == num_heads:
        return heads
    return heads.unsqueeze(2).expand(-1, -1, num_heads // heads.shape[1], -1, -1).flatten(1, 2)
