"""The loss scale of fp16: gradients are computed times a power of two, or most of them would be rounded to zero.

The rule is one for all methods. The scale is 2^16 at first. Where any gradient of a step is not finite the step is
skipped: weights, moments and the number of updates stay as they are, and the scale is halved, down to 1. After 1000
steps in a row that were not skipped it is doubled. The learning rate goes by the number of the step, skipped or not.

Source: Micikevicius et al. 2018; with DeepSpeed's numbers, without hysteresis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.core.job import INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW, Workload
from harness.core.method import Step

if TYPE_CHECKING:
    from torch import Tensor


class LossScale:
    """What the loss of the step at work is scaled by: 1 for good where the dtype needs no scale."""

    def __init__(self, workload: Workload) -> None:
        self.is_used = workload.dtype == "fp16"
        self.value = INITIAL_LOSS_SCALE if self.is_used else 1.0
        self.num_good = 0  # steps in a row

    def overflows(self, norm: Tensor) -> bool:
        """Whether the norm of the whole gradient is not finite, waited for. Without a scale nobody asks."""
        return self.is_used and not math.isfinite(float(norm))

    def step(self, loss: Tensor, norm: Tensor | None, *, is_skipped: bool = False) -> Step:
        """The step as the method yields it; afterwards `value` is the next one's."""
        if not self.is_used:
            return Step(loss, norm)
        ended = Step(loss, norm, loss_scale=self.value, is_skipped=is_skipped)
        self.num_good = 0 if is_skipped else self.num_good + 1
        if is_skipped:
            self.value = max(1.0, self.value / 2)
        elif self.num_good % LOSS_SCALE_WINDOW == 0:
            self.value *= 2
        return ended
