"""Finds where a training departs from the reference's: it compares losses first, then gradient norms, then tensors.

The functions only compare records. A difference counts if it is larger than honest rounding may cause (limits.py). A
method that promises bit-equality must keep its promise on a CPU, at the published learning rate and in the probe.

The final tensors show causes of their own: weight decay left out (without_decay), a tensor that was trained only in
part (partly_trained), or one group of tensors that is far off (outstanding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from harness.core.job import BETAS, WEIGHT_DECAY
from harness.core.record import Record
from harness.gate import evidence, flaws
from harness.gate.evidence import COMPARED, LEAST, Trial, comparable_steps, differences
from harness.gate.limits import (
    DROPOUT_ALLOWED,
    FAINT,
    FEW,
    LOSS_TOLERANCE,
    MEDIAN_TOLERANCE,
    NAMING,
    Limits,
    as_different,
    floor,
    median_of,
    of_probe,
    published,
    rounded_share,
)

# Largest allowed relative error of the distance that a tensor moved, compared with the reference.
SIZE_TOLERANCE = 0.1
# Largest allowed shortfall of the number of a tensor's changed elements, as a share of the reference's number.
CHANGED_TOLERANCE = 0.1
ROUNDED_AWAY = 1e-3  # rounding error of sqrt(size**2 - moved**2) in fp32, relative to `moved`
# if a norm's error is this many times the loss's error, the gradient is wrong, not the weights
TELLING = 100.0
FORWARD = "the forward pass, the batch or the starting weights are not the reference's"
GRADIENT = "the gradients, or the norm of them, are not the reference's"
UPDATE = "the first update, or when it takes effect, is not the reference's"
LATER = "the update of step {} or the batch of step {} is not the reference's"
UP_TO = "an update up to that of step {}, or the batch of step {}, is not the reference's"
SUMMED_PARTS = "; is every micro-batch summed?"
STALE = "; is a gradient a step late? compare both moments after step {}"
AS_FAINT = "; so little shows that it may be the forward pass, too"
TENSORS = {  # for each compared fact of a tensor: the reason and the text of a failure
    "way": ("weights", "ends {} of its way from the reference's"),
    "exp_avg": ("gradient-scale", "has a first moment {} off the reference's"),
    "exp_avg_sq": ("gradient-scale", "has a second moment {} off the reference's"),
    "size": ("weights", "has a size {} off the reference's"),
}
AS_ROUNDED = f"{{}} is {NAMING:g} times what rounding does here"  # a limit as text
# for each fact that is a share: its verb
SHARES = {"changed": "changed in", "with_gradient": "got a gradient in"}
# a group of tensors is named if its error is this many times the error of all other tensors
OUTSTANDING = 3.0


class Departure(NamedTuple):
    """A difference from the reference. `reason`: a word for programs. `seen`: the difference, as text. `cause`: the
    probable fault, as text. `step`: the step at which the fault first shows; None if that is not known."""

    reason: str
    seen: str
    cause: str = ""
    step: int | None = None

    @property
    def text(self) -> str:
        return f"{self.seen}: {self.cause}" if self.cause else self.seen


def of_run(record: Record, reference: Record) -> Departure | None:
    """Return the departure of a run at the published learning rate; None if all differences are within rounding."""
    must_be_exact = evidence.promises_bits(record)
    limits = published(record, reference)
    if must_be_exact:
        limits = limits._replace(losses=[0.0] * len(limits.losses))
    in_step = in_steps(record, reference, limits)
    if in_step and in_step.reason not in ("update", "later"):
        return in_step
    partial = _partial_update(record, reference)
    if in_step and must_be_exact:
        return partial or in_step
    if in_step:
        # At the published rate, a fault grows so slowly that it exceeds the tolerance late: it may have begun at any
        # step before, so name no step as its cause.
        return partial or Departure("loss", in_step.seen)
    of_size = partial or _update_size(record, reference)
    return of_size or in_tensors(record, reference, limits) or _grown_keys(record)


def drops_nothing(record: Record, reference: Record, undropped: Record) -> bool:
    """True if a run that should use dropout did not use it. Then the run equals the reference without dropout, within
    rounding, while the references with and without dropout differ by more."""
    rounding = published(record, undropped)
    shows = departure(reference, undropped, rounding.times(DROPOUT_ALLOWED))
    return shows is not None and not departure(record, undropped, rounding)


def beyond_dropout(record: Record, reference: Record, undropped: Record) -> Departure | None:
    """Return the departure of a run that drops other elements than the reference. None if the difference is no larger
    than a few times the change that dropout causes."""
    return departure(record, reference, floor(reference, [undropped]).alike().times(DROPOUT_ALLOWED))


def of_trial(trial: Trial) -> Departure | None:
    """Return the departure of a probe that trained; None if there is none. A departure is a flaw of the record itself,
    other tensors or loss scales than the reference's, or a difference larger than rounding allows."""
    record, reference = trial.record, trial.reference
    if flaw := flaws.flaw(record):
        return Departure(flaw.reason, flaw.text)
    if set(record.tensors) != set(reference.tensors):
        return Departure("missing", "the tensors are not the reference's")
    if trial.dtype != "fp16" and (text := evidence.other_scales(record, reference)):
        return Departure("loss-scale", text)
    return beyond_rounding(trial, evidence.promises_bits(record))


