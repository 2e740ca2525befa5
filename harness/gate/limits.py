"""Limits how far an honest training may be from the reference: by constants at the published learning rate, by measured
floors in a probe.

The tolerances below bound rounding at the published rate, by device and dtype. A probe trains at a rate at which
rounding errors grow. A probe's floor is the distance between the reference and the reference trained with other
roundings. An honest training stays within a few times the floor. If a method's dropout drops other elements than the
reference's, the limit is a few times the change that dropout causes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from harness.core.adapters import is_first_factor
from harness.core.job import BETAS
from harness.core.record import Record
from harness.gate import evidence
from harness.gate.evidence import COMPARISONS, LEAST_DIFFERENCE

# By device and dtype: largest allowed relative difference of a step's loss. Kernels that sum in another order differ by
# about 1e-6 in fp32 after 20 steps. bf16 has 8 bits of mantissa, fp16 has 11. On CUDA, atomics and fused attention add
# rounding.
LOSS_TOLERANCE = {
    ("cpu", "fp32"): 1e-5,
    ("cpu", "bf16"): 5e-3,
    ("cpu", "fp16"): 5e-4,
    ("cuda", "fp32"): 1e-4,
    ("cuda", "bf16"): 1e-2,
    ("cuda", "fp16"): 1e-3,
}
# By device and dtype: largest allowed relative difference of a gradient norm. In a model of 4 layers of hidden size 64,
# differences were 2e-7 in fp32, 1e-3 in bf16 and 2e-4 in fp16; between engines, 5e-7 in fp32.
NORM_TOLERANCE = {
    ("cpu", "fp32"): 1e-4,
    ("cpu", "bf16"): 5e-2,
    ("cpu", "fp16"): 1e-2,
    ("cuda", "fp32"): 1e-3,
    ("cuda", "bf16"): 1e-1,
    ("cuda", "fp16"): 2e-2,
}
# By dtype: largest allowed relative difference between a tensor's first moment and the reference's, in size. The second
# moment, a square, may differ twice as much. In bf16 the gradient of one bias, that of the norm before attention, is a
# sum that nearly cancels: its moments had a ratio of 0.88 in a run whose losses agree to 4e-5.
MOMENT_TOLERANCE = {"fp32": 0.1, "bf16": 0.3, "fp16": 0.1}
# Largest allowed relative difference of the median tensor's moment. This limit is small, because only few tensors have
# sums that nearly cancel.
MEDIAN_TOLERANCE = 0.05
# By device and dtype: largest allowed distance between a tensor's change and its change in the reference, relative to
# the latter. In half precision, a step's direction is noise if its gradient is only rounding. On a CPU in fp32, runs
# differ by at most 1e-3.
DISTANCE_TOLERANCE = {
    ("cpu", "fp32"): 2e-3,
    ("cpu", "bf16"): 0.3,
    ("cpu", "fp16"): 0.3,
    ("cuda", "fp32"): 5e-2,
    ("cuda", "bf16"): 0.3,
    ("cuda", "fp16"): 0.3,
}
# Largest allowed distance of the median tensor: rounding moves few tensors, a stale or missing update moves all.
MEDIAN_DISTANCE_TOLERANCE = 0.05
# From this number of steps on, the limits of the distance hold as they are; for fewer steps they are widened. AdamW's
# first steps move by the full rate in the sign of the gradient, even if the gradient is noise: 20 steps average this
# out.
SETTLED_STEPS = 20
# A method that drops other elements may differ from the reference by this many times the change that dropout causes in
# the reference. A single tensor may change little by chance, so all tensors have the limit of the tensor that changes
# most. Honest runs needed 1.6 to 3.6 times when this was chosen (results/LOG.md), those of bench/dropout_rule.py 0.8 to
# 2.9 times.
DROPOUT_MULTIPLE = 6.0
# Limit of a probe as a multiple of the floor. In fp32 324 honest runs of three sizes reached 6.2; planted faults begin
# at 68 (results/LOG.md). In fp16 the second moment of one bias reached 22 in 4 layers x 64, where all else was below 2.
# bench/gate_power.py tries the limits on further models and faults.
FLOOR_MULTIPLE, FLOOR_MULTIPLE_IN_HALF = 20.0, 40.0
# Limit of the median tensor's way in bf16, likewise, because a median scatters less than the farthest tensor: 77 honest
# runs of six seeds reached 1.06, a copy to bf16 without each matrix's last row is at 4.5 (results/LOG.md).
MEDIAN_WAY_MULTIPLE = 3.0
# Number of layers up to which these limits hold. Each layer amplifies a rounding error by a factor that scatters, so
# limits grow with the depth: noise of one ulp in each product reached 25 times the floor in 6 layers.
CALIBRATED_LAYERS = 4
MOST_UNCHANGED_ELEMENTS = 3  # number of a tensor's elements that may end at their starting values by chance
# Distance by which the rounding of one step of AdamW may move a tensor, relative to the tensor's size, as a multiple of
# 2**-24. Errors of several steps add up like a random walk. AdamW computed in fp64 was 0.2 times 2**-24 for each square
# root of a step away (20 steps at a rate of 1.5e-5).
STEP_ROUNDING = 0.25
# Likewise for an adapter's matrix A, which starts large and hardly moves, since its gradient grows with B from zero: a
# step rounds each element of two trainings by up to half of its ulp, a way of at most 0.82 for each square root of a
# step. AdamW computed in fp64 was 0.63 away (20 steps at the published rate).
FIRST_FACTOR_ROUNDING = 1.0
# In a failed probe, the first difference beyond this multiple of the floor names the fault.
NAMING_MULTIPLE = 2.0
# A fault whose first difference is below FAINT_MULTIPLE * NAMING_MULTIPLE times the floor may have begun at an earlier
# step (results/LOG.md).
FAINT_MULTIPLE = 20.0
# Number of first steps that share one floor: at a single step, two roundings may agree by chance.
FIRST_STEPS = 5
# Largest relative error of a norm, divided by the number of elements to the power 1.5. On a CPU the reference's norm is
# one fp32 sum of squares. For normally distributed elements the sum's error is a twentieth of this limit; the error is
# larger for elements that differ more (results/LOG.md).
NORM_ROUNDING = 2e-13
# Relative error of a second moment in an engine that rounds beta2 to fp32 before subtracting it from 1.
BETA_ROUNDING = 2**-25 / (1 - BETAS[1])


class Limits(NamedTuple):
    """The largest relative differences that are allowed, by step and by tensor. The median tensor has limits of its
    own."""

    losses: Sequence[float]
    norms: Sequence[float]
    tensors: dict[str, dict[str, float]]  # by compared fact, then by the tensor's name
    medians: dict[str, float]
    text: str = "{} allowed"  # a limit as text
    # a factor: a departure below `faint` times its limit may have its cause in an earlier step
    faint: float = 0.0

    def times(self, factor: float) -> Limits:
        tensors = {}
        for fact, limits in self.tensors.items():
            tensors[fact] = {name: factor * limit for name, limit in limits.items()}
        return Limits(
            [factor * limit for limit in self.losses],
            [factor * limit for limit in self.norms],
            tensors,
            {fact: factor * limit for fact, limit in self.medians.items()},
        )

    def of_norms_summed_by(self, reference: Record) -> Limits:
        """Return these limits, but with each gradient norm's limit raised to at least the rounding error of the sum of
        squares that gives the norm."""
        largest = reference.job.workload.anatomy.largest_numel
        least = 0.0 if reference.job.device == "cuda" else NORM_ROUNDING * largest**1.5
        return self._replace(norms=[max(least, limit) for limit in self.norms])

    def of_rounded_betas(self) -> Limits:
        """Return these limits, but with those of second moments raised to at least the rounding of beta2."""
        fact = "exp_avg_sq"
        raised = {name: max(BETA_ROUNDING, limit) for name, limit in self.tensors[fact].items()}
        median = max(BETA_ROUNDING, self.medians[fact])
        return self._replace(tensors=self.tensors | {fact: raised}, medians=self.medians | {fact: median})

    def alike(self) -> Limits:
        """Return limits in which every tensor has the largest limit that any tensor has."""
        tensors = {}
        for fact, limits in self.tensors.items():
            tensors[fact] = dict.fromkeys(limits, max(limits.values(), default=0.0))
        return self._replace(tensors=tensors)


def probe_limits(rounding: Limits, reference: Record) -> Limits:
    """Return the limits of a probe: multiples of its floor, `rounding`."""
    load = reference.job.workload
    depth_factor = max(1.0, load.num_layers / CALIBRATED_LAYERS)
    multiple = FLOOR_MULTIPLE if load.dtype == "fp32" else FLOOR_MULTIPLE_IN_HALF
    limits = rounding.times(multiple * depth_factor).of_rounded_betas()
    if load.dtype != "bf16":
        return limits
    median_way = MEDIAN_WAY_MULTIPLE * depth_factor * rounding.medians["way"]
    return limits._replace(medians=limits.medians | {"way": median_way})


def published_limits(record: Record, reference: Record) -> Limits:
    """Return the limits at the published learning rate, for the device and dtype of the record."""
    kernels = evidence.device_and_dtype(record)
    steps, names = len(reference.losses), list(reference.tensors)
    short_run_factor = max(1.0, math.sqrt(SETTLED_STEPS / steps))
    moment = MOMENT_TOLERANCE[kernels[1]]
    largest = {
        "way": short_run_factor * DISTANCE_TOLERANCE[kernels],
        "exp_avg": moment,
        "exp_avg_sq": 2 * moment,
    }
    medians = {
        "way": short_run_factor * MEDIAN_DISTANCE_TOLERANCE,
        "exp_avg": MEDIAN_TOLERANCE,
        "exp_avg_sq": 2 * MEDIAN_TOLERANCE,
    }
    tensors = {fact: dict.fromkeys(names, limit) for fact, limit in largest.items()}
    tensors["way"] = {name: largest["way"] + rounding_share(reference, name) for name in names}
    limits = Limits([LOSS_TOLERANCE[kernels]] * steps, [NORM_TOLERANCE[kernels]] * steps, tensors, medians)
    return limits.of_norms_summed_by(reference)


def rounding_share(reference: Record, name: str) -> float:
    """Return the distance by which rounding may move a tensor's elements in all steps, relative to the way that the
    tensor moved. At a low learning rate the way of a weight near 1 is a few units in the last place (ulps)."""
    tensor, steps = reference.tensors[name], reference.job.steps
    of_step = FIRST_FACTOR_ROUNDING if is_first_factor(name) else STEP_ROUNDING
    rounding = of_step * math.sqrt(steps) * 2**-24 * tensor.get("size", 0.0)
    return rounding / tensor["moved"] if tensor["moved"] else 0.0


def rounding_floor(reference: Record, others: Sequence[Record]) -> Limits:
    """Return the floor: the largest distance of the `others` from the reference. The `others` are records of the same
    training with other roundings.

    A tensor's floor is at least the median tensor's floor; every floor is at least LEAST_DIFFERENCE.
    """
    compared = [(other, evidence.num_comparable_steps(other, reference)) for other in others]
    num_steps = len(reference.losses)
    losses, norms = [], []
    for other, steps in compared:
        losses.append(evidence.relative_differences(other.losses[:steps], reference.losses))
        norms.append(evidence.relative_differences(other.grad_norms[:steps], reference.grad_norms))
    tensors, medians = {}, {}
    # In fp16 a rounding may decide whether a step overflows: whoever skips other steps ends elsewhere.
    wholly_compared = [other for other, steps in compared if steps == num_steps] or others
    for fact, compare in COMPARISONS.items():
        differences = [compare(other, reference) for other in wholly_compared]
        medians[fact] = max([LEAST_DIFFERENCE, *(median_of(by_name.values()) for by_name in differences)])
        tensors[fact] = {
            name: max(medians[fact], *(by_name.get(name, 0.0) for by_name in differences))
            for name in differences[0]
        }
    return Limits(_largest_so_far(losses, num_steps), _largest_so_far(norms, num_steps), tensors, medians)


def _largest_so_far(series: list[list[float]], num_steps: int) -> list[float]:
    """Return, for each of `num_steps` steps, the largest difference in any series up to this step. The first
    FIRST_STEPS steps share the largest difference of all these steps."""
    largest = []
    for step in range(1, num_steps + 1):
        end = max(FIRST_STEPS, step)
        largest.append(max([LEAST_DIFFERENCE, *(value for values in series for value in values[:end])]))
    return largest


def median_of(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [0.0])


def distinct_texts(value: float | None, other: float | None, kind: str = "e") -> tuple[str, str]:
    """Return two numbers as texts that differ, with as few digits as tell them apart. `kind`: e for at least 2 digits,
    g for at least 7, % for at least one behind the point."""
    digits = 7 if kind == "g" else 1
    while True:
        texts = tuple(f"{number:.{digits}{kind}}" for number in (value, other))
        if texts[0] != texts[1] or value == other or digits > 16:
            return texts  # type: ignore[return-value]
        digits += 1
