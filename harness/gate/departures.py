"""Finds where a training departs from the reference's: it compares losses first, then gradient norms, then tensors.

The functions only compare records. A difference counts if it is larger than honest rounding may cause (limits.py). A
method that promises bit-equality must keep its promise on a CPU, at the published learning rate and in the probe.

The final tensors show causes of their own: weight decay left out (missing_decay_text), a tensor that was trained only
in part (partly_trained_text), or one group of tensors that is far off (outstanding_group).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.core.job import BETAS, WEIGHT_DECAY
from harness.core.record import Record
from harness.gate import evidence, flaws
from harness.gate.evidence import (
    COMPARISONS,
    LEAST_DIFFERENCE,
    Trial,
    num_comparable_steps,
    relative_differences,
)
from harness.gate.limits import (
    DROPOUT_MULTIPLE,
    FAINT_MULTIPLE,
    LOSS_TOLERANCE,
    MEDIAN_TOLERANCE,
    MOST_UNCHANGED_ELEMENTS,
    NAMING_MULTIPLE,
    Limits,
    distinct_texts,
    median_of,
    probe_limits,
    published_limits,
    rounding_floor,
    rounding_share,
)

# Largest allowed relative error of the distance that a tensor moved, compared with the reference.
SIZE_TOLERANCE = 0.1
# Largest allowed shortfall of the number of a tensor's changed elements, as a share of the reference's number.
CHANGED_TOLERANCE = 0.1
SIZE_ROUNDING = 1e-3  # rounding error of sqrt(size**2 - moved**2) in fp32, relative to `moved`
# if a norm's error is this many times the loss's error, the gradient is wrong, not the weights
NORM_ONLY_RATIO = 100.0
FORWARD_CAUSE = "the forward pass, the batch or the starting weights are not the reference's"
GRADIENT_CAUSE = "the gradients, or the norm of them, are not the reference's"
UPDATE_CAUSE = "the first update, or when it takes effect, is not the reference's"
LATER_CAUSE = "the update of step {} or the batch of step {} is not the reference's"
EARLIER_CAUSE = "an update up to that of step {}, or the batch of step {}, is not the reference's"
MICRO_BATCHES_HINT = "; is every micro-batch summed?"
STALE_GRADIENT_HINT = "; is a gradient a step late? compare both moments after step {}"
FAINT_HINT = "; so little shows that it may be the forward pass, too"
TENSOR_FAILURES = {  # for each compared fact of a tensor: the reason and the text of a failure
    "way": ("weights", "ends {} of its way from the reference's"),
    "exp_avg": ("gradient-scale", "has a first moment {} off the reference's"),
    "exp_avg_sq": ("gradient-scale", "has a second moment {} off the reference's"),
    "size": ("weights", "has a size {} off the reference's"),
}
ROUNDING_LIMIT_TEXT = f"{{}} is {NAMING_MULTIPLE:g} times what rounding does here"  # a limit as text
# for each fact that is a share: its verb
SHARE_VERBS = {"changed": "changed in", "with_gradient": "got a gradient in"}
# a group of tensors is named if its error is this many times the error of all other tensors
OUTSTANDING_RATIO = 3.0


class Departure(NamedTuple):
    """A difference from the reference. `reason`: a word for programs. `difference_text`: the difference.
    `cause`: the probable fault, as text. `step`: the step at which the fault first shows; None if that is not known."""

    reason: str
    difference_text: str
    cause: str = ""
    step: int | None = None

    @property
    def text(self) -> str:
        return f"{self.difference_text}: {self.cause}" if self.cause else self.difference_text


def run_departure(record: Record, reference: Record) -> Departure | None:
    """Return the departure of a run at the published learning rate; None if all differences are within rounding."""
    must_be_exact = evidence.promises_bits(record)
    limits = published_limits(record, reference)
    if must_be_exact:
        limits = limits._replace(losses=[0.0] * len(limits.losses))
    of_step = step_departure(record, reference, limits)
    if of_step and of_step.reason not in ("update", "later"):
        return of_step
    of_elements = _partial_update_departure(record, reference)
    if of_step and must_be_exact:
        return of_elements or of_step
    if of_step:
        # At the published rate, a fault grows so slowly that it exceeds the tolerance late: it may have begun at any
        # step before, so name no step as its cause.
        return of_elements or Departure("loss", of_step.difference_text)
    of_update = of_elements or _update_size_departure(record, reference)
    return of_update or tensor_departure(record, reference, limits) or _key_bias_departure(record)


def drops_nothing(record: Record, reference: Record, undropped: Record) -> bool:
    """True if a run that should use dropout did not use it. Then the run equals the reference without dropout, within
    rounding, while the references with and without dropout differ by more."""
    rounding_limits = published_limits(record, undropped)
    effect_of_dropout = first_departure(reference, undropped, rounding_limits.times(DROPOUT_MULTIPLE))
    return effect_of_dropout is not None and not first_departure(record, undropped, rounding_limits)


def dropout_departure(record: Record, reference: Record, undropped: Record) -> Departure | None:
    """Return the departure of a run that drops other elements than the reference. None if the difference is no larger
    than a few times the change that dropout causes."""
    return first_departure(
        record, reference, rounding_floor(reference, [undropped]).alike().times(DROPOUT_MULTIPLE)
    )


def trial_departure(trial: Trial) -> Departure | None:
    """Return the departure of a probe that trained; None if there is none. A departure is a flaw of the record itself,
    other tensors or loss scales than the reference's, or a difference larger than rounding allows."""
    record, reference = trial.record, trial.reference
    if flaw := flaws.find_flaw(record):
        return Departure(flaw.reason, flaw.text)
    if set(record.tensors) != set(reference.tensors):
        return Departure("missing", "the tensors are not the reference's")
    if trial.dtype != "fp16" and (text := evidence.scale_difference_text(record, reference)):
        return Departure("loss-scale", text)
    return rounding_departure(trial, evidence.promises_bits(record))


