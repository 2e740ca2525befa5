"""Compares the facts of two records' trainings.

Losses and gradient norms are compared step by step. Tensors are compared by the facts that inspect_training.py finds:
the share of elements that changed, the distance moved, a sketch of the final values, and the sizes of both moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Literal, NamedTuple

from harness.core.record import Record, Tensor

LEAST_DIFFERENCE = 1e-7  # smallest relative difference that counts: one rounding in fp32
# Allowed distance, relative to a tensor's size, because a few elements may round in the other direction. It matters for
# the weights of norms: they are near 1, and at the published rate they move by only a few units in the last place.
ROUNDING_ALLOWANCE = 2**-24 / 4
# largest allowed relative difference between two norms of bit-equal gradients; engines differ by up to 1.2e-7
NORM_SUM_TOLERANCE = 1e-6
Moment = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: dict[str, Moment] = {"first moments": "exp_avg", "second moments": "exp_avg_sq"}


class Trial(NamedTuple):
    """The records of a probe in one dtype: of the method's training, and of those that it is compared with. `others`:
    trainings of the reference with other roundings; empty if the method gives the reference's very bits."""

    record: Record
    reference: Record
    others: tuple[Record, ...] = ()

    @property
    def dtype(self) -> str:
        return self.record.job.workload.dtype


def device_and_dtype(record: Record) -> tuple[str, str]:
    """Return the device and the dtype that determine the rounding to expect. For sim the device is the CPU, whose
    kernels it uses."""
    device = "cpu" if record.job.device == "sim" else record.job.device
    return device, record.job.workload.dtype


def promises_bits(record: Record) -> bool:
    """True if the record's method must give the reference's very bits. Methods promise them on a CPU only."""
    return record.bit_exact and device_and_dtype(record)[0] == "cpu"


def is_bit_equal(record: Record, reference: Record) -> bool:
    """True if all losses and final weights are bit-equal. The gradient norms may differ by the rounding of their own
    sums."""
    if record.losses != reference.losses:
        return False
    norm_differences = relative_differences(record.grad_norms, reference.grad_norms)
    for difference, norm in zip(norm_differences, reference.grad_norms, strict=False):
        # In a step that fp16 skipped, the reference's norm is not finite: leave it out.
        if norm is not None and math.isfinite(norm) and not difference <= NORM_SUM_TOLERANCE:
            return False
    for name, tensor in reference.tensors.items():
        bits = tensor.get("sha256")
        if bits is None or name not in record.tensors or record.tensors[name].get("sha256") != bits:
            return False
    return True


def num_comparable_steps(record: Record, reference: Record) -> int:
    """Return the number of steps to compare. In fp16 only the steps before the first different loss scale or skip are
    compared, because from there on the two trainings skip different steps."""
    num_losses = min(len(record.losses), len(reference.losses))
    if "fp16" not in (record.job.workload.dtype, reference.job.workload.dtype):
        return num_losses
    scales = enumerate(zip(record.loss_scales, reference.loss_scales, strict=False), start=1)
    steps_with_other_scale = [step for step, (scale, expected) in scales if scale != expected]
    steps_with_other_skip = set(record.skipped_steps) ^ set(reference.skipped_steps)
    return min([*steps_with_other_scale, *steps_with_other_skip, num_losses + 1]) - 1


def scale_difference_text(record: Record, reference: Record) -> str:
    """Return, as text, the first difference in skipped steps or in loss scales; empty if there is none."""
    if record.skipped_steps != reference.skipped_steps:
        skips, expected = _skips_text(record), _skips_text(reference)
        return f"it skipped {skips} for gradients that are not finite, the reference {expected}"
    pairs = zip_longest(record.loss_scales, reference.loss_scales)
    for step, (scale, expected_scale) in enumerate(pairs, start=1):
        if scale != expected_scale:
            return f"loss scale {scale} instead of {expected_scale} at step {step}"
    return ""


def _skips_text(record: Record) -> str:
    steps = [str(step) for step in record.skipped_steps]
    return f"steps {names_text(steps)}" if steps else "no step"


