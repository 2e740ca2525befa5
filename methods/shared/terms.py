"""The settings of a training apart from its model: dtype, clipping, and how gradients are summed. The settings come
from a workload, or from the training of a user's own model.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from harness.core.job import Workload


class Terms(NamedTuple):
    """The settings of a training on which layers, their updates and their memory plans depend."""

    dtype: str  # of weights, gradients and activations: fp32, bf16, fp16
    clip_norm: float = 0.0  # 0: no clipping
    # True: a recompute draws the random numbers of the forward pass and runs under its autocast.
    keeps_random: bool = True
    norms_in_blocks: bool = False
    # True: several backward passes, each through all layers, add to one step's gradients
    accumulates: bool = False
    loss_scale_window: int | None = None  # fp16's steps without overflow before the scale doubles; None: 1000

    @classmethod
    def of(cls, workload: Workload) -> Self:
        has_dropout, accumulates = workload.dropout > 0, workload.micro_batches > 1
        loss_scale_window = workload.loss_scale_window
        return cls(
            workload.dtype, workload.clip_norm, has_dropout, accumulates, loss_scale_window=loss_scale_window
        )

    @property
    def waits_for_norm(self) -> bool:
        """True if no update may start during a backward pass, because clipping or fp16 needs the norm of all gradients
        first, or because further backward passes add to the gradients."""
        return self.clip_norm > 0 or self.dtype == "fp16" or self.accumulates