def rounding_departure(trial: Trial, is_held_to_bits: bool) -> Departure | None:
    """Return a difference larger than rounding allows; None if there is none. If the method promises bit-equality
    (`is_held_to_bits`), any difference counts."""
    record, reference, others = trial
    if evidence.is_bit_equal(record, reference):
        return None
    if not others and not is_held_to_bits:
        return Departure("weights", "the probe ends at other bits, and there is no measure of rounding")
    rounding_limits = rounding_floor(reference, others or [reference])
    naming_limits = rounding_limits.times(NAMING_MULTIPLE)._replace(
        text=ROUNDING_LIMIT_TEXT, faint=FAINT_MULTIPLE
    )
    partly_trained = partly_trained_text(record, reference, others)
    beyond_limits = first_departure(record, reference, probe_limits(rounding_limits, reference))
    named = first_loss_departure(trial) or first_departure(record, reference, naming_limits)
    if partly_trained and not (named and beyond_limits):
        return Departure("partial-update", partly_trained)
    if is_held_to_bits and not named:
        return Departure("weights", "its bits are not the reference's, which it promises")
    if not named or not (is_held_to_bits or beyond_limits):
        return None
    tensor_cause = missing_decay_text(record, reference) or partly_trained
    if tensor_cause:
        return named._replace(difference_text=f"{tensor_cause}; {named.difference_text}", cause="")
    return named


def first_loss_departure(trial: Trial) -> Departure | None:
    """Return a departure if the first loss, before any update, is beyond rounding; else None. The first loss has a
    floor of its own, since no step before it has enlarged a rounding error."""
    record, reference, others = trial
    if not reference.losses or evidence.num_comparable_steps(record, reference) < 1:
        return None
    expected = reference.losses
    difference = relative_differences(record.losses[:1], expected)[0]
    rounding_differences = [relative_differences(other.losses[:1], expected)[0] for other in others]
    limit = NAMING_MULTIPLE * max(LEAST_DIFFERENCE, *rounding_differences, 0.0)
    if difference <= limit:
        return None
    losses = (record.losses[0], expected[0])
    text = _difference_text("loss", 1, losses, (difference, limit), ROUNDING_LIMIT_TEXT)
    return Departure("forward", f"{text}, before any update", FORWARD_CAUSE, 1)


