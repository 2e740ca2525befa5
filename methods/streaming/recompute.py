"""A module's forward pass that keeps only the module's inputs; the backward pass computes the rest again.

Source: Chen et al. 2016, sublinear memory. torch's checkpoint does this for any module: it also restores random states
and autocast, and may run under torch.compile. All that takes the host a third of the time in which it launches a layer,
and in half precision a fast GPU waits for the host (results/h200.md). So a module that draws no random numbers has the
few lines below. Both end the recompute as soon as the backward pass has all it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def recomputed(module: nn.Module, xs: Sequence[Tensor], *, keeps_random: bool) -> Any:
    """Return the module's outputs for the inputs `xs`. `keeps_random`: the module may draw random numbers, and the
    recompute must draw the same ones."""
    if keeps_random:
        return checkpoint(module, *xs, use_reentrant=False)
    saved = _Saved(module, xs)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        return module(*xs)


class _Enough(BaseException):
    """Ends a recompute: all tensors that the forward pass would have saved are there again."""


class _Saved:
    """The tensors that autograd would save in one forward pass, in the order in which it asks to save them. Until the
    backward pass asks for one of them, only their shapes are kept."""

    def __init__(self, module: nn.Module, xs: Sequence[Tensor]) -> None:
        self.module, self.xs = module, xs
        self.shapes: list[torch.Size] = []
        self.again: list[Tensor | None] = []  # the recomputed tensors; each is dropped when it is handed out

    def pack(self, tensor: Tensor) -> int:
        self.shapes.append(tensor.shape)
        return len(self.shapes) - 1

    def unpack(self, place: int) -> Tensor:
        if not self.again:
            self._recompute()
        found, self.again[place] = self.again[place], None
        if found is None:
            raise RuntimeError("expected one backward pass for each forward pass, got two")
        return found

    def _recompute(self) -> None:
        xs = [x.detach().requires_grad_(x.requires_grad) for x in self.xs]
        with suppress(_Enough), torch.enable_grad(), saved_tensors_hooks(self._keep, lambda tensor: tensor):
            self.module(*xs)
        shapes = [tensor.shape for tensor in self.again if tensor is not None]
        if shapes != self.shapes:
            raise RuntimeError(f"expected a recompute to save tensors of shapes {self.shapes}, got {shapes}")

    def _keep(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # the graph would hold itself if it saved its own output
        self.again.append(kept)
        if len(self.again) == len(self.shapes):
            raise _Enough
        return kept
