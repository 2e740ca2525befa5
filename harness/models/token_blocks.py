"""Computes parts of a layer in blocks of tokens, to save memory in long samples, where the inner tensors of the MLP are
the largest that a layer keeps for its backward pass.

Each block is recomputed in its own backward pass, so memory holds the inner tensors of at most one block. Only modules
that compute each token on its own can be computed in blocks. harness/plan/block_sketch.py checks that blocks give
the same results as all tokens at once.

Source of the idea: Arctic Long Sequence Training (Bekman et al. 2025) computes an MLP in tiles of the sequence.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MLP = "mlp"  # name of a layer's child that is the MLP, the same in all families of models


def parts_of(layer: nn.Module, hidden_size: int) -> list[str]:
    """Return the names of the layer's children that can compute in blocks: the MLP and the norms. The list is empty if
    the layer has no child named MLP."""
    if MLP not in layer._modules:
        return []
    return [name for name, child in layer.named_children() if name == MLP or _is_norm(child, hidden_size)]


def _is_norm(module: nn.Module, hidden_size: int) -> bool:
    shapes = {tuple(weight.shape) for weight in module.parameters()}
    return shapes == {(hidden_size,)} and not module._modules


def set_blocks(layer: nn.Module, names: Iterable[str], at_once: int, most: int) -> None:
    """Change the children `names` of the layer: if a child's input has more than `most` tokens, the child computes it
    in blocks of `at_once` tokens."""
    for name in names:
        child = layer.get_submodule(name)
        child.forward = functools.partial(_by_blocks, child.forward, at_once, most)


def _by_blocks(forward: Callable[[Tensor], Tensor], at_once: int, most: int, x: Tensor) -> Tensor:
    """Return forward(x), x of shape (B, T, D). If x has more than `most` tokens, compute `at_once` tokens at a time."""
    if x.shape[:-1].numel() <= most:
        return forward(x)
    blocks = x.reshape(1, -1, x.shape[-1]).split(at_once, 1)
    done = [checkpoint(forward, block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
    return torch.cat(done, 1).view(*x.shape[:-1], -1)