def first_loss_beyond_text(record: Record, other: Record) -> str:
    """Return, as text, the first loss that differs from another method's by more than allowed; empty if none does."""
    tolerance = LOSS_TOLERANCE[evidence.device_and_dtype(record)]
    for step, loss, other_loss, difference in evidence.loss_differences(record, other):
        if not difference <= tolerance:
            allowed = f"relative {difference:.1e}, {tolerance:g} allowed"
            return f"loss {loss:.7g} instead of {other_loss:.7g} at step {step} ({allowed})"
    return ""


def partly_trained_text(record: Record, reference: Record, others: Sequence[Record]) -> str:
    """Return a text on the tensor of which the most elements did not change, or got no gradient, although they do in
    the reference; empty if there are few. `others`: the reference with other roundings."""
    for key, verb in SHARE_VERBS.items():
        missing = _missing_elements(record, reference, key)
        spreads = [_missing_elements(other, reference, key) for other in others]
        excess = {}
        for name, num_elements in missing.items():
            spread = max([0.0, *(abs(by_name.get(name, 0.0)) for by_name in spreads)])
            excess[name] = abs(num_elements) - MOST_UNCHANGED_ELEMENTS - NAMING_MULTIPLE * spread
        worst = max(excess, key=lambda name: excess[name], default="")
        if worst and excess[worst] > 0:
            shares = record.tensors[worst][key], reference.tensors[worst][key]  # type: ignore
            share, expected = distinct_texts(*shares, "%")
            return f"{worst} {verb} {share} of its elements, {expected} in the reference"
    return ""


def _missing_elements(record: Record, reference: Record, key: str) -> dict[str, float]:
    """Return, for each tensor, how many elements fewer a fact holds for than in the reference. `key`: a fact that is a
    share of a tensor's elements, such as `changed`. A tensor of which a record lacks the fact is left out."""
    anatomy, missing = reference.job.workload.anatomy, {}
    for name, tensor in reference.tensors.items():
        share, expected = record.tensors.get(name, tensor).get(key), tensor.get(key)
        if share is not None and expected is not None:
            num_elements = math.prod(anatomy.shape_of(name) or (1,))
            missing[name] = (expected - share) * num_elements  # type: ignore[operator]
    return missing


def missing_decay_text(record: Record, reference: Record) -> str:
    """Return a text if tensors end as if trained without weight decay; empty otherwise. Without decay, matrices are
    larger by the amount that decay takes off, while biases, norms and all other matrices agree. Decay shows late, so
    the first wrong loss or norm would not name this cause."""
    load = record.job.workload
    decay = WEIGHT_DECAY * sum(load.learning_rate_at(step) for step in range(1, record.job.steps + 1))
    vector_growth: dict[str, float] = {}
    matrix_growth: dict[str, float] = {}
    for name, ratio in evidence.fact_ratios(record, reference, "size").items():
        is_vector = name.endswith("bias") or ".ln" in name or "norm" in name
        (vector_growth if is_vector else matrix_growth)[name] = ratio - 1
    if median_of([0.0, *map(abs, vector_growth.values())]) > decay / 10:
        return ""
    median_growth = median_of([0.0, *matrix_growth.values()])
    if decay / 2 <= median_growth <= 2 * decay:
        others = "where biases and norms agree: " if vector_growth else ""
        return f"matrices end {median_growth:.1e} larger than the reference's, {others}as without decay"
    undecayed_names = [name for name, growth in matrix_growth.items() if decay / 2 <= growth <= 2 * decay]
    other_growths = [growth for name, growth in matrix_growth.items() if name not in undecayed_names]
    if not undecayed_names or any(abs(growth) > decay / 10 for growth in other_growths):
        return ""
    growth = median_of(matrix_growth[name] for name in undecayed_names)
    others = "where all other tensors agree: as without decay there"
    return f"{evidence.names_text(undecayed_names)}: {growth:.1e} larger at the end than in the reference, {others}"