def beyond_rounding(trial: Trial, is_held_to_bits: bool) -> Departure | None:
    """Return a difference larger than rounding allows; None if there is none. If the method promises bit-equality
    (`is_held_to_bits`), any difference counts."""
    record, reference, others = trial
    if evidence.is_same(record, reference):
        return None
    if not others and not is_held_to_bits:
        return Departure("weights", "the probe ends at other bits, and there is no measure of rounding")
    rounding = floor(reference, others or [reference])
    naming = rounding.times(NAMING)._replace(text=AS_ROUNDED, faint=FAINT)
    partial = partly_trained(record, reference, others)
    departs = departure(record, reference, of_probe(rounding, reference))
    named = first_loss(trial) or departure(record, reference, naming)
    if partial and not (named and departs):
        return Departure("partial-update", partial)
    if is_held_to_bits and not named:
        return Departure("weights", "its bits are not the reference's, which it promises")
    if named and (is_held_to_bits or departs):
        message = without_decay(record, reference) or partial
        return named._replace(seen=f"{message}; {named.seen}", cause="") if message else named
    return None


def first_loss(trial: Trial) -> Departure | None:
    """Return a departure if the first loss, before any update, is beyond rounding; else None. The first loss has a
    floor of its own, since no step before it has enlarged a rounding error."""
    record, reference, others = trial
    if not reference.losses or evidence.comparable_steps(record, reference) < 1:
        return None
    far, *rounded = (evidence.differences(one.losses[:1], reference.losses)[0] for one in (record, *others))
    limit = NAMING * max(LEAST, *rounded, 0.0)
    if far <= limit:
        return None
    message = _difference_text("loss", 1, (record.losses[0], reference.losses[0]), (far, limit), AS_ROUNDED)
    return Departure("forward", f"{message}, before any update", FORWARD, 1)


def first_loss_beyond(record: Record, other: Record) -> str:
    """Return, as text, the first loss that differs from another method's by more than allowed; empty if none does."""
    tolerance = LOSS_TOLERANCE[evidence.kernels(record)]
    for step, loss, other_loss, difference in evidence.loss_differences(record, other):
        if not difference <= tolerance:
            allowed = f"relative {difference:.1e}, {tolerance:g} allowed"
            return f"loss {loss:.7g} instead of {other_loss:.7g} at step {step} ({allowed})"
    return ""


def partly_trained(record: Record, reference: Record, others: Sequence[Record]) -> str:
    """Return a text on the tensor of which the most elements did not change, or got no gradient, although they do in
    the reference; empty if there are few. `others`: the reference with other roundings."""
    for key, verb in SHARES.items():
        missing = _missing_elements(record, reference, key)
        spreads = [_missing_elements(other, reference, key) for other in others]
        beyond = {
            name: abs(num) - FEW - NAMING * max([0.0, *(abs(spread.get(name, 0.0)) for spread in spreads)])
            for name, num in missing.items()
        }
        if beyond and beyond[worst := max(beyond, key=lambda name: beyond[name])] > 0:
            mine, other = as_different(record.tensors[worst][key], reference.tensors[worst][key], "%")  # type: ignore
            return f"{worst} {verb} {mine} of its elements, {other} in the reference"
    return ""


def _missing_elements(record: Record, reference: Record, key: str) -> dict[str, float]:
    """Return, for each tensor, how many elements fewer a fact holds for than in the reference. `key`: a fact that is a
    share of a tensor's elements, such as `changed`. A tensor of which a record lacks the fact is left out."""
    anatomy, missing = reference.job.workload.anatomy, {}
    shapes = anatomy.ends | anatomy.layer
    for name, tensor in reference.tensors.items():
        share, expected = record.tensors.get(name, tensor).get(key), tensor.get(key)
        if share is not None and expected is not None:
            num_elements = math.prod(shapes.get(anatomy.within(name), (1,)))
            missing[name] = (expected - share) * num_elements  # type: ignore[operator]
    return missing


