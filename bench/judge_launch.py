"""The gate for morphs: compares, step by step, the record of a job whose machines changed with the record of one
undisturbed process. This file uses the standard library only.

Each part of the training state has its own fact in the record. Therefore the name of the first fact that differs tells
which part was lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from methods.pipeline.launch.folder import read_lines

# largest relative difference of losses, because replicas and micro-batches sum in another order
TOLERANCE = 1e-6
# Facts that must agree at each step: field of the record, reason, words. A cause stands before its effects.
EXACT = (
    ("samples", "batch", "samples in the batch"),
    ("data", "data-order", "digest of the samples"),
    ("updates", "optimizer-step-count", "updates that the optimizer has counted"),
    ("learning_rate", "learning-rate", "learning rate"),
    ("loss_scale", "loss-scale", "loss scale"),
    ("overflow", "overflow", "overflow"),
)


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison. `reason`: name of the first fact that differs; empty if all facts agree."""

    reason: str
    text: str
    largest: float = 0.0  # largest relative difference between two losses of a step

    @property
    def passed(self) -> bool:
        return not self.reason


def judge(
    steps: Sequence[dict[str, Any]],
    undisturbed: Sequence[dict[str, Any]],
    lost: Sequence[dict[str, Any]] = (),
    tolerance: float = TOLERANCE,
) -> Verdict:
    """Compare a job's steps with the steps of the undisturbed job. `lost`: the first results of steps that were
    repeated after a death; these must be right, too.
    """
    expected = {line["step"]: line for line in undisturbed}
    counts = Counter(line["step"] for line in steps)
    if twice := sorted(step for step, count in counts.items() if count > 1):
        return Verdict("step-twice", f"step {twice[0]} is in the record {counts[twice[0]]} times")
    if missing := sorted(expected.keys() - counts.keys()):
        return Verdict("step-missing", f"step {missing[0]} is not in the record")
    if beyond := sorted(counts.keys() - expected.keys()):
        return Verdict(
            "step-beyond", f"step {beyond[0]} is beyond the {len(expected)} of the undisturbed job"
        )
    if [line["step"] for line in steps] != sorted(counts):
        return Verdict("step-order", "the record's steps are not in order")
    largest = 0.0
    for line in sorted([*lost, *steps], key=lambda line: line["step"]):
        step, other = line["step"], expected.get(line["step"])
        if other is None:
            return Verdict("step-beyond", f"step {step}, done again, is beyond the undisturbed job")
        for name, reason, text in EXACT:
            if line[name] != other[name]:
                return Verdict(reason, f"step {step}: {text}: expected {other[name]}, got {line[name]}")
        difference = abs(line["loss"] - other["loss"]) / abs(other["loss"])
        if not difference <= tolerance:
            told = f"step {step}: loss: expected {other['loss']:.9g}, got {line['loss']:.9g}"
            return Verdict("loss", f"{told} (relative {difference:.1e}, {tolerance:g} allowed)", difference)
        largest = max(largest, difference)
    return Verdict("", f"{len(steps)} steps agree to {largest:.1e}", largest)


def judge_folder(folder: Path, undisturbed: Path, most_lost: int, tolerance: float = TOLERANCE) -> Verdict:
    """Compare the folders of two launched jobs. `most_lost`: the most steps that may be repeated after one death.
    Raises ValueError if a record does not have the form that a launcher writes."""
    lost = read_lines(folder / "lost_steps.jsonl", "step", "round")
    steps, expected = (read_lines(each / "steps.jsonl", "step") for each in (folder, undisturbed))
    try:
        found = judge(steps, expected, lost, tolerance)
    except (KeyError, TypeError) as error:
        told = f"expected steps as a launcher writes them, got {type(error).__name__}: {error}"
        raise ValueError(f"{folder} or {undisturbed}: {told}; try another --folder") from error
    if not found.passed:
        return found
    for number, count in Counter(line["round"] for line in lost).items():
        if count > most_lost:
            return Verdict(
                "lost-steps", f"round {number} lost {count} steps, {most_lost} allowed", found.largest
            )
    assert math.isfinite(found.largest)
    return found