def outstanding_group(record: Record, reference: Record) -> str:
    """Return the name of the group of tensors with a much larger error than all other tensors; empty if there is none.
    A group is the tensors of a layer, all biases, all norms or all matrices."""
    distances = evidence.tensor_distances(record, reference)
    groups: dict[str, list[str]] = {}
    for name in distances:
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
        kind = "matrices"
        if ".ln" in name:
            kind = "norms"
        elif name.endswith("bias"):
            kind = "biases"
        groups.setdefault(kind, []).append(name)
    ratios = {}
    for group, names in groups.items():
        others = [distance for name, distance in distances.items() if name not in names]
        if others:
            ratios[group] = median_of(distances[name] for name in names) / max(
                LEAST_DIFFERENCE, median_of(others)
            )
    farthest = max(ratios, key=lambda group: ratios[group], default="")
    return farthest if farthest and ratios[farthest] > OUTSTANDING_RATIO else ""


def first_departure(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """Return a step's departure beyond these limits or, if no step departs, a tensor's; None if no tensor departs."""
    return step_departure(record, reference, limits) or tensor_departure(record, reference, limits)


def step_departure(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """Return the departure of the first step whose loss or gradient norm is beyond its limit; None if there is none. A
    step computes its loss, then its gradient, then its update. So the first number that departs tells which of the
    three is wrong."""
    num_steps = num_comparable_steps(record, reference)
    losses = relative_differences(record.losses[:num_steps], reference.losses)
    norms = relative_differences(record.grad_norms[:num_steps], reference.grad_norms)
    for index in range(num_steps):
        step = index + 1
        if index < len(losses) and not losses[index] <= limits.losses[index]:
            pair = record.losses[index], reference.losses[index]
            text = _difference_text("loss", step, pair, (losses[index], limits.losses[index]), limits.text)
            if step == 1:
                return Departure("forward", f"{text}, before any update", FORWARD_CAUSE, step)
            return _update_departure(step, text, losses[index] <= limits.faint * limits.losses[index])
        if index < len(norms) and not norms[index] <= limits.norms[index]:
            pair = record.grad_norms[index], reference.grad_norms[index]
            difference_and_limit = norms[index], limits.norms[index]
            text = _difference_text("gradient norm", step, pair, difference_and_limit, limits.text)
            is_faint = norms[index] <= limits.faint * limits.norms[index]
            # Wrong weights change the loss, too. So if only the norm is wrong, the gradient is.
            if step == 1 or not norms[index] <= NORM_ONLY_RATIO * max(losses[index], limits.losses[index]):
                return _gradient_departure(step, text, record.job.workload.micro_batches > 1, is_faint)
            return _update_departure(step, text, is_faint)
    return None


def _gradient_departure(step: int, text: str, has_micro_batches: bool, is_faint: bool) -> Departure:
    cause = GRADIENT_CAUSE
    if has_micro_batches:
        cause += MICRO_BATCHES_HINT
    if step > 1:
        cause += STALE_GRADIENT_HINT.format(step)
    if is_faint:
        cause += FAINT_HINT
    return Departure("gradient", f"{text}, where the loss still agrees", cause, step)


def _update_departure(step: int, text: str, is_faint: bool) -> Departure:
    if step == 2:
        return Departure("update", text, UPDATE_CAUSE + FAINT_HINT * is_faint, step)
    if is_faint:
        return Departure("update", text, EARLIER_CAUSE.format(step - 1, step) + FAINT_HINT, step)
    return Departure("later", text, LATER_CAUSE.format(step - 1, step), step)


def tensor_departure(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """Return the departure of the final tensor that is farthest beyond its limit. If no tensor is beyond its limit,
    return the departure of the median tensor, which has a stricter limit. None if there is no departure, or not all
    steps can be compared."""
    if num_comparable_steps(record, reference) < len(reference.losses):
        return None
    for fact, (reason, text) in TENSOR_FAILURES.items():
        differences, limit_by_name = COMPARISONS[fact](record, reference), limits.tensors.get(fact, {})
        shares_of_limit = {}
        for name, difference in differences.items():
            if name in limit_by_name:
                shares_of_limit[name] = difference / limit_by_name[name]
        if not shares_of_limit:
            continue
        worst = _farthest(shares_of_limit)
        median, tensor = median_of(differences.values()), ""
        if not shares_of_limit[worst] <= 1:
            tensor, pair = worst, (differences[worst], limit_by_name[worst])
        elif not median <= limits.medians[fact]:
            tensor, pair = "the median tensor", (median, limits.medians[fact])
        if tensor:
            difference_text, limit_text = distinct_texts(*pair)
            failure = f"{tensor} {text.format(difference_text)} ({limits.text.format(limit_text)})"
            return Departure(reason, f"losses agree, but {failure}")
    return None


def _farthest(differences: dict[str, float]) -> str:
    """Return the name of the tensor with the largest difference; NaN counts as infinite."""
    return max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])


def _partial_update_departure(record: Record, reference: Record) -> Departure | None:
    """Return the departure of the tensor with the smallest share of changed elements; None if that is large enough."""
    shortfalls = {}
    for name, ratio in evidence.fact_ratios(record, reference, "changed").items():
        shortfalls[name] = 1 - ratio - rounding_share(reference, name)
    worst = max(shortfalls, key=lambda name: shortfalls[name], default="")
    if not worst or shortfalls[worst] <= CHANGED_TOLERANCE:
        return None
    share, expected = distinct_texts(
        record.tensors[worst]["changed"], reference.tensors[worst]["changed"], "%"
    )
    text = f"{worst} changed in {share} of its elements, {expected} in the reference"
    return Departure("partial-update", text)


def _update_size_departure(record: Record, reference: Record) -> Departure | None:
    """Return a departure if an update has the wrong size; else None. The size is wrong if a tensor moved too far or not
    far enough. The median tensor has a stricter limit."""
    ratios = evidence.fact_ratios(record, reference, "moved")
    if not ratios:
        return None
    errors = {name: abs(ratio - 1) - rounding_share(reference, name) for name, ratio in ratios.items()}
    worst = max(errors, key=lambda name: errors[name])
    if errors[worst] <= SIZE_TOLERANCE and median_of(errors.values()) <= MEDIAN_TOLERANCE:
        return None
    return Departure("update-size", f"{worst} moved {ratios[worst]:.3g} times as far as in the reference")


def _key_bias_departure(record: Record) -> Departure | None:
    """Return a departure if a bias of attention keys moved farther than AdamW can move it; else None. The true gradient
    of such a bias is 0, so the computed gradient is only rounding.

    The bias starts at 0. AdamW moves an element in a step by at most the learning rate times (1 - beta1) / sqrt(1 -
    beta2). Source: Kingma and Ba 2015, section 2.1.
    """
    load = record.job.workload
    sum_of_rates = sum(load.learning_rate_at(step) for step in range(1, record.job.steps + 1))
    noise = [elements for kind in load.anatomy.kinds for elements in kind.noise.values()]
    num_keys = max((stop - start for start, stop in noise), default=0)
    largest_move = math.sqrt(num_keys) * sum_of_rates * (1 - BETAS[0]) / math.sqrt(1 - BETAS[1])
    for name, tensor in record.tensors.items():
        if tensor.get("left_out") == "keys":
            keys_size = math.sqrt(max(0.0, tensor.get("size", 0.0) ** 2 - tensor["moved"] ** 2))
            if keys_size > largest_move + SIZE_ROUNDING * tensor["moved"]:
                limit = f"where AdamW cannot make it more than {largest_move:.1e}"
                return Departure("weights", f"{name}: the keys' part is {keys_size:.1e} large, {limit}")
    return None


def _difference_text(
    quantity: str,
    step: int,
    values: tuple[float | None, float | None],
    difference_and_limit: tuple[float, float],
    limit_format: str,
) -> str:
    """Return a step's difference as text. `values`: the value and the reference's value. `difference_and_limit`: their
    relative difference and its limit. `limit_format`: the text of a limit, with a place for its number."""
    value, expected = distinct_texts(*values, "g")
    difference, limit = distinct_texts(*difference_and_limit)
    limit_text = limit_format.format(limit)
    return f"{quantity} {value} instead of {expected} at step {step} (relative {difference}, {limit_text})"