def without_decay(record: Record, reference: Record) -> str:
    """Return a text if tensors end as if trained without weight decay; empty otherwise. Without decay, matrices are
    larger by the amount that decay takes off, while biases, norms and all other matrices agree. Decay shows late, so
    the first wrong loss or norm would not name this cause."""
    load = record.job.workload
    decay = WEIGHT_DECAY * sum(load.learning_rate_at(step) for step in range(1, record.job.steps + 1))
    growth_by_kind: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for name, ratio in evidence.ratios(record, reference, "size").items():
        growth_by_kind[name.endswith("bias") or ".ln" in name or "norm" in name][name] = ratio - 1
    vector_growth = median_of([0.0, *map(abs, growth_by_kind[True].values())])
    matrix_growth = growth_by_kind[False]
    if vector_growth > decay / 10:
        return ""
    if decay / 2 <= (median := median_of([0.0, *matrix_growth.values()])) <= 2 * decay:
        return f"matrices end {median:.1e} larger than the reference's, where biases and norms agree: as without decay"
    undecayed = [name for name, growth in matrix_growth.items() if decay / 2 <= growth <= 2 * decay]
    if not undecayed or any(
        abs(growth) > decay / 10 for name, growth in matrix_growth.items() if name not in undecayed
    ):
        return ""
    growth = median_of(matrix_growth[name] for name in undecayed)
    others = "where all other tensors agree: as without decay there"
    return f"{evidence.names_text(undecayed)}: {growth:.1e} larger at the end than in the reference, {others}"


def outstanding(record: Record, reference: Record) -> str:
    """Return the name of the group of tensors with a much larger error than all other tensors; empty if there is none.
    A group is the tensors of a layer, all biases, all norms or all matrices."""
    distances = evidence.distances(record, reference)
    groups: dict[str, list[str]] = {}
    for name in distances:
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
        is_norm = ".ln" in name
        groups.setdefault(
            "norms" if is_norm else "biases" if name.endswith("bias") else "matrices", []
        ).append(name)
    ratios = {}
    for group, names in groups.items():
        others = [distance for name, distance in distances.items() if name not in names]
        if others:
            ratios[group] = median_of(distances[name] for name in names) / max(LEAST, median_of(others))
    farthest = max(ratios, key=lambda group: ratios[group], default="")
    return farthest if farthest and ratios[farthest] > OUTSTANDING else ""


