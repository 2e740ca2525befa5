"""A module's forward pass that keeps only the module's inputs; the backward pass computes the rest again.

Source: Chen et al. 2016, sublinear memory. torch's checkpoint does this for any module: checkpoint also
restores random states and autocast, and may run under torch.compile. But with checkpoint the launches of a layer's
passes take 1.5 times as long, as measured on a CPU (results/LOG.md), and in half precision a fast GPU waits for the
host. So this file recomputes a module that draws no random numbers by its own code. checkpoint and this code both end
the recompute as soon as the backward pass has all tensors that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint


def run_recomputed(module: nn.Module, inputs: Sequence[Tensor], *, keeps_random: bool) -> Any:
    """Return the module's outputs for these inputs. `keeps_random`: the module may draw random numbers or run under
    autocast, and the recompute must do the same. The backward pass raises CheckpointError if the recompute saves other
    tensors than the forward pass."""
    if keeps_random:
        return checkpoint(module, *inputs, use_reentrant=False)
    saved_tensors = _SavedTensors(module, inputs)
    with saved_tensors_hooks(saved_tensors.pack, saved_tensors.unpack):
        return module(*inputs)


class _AllRecomputed(BaseException):
    """Ends a recompute, because all tensors that the forward pass would have saved are recomputed. It is derived from
    BaseException, so that a module that catches Exception does not catch it."""


class _SavedTensors:
    """The tensors that autograd would save in one forward pass, in the order in which autograd saves them. Before the
    backward pass unpacks the first of these tensors, only their shapes and dtypes are stored."""

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        self.module, self.inputs = module, inputs
        self.shapes_and_dtypes: list[tuple[torch.Size, torch.dtype]] = []
        self.recomputed_tensors: list[Tensor | None] = []  # each is dropped when unpack() returns it

    def pack(self, tensor: Tensor) -> int:
        self.shapes_and_dtypes.append((tensor.shape, tensor.dtype))
        return len(self.shapes_and_dtypes) - 1

    def unpack(self, index: int) -> Tensor:
        if not self.recomputed_tensors:
            self.recomputed_tensors += self._recompute()
        tensor, self.recomputed_tensors[index] = self.recomputed_tensors[index], None
        if tensor is None:
            raise CheckpointError(
                "expected each saved tensor to be asked for once, got a second backward pass"
            )
        return tensor

    def _recompute(self) -> list[Tensor]:
        recomputed_tensors: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            # Without detach() the recompute's graph would hold its own output, and so itself.
            recomputed_tensors.append(tensor.detach() if tensor.requires_grad else tensor)
            if len(recomputed_tensors) == len(self.shapes_and_dtypes):
                raise _AllRecomputed
            return recomputed_tensors[-1]

        inputs = [x.detach().requires_grad_(x.requires_grad) for x in self.inputs]
        with suppress(_AllRecomputed), torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
            self.module(*inputs)
        shapes_and_dtypes = [(tensor.shape, tensor.dtype) for tensor in recomputed_tensors]
        if shapes_and_dtypes != self.shapes_and_dtypes:
            raise CheckpointError(
                f"expected a recompute to save tensors of {self.shapes_and_dtypes}, got {shapes_and_dtypes}"
            )
        return recomputed_tensors
