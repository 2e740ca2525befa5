"""The loss scale of fp16: a power of two that keeps gradients from being rounded to zero.

All methods use this rule; those of DeepSpeed double the scale one step later at the start and after a skip. The scale
starts at 2^16. A step with a gradient that is not finite is skipped: weights, moments and the number of updates stay,
and the scale is halved, down to 1. The scale is doubled after 1000 steps in a row without a skip, or after as many as
the workload sets. A skipped step still counts as a step in the schedule of the learning rate.

Source: Micikevicius et al. 2018. The numbers are DeepSpeed's. DeepSpeed's hysteresis, which delays the halving, is not
used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from harness.core.job import INITIAL_LOSS_SCALE, LOSS_SCALE_WINDOW, Workload
from harness.core.method import Step
from methods.shared.terms import Terms

if TYPE_CHECKING:
    from torch import Tensor


class LossScale:
    """The scale of the current step's loss: always 1 in dtypes other than fp16."""

    least_value, is_dynamic = 1.0, True
    window: int | None = None  # the scale doubles after this many steps in a row without a skip; None: 1000

    def __init__(self, training: Workload | Terms) -> None:
        self.is_used = training.dtype == "fp16"
        self.value = INITIAL_LOSS_SCALE if self.is_used else 1.0
        self.num_good = 0  # steps in a row without a skip
        self.window = training.loss_scale_window

    def overflows(self, norm: Tensor) -> bool:
        """Return whether the global gradient norm is not finite; this waits for the norm. If no loss scale is used,
        return False without waiting."""
        return self.is_used and not math.isfinite(float(norm))

    def step(self, loss: Tensor, norm: Tensor | None, *, is_skipped: bool = False) -> Step:
        """Return the finished step as a Step, which a method yields. Set `value` to the scale of the next step.

        `norm`: the global gradient norm; None if it was not computed. `is_skipped`: True if nothing was updated.
        """
        if not self.is_used:
            return Step(loss, norm)
        finished_step = Step(loss, norm, loss_scale=self.value, is_skipped=is_skipped)
        self.num_good = 0 if is_skipped else self.num_good + 1
        if not self.is_dynamic:
            return finished_step
        if is_skipped:
            self.value = max(self.least_value, self.value / 2)
        elif self.num_good % (self.window or LOSS_SCALE_WINDOW) == 0:
            self.value *= 2
        return finished_step

    def resume(self, value: float, num_good: int) -> None:
        """Continue with a checkpoint's scale and its number of steps without a skip. If the scale is not used, or is
        static, nothing changes."""
        if self.is_used and self.is_dynamic:
            self.value, self.num_good = value, num_good


class ChosenLossScale(LossScale):
    """A loss scale that a user's script chooses. `start_value`: the first value; None: no scale is used.
    `least_value`: the lowest value. `is_dynamic`: False: the first value is used for all steps."""

    def __init__(
        self, start_value: float | None, least_value: float = 1.0, *, is_dynamic: bool = True
    ) -> None:
        self.is_used, self.value, self.num_good = start_value is not None, start_value or 1.0, 0
        self.least_value, self.is_dynamic = least_value, is_dynamic