def departure(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """Return a step's departure beyond these limits or, if no step departs, a tensor's; None if no tensor departs."""
    return in_steps(record, reference, limits) or in_tensors(record, reference, limits)


def in_steps(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """Return the departure of the first step whose loss or gradient norm is beyond its limit; None if there is none. A
    step computes its loss, then its gradient, then its update. So the first number that departs tells which of the
    three is wrong."""
    num_steps = comparable_steps(record, reference)
    losses = differences(record.losses[:num_steps], reference.losses)
    norms = differences(record.grad_norms[:num_steps], reference.grad_norms)
    for index in range(num_steps):
        step = index + 1
        if index < len(losses) and not losses[index] <= limits.losses[index]:
            pair = record.losses[index], reference.losses[index]
            text = _difference_text("loss", step, pair, (losses[index], limits.losses[index]), limits.text)
            if step == 1:
                return Departure("forward", f"{text}, before any update", FORWARD, step)
            return _of_update(step, text, losses[index] <= limits.faint * limits.losses[index])
        if index < len(norms) and not norms[index] <= limits.norms[index]:
            pair = record.grad_norms[index], reference.grad_norms[index]
            text = _difference_text(
                "gradient norm", step, pair, (norms[index], limits.norms[index]), limits.text
            )
            is_faint = norms[index] <= limits.faint * limits.norms[index]
            # Wrong weights change the loss, too. So if only the norm is wrong, the gradient is.
            if step == 1 or not norms[index] <= TELLING * max(losses[index], limits.losses[index]):
                return _of_gradient(step, text, record.job.workload.micro_batches > 1, is_faint)
            return _of_update(step, text, is_faint)
    return None


def _of_gradient(step: int, text: str, has_micro_batches: bool, is_faint: bool) -> Departure:
    cause = GRADIENT
    if has_micro_batches:
        cause += SUMMED_PARTS
    if step > 1:
        cause += STALE.format(step)
    if is_faint:
        cause += AS_FAINT
    return Departure("gradient", f"{text}, where the loss still agrees", cause, step)


def _of_update(step: int, text: str, is_faint: bool) -> Departure:
    if step == 2:
        return Departure("update", text, UPDATE + AS_FAINT * is_faint, step)
    if is_faint:
        return Departure("update", text, UP_TO.format(step - 1, step) + AS_FAINT, step)
    return Departure("later", text, LATER.format(step - 1, step), step)


def in_tensors(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """Return the departure of the final tensor that is farthest beyond its limit. If no tensor is beyond its limit,
    return the departure of the median tensor, which has a stricter limit. None if there is no departure, or not all
    steps can be compared."""
    if comparable_steps(record, reference) < len(reference.losses):
        return None
    for part, (reason, text) in TENSORS.items():
        by_name, most = COMPARED[part](record, reference), limits.tensors.get(part, {})
        beyond = {name: far / most[name] for name, far in by_name.items() if name in most}
        if not beyond:
            continue
        worst = max(beyond, key=lambda name: math.inf if math.isnan(beyond[name]) else beyond[name])
        median, tensor = median_of(by_name.values()), ""
        if not beyond[worst] <= 1:
            tensor, pair = worst, (by_name[worst], most[worst])
        elif not median <= limits.medians[part]:
            tensor, pair = "the median tensor", (median, limits.medians[part])
        if tensor:
            far, limit = as_different(*pair)
            departure_text = f"losses agree, but {tensor} {text.format(far)} ({limits.text.format(limit)})"
            return Departure(reason, departure_text)
    return None


def _partial_update(record: Record, reference: Record) -> Departure | None:
    """Return the departure of the tensor with the smallest share of changed elements; None if that is large enough."""
    short = {
        name: 1 - ratio - rounded_share(reference, name)
        for name, ratio in evidence.ratios(record, reference, "changed").items()
    }
    if short and not short[worst := max(short, key=lambda name: short[name])] <= CHANGED_TOLERANCE:
        mine, other = as_different(record.tensors[worst]["changed"], reference.tensors[worst]["changed"], "%")
        return Departure(
            "partial-update", f"{worst} changed in {mine} of its elements, {other} in the reference"
        )
    return None


def _update_size(record: Record, reference: Record) -> Departure | None:
    """Return a departure if an update has the wrong size; else None. The size is wrong if a tensor moved too far or not
    far enough. The median tensor has a stricter limit."""
    ratios = evidence.ratios(record, reference, "moved")
    if not ratios:
        return None
    off = {name: abs(ratio - 1) - rounded_share(reference, name) for name, ratio in ratios.items()}
    worst = max(off, key=lambda name: off[name])
    if off[worst] <= SIZE_TOLERANCE and median_of(off.values()) <= MEDIAN_TOLERANCE:
        return None
    return Departure("update-size", f"{worst} moved {ratios[worst]:.3g} times as far as in the reference")


def _grown_keys(record: Record) -> Departure | None:
    """Return a departure if a bias of attention keys moved farther than AdamW can move it; else None. The true gradient
    of such a bias is 0, so the computed gradient is only rounding.

    The bias starts at 0. AdamW moves an element in a step by at most the learning rate times (1 - beta1) / sqrt(1 -
    beta2). Source: Kingma and Ba 2015, section 2.1.
    """
    load = record.job.workload
    rates = sum(load.learning_rate_at(step) for step in range(1, record.job.steps + 1))
    num_keys = max((stop - start for start, stop in load.anatomy.noise.values()), default=0)
    allowed = math.sqrt(num_keys) * rates * (1 - BETAS[0]) / math.sqrt(1 - BETAS[1])
    for name, tensor in record.tensors.items():
        if tensor.get("left_out") == "keys":
            keys = math.sqrt(max(0.0, tensor.get("size", 0.0) ** 2 - tensor["moved"] ** 2))
            if keys > allowed + ROUNDED_AWAY * tensor["moved"]:
                most = f"where AdamW cannot make it more than {allowed:.1e}"
                return Departure("weights", f"{name}: the keys' part is {keys:.1e} large, {most}")
    return None


def _difference_text(
    what: str,
    step: int,
    pair: tuple[float | None, float | None],
    differences: tuple[float, float],
    limit: str,
) -> str:
    """Return a step's difference as text. `pair`: the value and the reference's value. `differences`: their relative
    difference and its limit. `limit`: the text of a limit, with room for its number."""
    value, other = as_different(*pair, "g")
    far, most = as_different(*differences)
    return f"{what} {value} instead of {other} at step {step} (relative {far}, {limit.format(most)})"
