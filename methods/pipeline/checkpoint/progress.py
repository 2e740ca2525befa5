"""What a checkpoint stores about the steps so far: their number and the loss scale; losses, norms and skips in a job of
`-m varuna`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.core.job import Workload
from harness.core.method import Step


@dataclass(frozen=True)
class Progress:
    """How far training had come when a checkpoint was saved. `num_good`: steps in a row without an overflow."""

    num_steps: int
    loss_scale: float
    num_good: int


@dataclass(frozen=True)
class GptProgress(Progress):
    """Progress, and the further notes in the checkpoints of a job of `-m varuna`. The lists hold one value for each
    step."""

    workload: dict[str, Any]
    loss: list[float]
    grad_norm: list[float]
    loss_scales: list[float | None]
    skipped: list[bool]
    source: str = ""  # hash of the source code that trained these steps

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.loss, self.grad_norm, self.loss_scales, self.skipped)}
        if len(lengths) > 1:
            raise ValueError(
                f"expected equally many losses, norms, loss scales and skips, got {sorted(lengths)} of them"
            )
        for is_skipped, scale in zip(self.skipped, self.loss_scales, strict=True):
            if is_skipped and scale is None:
                raise ValueError("expected a loss scale for each skipped step, got None")
        if not re.fullmatch("[0-9a-f]*", self.source):
            raise ValueError(f"expected the hash of the source code, got {self.source!r:.80}")

    @staticmethod
    def notes(workload: Workload, steps: Sequence[Step], source: str) -> dict[str, Any]:
        """Return the notes that a checkpoint stores beside Progress. `steps`: all of the job's steps so far. `source`:
        hash of the source code."""
        norms = [float(step.grad_norm) for step in steps if step.grad_norm is not None]
        return {
            "workload": asdict(workload),
            "loss": [float(step.loss) for step in steps],
            "grad_norm": norms,
            "loss_scales": [step.loss_scale for step in steps],
            "skipped": [step.is_skipped for step in steps],
            "source": source,
        }

    def steps_of(self, workload: Workload, folder: str) -> list[Step]:
        """Return all steps up to the checkpoint. Raises ValueError if the checkpoint is of another workload, or lacks
        losses of some steps. `folder`: named in the error."""
        for name, value in asdict(workload).items():
            if (stored := self.workload.get(name)) != value:
                raise ValueError(
                    f"{folder}: expected a checkpoint with {name} {value}, got {stored}; try another folder"
                )
        if len(self.loss) != self.num_steps:
            raise ValueError(
                f"{folder}: expected a checkpoint of {self.num_steps} steps, got {len(self.loss)} losses"
            )
        columns = (self.loss, self.grad_norm, self.loss_scales, self.skipped)
        return [
            Step(torch.tensor(loss), torch.tensor(norm), loss_scale=of_loss, is_skipped=is_skipped)
            for loss, norm, of_loss, is_skipped in zip(*columns, strict=True)
        ]