def loss_differences(record: Record, other: Record) -> list[tuple[int, float, float, float]]:
    """Return, for each step with a loss in both records, its number, both losses and their relative difference."""
    pairs = enumerate(zip(record.losses, other.losses, strict=False), start=1)
    losses = []
    for step, (loss, expected) in pairs:
        if loss is not None and expected is not None:
            losses.append((step, loss, expected, abs(loss - expected) / abs(expected)))
    return losses


def relative_differences(values: Sequence[float | None], expected: Sequence[float | None]) -> list[float]:
    """Return the relative difference of each step's two values. The difference is 0 if a log lacks a value, or if
    neither value is finite. In fp16 both trainings skip such a step; the order of a sum decides whether its norm is
    infinite or NaN."""

    def difference(a: float | None, b: float | None) -> float:
        if a is None or b is None or a == b or not (math.isfinite(a) or math.isfinite(b)):
            return 0.0
        return abs(a - b) / (abs(b) or LEAST_DIFFERENCE)

    return [difference(a, b) for a, b in zip(values, expected, strict=False)]


def _tensor_pairs(record: Record, reference: Record) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each tensor's name, its facts and the reference's; the reference's twice if the record lacks the tensor.
    Tensors of which the two records leave out different elements are skipped, and so are frozen tensors."""
    anatomy = reference.job.workload.anatomy
    for name, expected in reference.tensors.items():
        if not anatomy.is_trained(name):
            continue
        tensor = record.tensors.get(name, expected)
        if tensor.get("left_out") == expected.get("left_out"):
            yield name, tensor, expected


def tensor_distances(record: Record, reference: Record) -> dict[str, float]:
    """Return, for each tensor, the distance between its change and its change in the reference, divided by the size of
    the reference's change. The distance is measured between the two sketches, less an allowance
    (ROUNDING_ALLOWANCE) for the rounding of single elements."""
    by_name = {}
    for name, tensor, expected in _tensor_pairs(record, reference):
        sketch, expected_sketch = tensor.get("sketch"), expected.get("sketch")
        if sketch and expected_sketch and expected["moved"]:
            distance = math.dist(sketch, expected_sketch) - ROUNDING_ALLOWANCE * expected.get("size", 0.0)
            by_name[name] = max(0.0, distance) / expected["moved"]
    return by_name


def moment_differences(record: Record, reference: Record, moment: Moment) -> dict[str, float]:
    """Return the relative difference in size of each tensor's moment; empty if the method returns no such moments."""
    if not has_moments(record, moment):
        return {}
    by_name = {}
    for name, tensor, expected in _tensor_pairs(record, reference):
        size, expected_size = tensor.get(moment), expected.get(moment)
        if expected_size:
            by_name[name] = math.inf if size is None else abs(size / expected_size - 1)
    return by_name


def size_differences(record: Record, reference: Record) -> dict[str, float]:
    """Return the relative difference of each tensor's final size. Weight decay shows in it, because rounding changes a
    size far less than it changes the single elements. A tensor with elements that only rounding changes is left out."""
    pairs = fact_ratios(record, reference, "size").items()
    return {name: abs(ratio - 1) for name, ratio in pairs if "left_out" not in reference.tensors[name]}


def has_moments(record: Record, moment: Moment) -> bool:
    return any(tensor.get(moment) is not None for tensor in record.tensors.values())


# For each compared fact: the function that returns the relative difference of every tensor from the reference.
COMPARISONS: dict[str, Callable[[Record, Record], dict[str, float]]] = {
    "way": tensor_distances,
    "exp_avg": partial(moment_differences, moment="exp_avg"),
    "exp_avg_sq": partial(moment_differences, moment="exp_avg_sq"),
    "size": size_differences,
}


def fact_ratios(record: Record, reference: Record, key: str) -> dict[str, float]:
    """Return, for each tensor, its fact `key` (such as the distance moved) divided by the reference's fact."""
    by_name = {}
    for name, tensor, expected in _tensor_pairs(record, reference):
        fact, expected_fact = tensor.get(key), expected.get(key)
        if fact is not None and expected_fact:
            by_name[name] = fact / expected_fact  # type: ignore[operator]
    return by_name


def names_text(names: Sequence[str]) -> str:
    """Return the first three names as text, and the number of the others."""
    others = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + others
