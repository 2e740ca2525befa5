"""A module's forward pass that keeps only the module's inputs; the backward pass computes the rest again.

Source: Chen et al. 2016, sublinear memory. torch's checkpoint does this for any module: it also restores random states
and autocast, and may run under torch.compile. With it the launches of a layer's passes take half as long again, as
measured on a CPU (results/LOG.md), and in half precision a fast GPU waits for the host. So a module that draws no
random numbers has the few lines below. Both end the recompute as soon as the backward pass has all it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint


def recomputed(module: nn.Module, xs: Sequence[Tensor], *, keeps_random: bool) -> Any:
    """Return the module's outputs for the inputs `xs`. `keeps_random`: the module may draw random numbers or run under
    autocast, and the recompute must do the same. The backward pass raises CheckpointError if the recompute saves other
    tensors than the forward pass."""
    if keeps_random:
        return checkpoint(module, *xs, use_reentrant=False)
    saved = _Saved(module, xs)
    with saved_tensors_hooks(saved.pack, saved.unpack):
        return module(*xs)


class _Enough(BaseException):
    """Ends a recompute: all tensors that the forward pass would have saved are there again. It is no Exception, so a
    module that catches exceptions lets it through."""


class _Saved:
    """The tensors that autograd would save in one forward pass, in the order in which it asks to save them. Until the
    backward pass asks for one of them, only their shapes and dtypes are kept."""

    def __init__(self, module: nn.Module, xs: Sequence[Tensor]) -> None:
        self.module, self.xs = module, xs
        self.forms: list[tuple[torch.Size, torch.dtype]] = []
        self.again: list[Tensor | None] = []  # the recomputed tensors; each is dropped when it is handed out

    def pack(self, tensor: Tensor) -> int:
        self.forms.append((tensor.shape, tensor.dtype))
        return len(self.forms) - 1

    def unpack(self, place: int) -> Tensor:
        if not self.again:
            self.again += self._recompute()
        tensor, self.again[place] = self.again[place], None
        if tensor is None:
            raise CheckpointError(
                "expected each saved tensor to be asked for once, got a second backward pass"
            )
        return tensor

    def _recompute(self) -> list[Tensor]:
        again: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            # Without detach() the recompute's graph would hold its own output, and so itself.
            again.append(tensor.detach() if tensor.requires_grad else tensor)
            if len(again) == len(self.forms):
                raise _Enough
            return again[-1]

        xs = [x.detach().requires_grad_(x.requires_grad) for x in self.xs]
        with suppress(_Enough), torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            self.module(*xs)
        forms = [(tensor.shape, tensor.dtype) for tensor in again]
        if forms != self.forms:
            raise CheckpointError(f"expected a recompute to save tensors of {self.forms}, got {forms}")
        return again
