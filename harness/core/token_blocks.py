"""Computes parts of a layer in blocks of tokens: in long samples what an MLP keeps for its backward pass is the largest
of all that a layer keeps.

Each block is recomputed in its own backward pass, so the inner tensors of one block at most are in memory. That is for
modules that compute token by token: harness/forecast/block_sketch.py checks that blocks give the same as the whole.

Source of the idea: Arctic Long Sequence Training (Bekman et al. 2025) computes an MLP in tiles of the sequence.

Shapes: B batch, T tokens, D hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MLP = "mlp"  # its name in a layer, in all families of models


def parts_of(layer: nn.Module, hidden_size: int) -> list[str]:
    """Return the names of the layer's MLP and of the norms beside it; none if there is no MLP."""
    if MLP not in layer._modules:
        return []
    return [name for name, child in layer.named_children() if name == MLP or _is_norm(child, hidden_size)]


def _is_norm(module: nn.Module, hidden_size: int) -> bool:
    shapes = {tuple(weight.shape) for weight in module.parameters()}
    return shapes == {(hidden_size,)} and not module._modules


def set_blocks(layer: nn.Module, names: Iterable[str], at_once: int, most: int) -> None:
    """Let these children of the layer compute `at_once` tokens at a time where they get more than `most`."""
    for name in names:
        child = layer.get_submodule(name)
        child.forward = functools.partial(_by_blocks, child.forward, at_once, most)


def _by_blocks(forward: Callable[[Tensor], Tensor], at_once: int, most: int, x: Tensor) -> Tensor:
    """Return forward(x), x being (B, T, D)."""
    if x.shape[:-1].numel() <= most:
        return forward(x)
    blocks = x.reshape(1, -1, x.shape[-1]).split(at_once, 1)
    done = [checkpoint(forward, block, use_reentrant=False, preserve_rng_state=False) for block in blocks]
    return torch.cat(done, 1).view(*x.shape[:-1], -1)
