"""Where a training departs from another one: first in its losses, then in its gradient norms, at last in its tensors.

Pure functions of two records. What honest rounding may amount to is given, as limits: constants of a dtype at the
published learning rate (gate.py), or measured there and then beside a probe (probe.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from harness.core.job import BETAS
from harness.core.record import Record

LEAST = 1e-7  # relative: what one rounding of fp32 amounts to
FIRST = 5  # steps that share a floor: in any one of them two roundings may agree by chance
# And, relative to the tensor itself, what a few elements that round the other way amount to: a norm's weights, near 1,
# move by a few units in the last place at the published learning rate.
ROUNDING = 2**-24 / 4
# Times the number of elements to the 1.5, relative: one sum in fp32 of normally distributed squares, as the reference's
# norm on a CPU, is off by a twentieth of this, of squares that differ more by more (results/LOG.md).
NORM_ROUNDING = 2e-13
# Relative, of a second moment: an engine that rounds beta2 to fp32 before it takes that from 1.
BETA_ROUNDING = 2**-25 / (1 - BETAS[1])
SUMMED = 1e-6  # relative, of a norm where all bits are the same: engines agree to 1.2e-7
TELLING = 100.0  # a norm off by more than this times the loss: the gradient is wrong, not the weights
FORWARD = "the forward pass, the batch or the starting weights are not the reference's"
GRADIENT = "the gradients, or the norm of them, are not the reference's"
UPDATE = "the first update, or when it takes effect, is not the reference's"
LATER = "the update of step {} or the batch of step {} is not the reference's"
UP_TO = "an update up to that of step {}, or the batch of step {}, is not the reference's"
AS_FAINT = "; so little shows that it may be the forward pass, too"
OUTSTANDING = 3.0  # a group of tensors this many times as far off as the others is named
Moment = Literal["exp_avg", "exp_avg_sq"]


class Limits(NamedTuple):
    """Relative differences, by step and by tensor, of which the median's is one more."""

    losses: Sequence[float]
    norms: Sequence[float]
    tensors: dict[str, dict[str, float]]  # by what of a tensor is compared, and its name
    medians: dict[str, float]
    told: str = "{:.1e} allowed"
    faint: float = 0.0  # times a limit: what is first seen within that may have grown from below the limit

    def times(self, factor: float) -> Limits:
        return Limits(
            [factor * each for each in self.losses], [factor * each for each in self.norms],
            {part: {name: factor * each for name, each in own.items()} for part, own in self.tensors.items()},
            {part: factor * each for part, each in self.medians.items()},
        )  # fmt: skip

    def of_norms_summed_by(self, reference: Record) -> Limits:
        """No less for a norm than what its own sum rounds."""
        workload = reference.job.workload
        largest = workload.hidden_size * max(workload.vocab_size, 4 * workload.hidden_size)
        least = 0.0 if reference.job.device == "cuda" else NORM_ROUNDING * largest**1.5
        return self._replace(norms=[max(least, each) for each in self.norms])

    def of_rounded_betas(self) -> Limits:
        least = {name: max(BETA_ROUNDING, each) for name, each in self.tensors["exp_avg_sq"].items()}
        median = max(BETA_ROUNDING, self.medians["exp_avg_sq"])
        return self._replace(
            tensors=self.tensors | {"exp_avg_sq": least}, medians=self.medians | {"exp_avg_sq": median}
        )

    def alike(self) -> Limits:
        """With the largest of any tensor for every one."""
        largest = {part: max(own.values(), default=0.0) for part, own in self.tensors.items()}
        return self._replace(tensors={part: dict.fromkeys(own, largest[part]) for part, own in self.tensors.items()})


class Departure(NamedTuple):
    """A reason for programs, what was seen and what it means for people, and the step from which on, if it shows before
    the end."""

    reason: str
    seen: str
    cause: str = ""
    step: int | None = None

    @property
    def text(self) -> str:
        return f"{self.seen}: {self.cause}" if self.cause else self.seen


def floor(reference: Record, others: Sequence[Record], wide: Sequence[Record] = ()) -> Limits:
    """How far other records of the same training, right by construction, are from the reference's: what rounding
    amounts to, the largest of any. `wide`: in a wider dtype, of which only losses and norms count. A tensor's floor is
    the median tensor's at least, any one is LEAST at least."""
    shared = [(other, comparable_steps(other, reference)) for other in (*others, *wide)]
    num = len(reference.losses)
    losses = [differences(other.losses[:steps], reference.losses) for other, steps in shared]
    norms = [differences(other.grad_norms[:steps], reference.grad_norms) for other, steps in shared]
    tensors, medians = {}, {}
    for part, (_, _, compare) in PARTS.items():
        found = [compare(other, reference) for other in others]
        medians[part] = max([LEAST, *(_median(far.values()) for far in found)])
        tensors[part] = {name: max(medians[part], *(far[name] for far in found)) for name in found[0]}
    return Limits(_largest_so_far(losses, num), _largest_so_far(norms, num), tensors, medians)


def departure(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """The first there is."""
    return in_steps(record, reference, limits) or in_tensors(record, reference, limits)


def in_steps(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """The first step whose loss or, where that agrees, gradient norm is beyond its limit. A step's loss comes before
    its gradient, and that before its update: the first departure tells what went wrong."""
    num = comparable_steps(record, reference)
    losses = differences(record.losses[:num], reference.losses)
    norms = differences(record.grad_norms[:num], reference.grad_norms)
    for at in range(num):
        step = at + 1
        if at < len(losses) and not losses[at] <= limits.losses[at]:
            limit = limits.told.format(limits.losses[at])
            told = _told("loss", step, record.losses[at], reference.losses[at], losses[at], limit)
            if step == 1:
                return Departure("forward", f"{told}, before any update", FORWARD, step)
            return _of_update(step, told, losses[at] <= limits.faint * limits.losses[at])
        if at < len(norms) and not norms[at] <= limits.norms[at]:
            ours, theirs = record.grad_norms[at], reference.grad_norms[at]
            told = _told("gradient norm", step, ours, theirs, norms[at], limits.told.format(limits.norms[at]))
            is_faint = norms[at] <= limits.faint * limits.norms[at]
            # Wrong weights that do not show in the loss do not change the gradient much.
            if step == 1 or not norms[at] <= TELLING * max(losses[at], limits.losses[at]):
                cause = GRADIENT + AS_FAINT * is_faint
                return Departure("gradient", f"{told}, where the loss still agrees", cause, step)
            return _of_update(step, told, is_faint)
    return None


def _of_update(step: int, told: str, is_faint: bool) -> Departure:
    if step == 2:
        return Departure("update", told, UPDATE + AS_FAINT * is_faint, step)
    if is_faint:
        return Departure("update", told, UP_TO.format(step - 1, step) + AS_FAINT, step)
    return Departure("later", told, LATER.format(step - 1, step), step)


def is_same(record: Record, reference: Record) -> bool:
    """Bit by bit, in every loss and every final weight; a gradient norm's own sum may round."""
    found = zip(differences(record.grad_norms, reference.grad_norms), reference.grad_norms, strict=False)
    norms = [each for each, theirs in found if theirs is not None and math.isfinite(theirs)]  # fp16 skips the others
    return (
        record.losses == reference.losses
        and all(norm <= SUMMED for norm in norms)
        and all(
            name in record.tensors and record.tensors[name].get("sha256") == tensor.get("sha256") is not None
            for name, tensor in reference.tensors.items()
        )
    )


def in_tensors(record: Record, reference: Record, limits: Limits) -> Departure | None:
    """The final tensor, or the median of them, that is beyond its limit."""
    if comparable_steps(record, reference) < len(reference.losses):
        return None
    for part, (reason, text, compare) in PARTS.items():
        found, allowed = compare(record, reference), limits.tensors[part]
        beyond = {name: each / allowed[name] for name, each in found.items() if name in allowed}
        if not beyond:
            continue
        worst = max(beyond, key=lambda name: math.inf if math.isnan(beyond[name]) else beyond[name])
        if not beyond[worst] <= 1:
            said = text.format(found[worst])
            return Departure(reason, f"losses agree, but {worst} {said} ({limits.told.format(allowed[worst])})")
        if not (median := _median(found.values())) <= limits.medians[part]:
            said = text.format(median)
            limit = limits.told.format(limits.medians[part])
            return Departure(reason, f"losses agree, but the median tensor {said} ({limit})")
    return None


def comparable_steps(record: Record, reference: Record) -> int:
    """Of fp16 those before the first whose loss scale differs: from there on other steps are skipped."""
    if "fp16" not in (record.job.workload.dtype, reference.job.workload.dtype):
        return min(len(record.losses), len(reference.losses))
    pairs = zip(record.loss_scales, reference.loss_scales, strict=False)
    skips = set(record.skipped_steps) ^ set(reference.skipped_steps)
    differing = [step for step, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs]
    return min([*differing, *skips, min(len(record.losses), len(reference.losses)) + 1]) - 1


def differences(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Relative, of each step; 0 where a log has no value."""
    pairs = zip(ours, theirs, strict=False)
    return [0.0 if a is None or b is None or a == b else abs(a - b) / (abs(b) or LEAST) for a, b in pairs]


def distances(record: Record, reference: Record) -> dict[str, float]:
    """Of each tensor: between its change and the reference's, relative to how far that moved, by their sketches, beyond
    what single elements' rounding amounts to."""
    found = {}
    for name, theirs in reference.tensors.items():
        ours = record.tensors.get(name, theirs)
        sketch, other = ours.get("sketch"), theirs.get("sketch")
        if sketch and other and theirs["moved"] and ours.get("left_out") == theirs.get("left_out"):
            far = math.dist(sketch, other) - ROUNDING * theirs.get("size", 0.0)
            found[name] = max(0.0, far) / theirs["moved"]
    return found


def moment_differences(record: Record, reference: Record, moment: Moment) -> dict[str, float]:
    """Relative, of each tensor's, by their sizes; where the method returns none at all, empty."""
    if not has_moments(record, moment):
        return {}
    found = {}
    for name, theirs in reference.tensors.items():
        ours, other = record.tensors.get(name, theirs), theirs.get(moment)
        if other and ours.get("left_out") == theirs.get("left_out"):
            size = ours.get(moment)
            found[name] = math.inf if size is None else abs(size / other - 1)
    return found


def has_moments(record: Record, moment: Moment) -> bool:
    return any(tensor.get(moment) is not None for tensor in record.tensors.values())


# What of a tensor is compared: the reason and the text of a departure, and how.
PARTS: dict[str, tuple[str, str, Callable[[Record, Record], dict[str, float]]]] = {
    "way": ("weights", "ends {:.1e} of its way from the reference's", distances),
    "exp_avg": ("gradient-scale", "has a first moment {:.1e} off the reference's",
                partial(moment_differences, moment="exp_avg")),
    "exp_avg_sq": ("gradient-scale", "has a second moment {:.1e} off the reference's",
                   partial(moment_differences, moment="exp_avg_sq")),
}  # fmt: skip


def outstanding(record: Record, reference: Record) -> str:
    """Where the tensors are farther off than elsewhere: a layer, biases, norms, matrices; empty if nowhere."""
    found = distances(record, reference)
    groups: dict[str, list[str]] = {}
    for name in found:
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
        is_norm = ".ln" in name
        groups.setdefault("norms" if is_norm else "biases" if name.endswith("bias") else "matrices", []).append(name)
    told = {}
    for group, names in groups.items():
        others = [each for name, each in found.items() if name not in names]
        if others and (there := _median(found[name] for name in names)) > OUTSTANDING * max(LEAST, _median(others)):
            told[group] = there / max(LEAST, _median(others))
    return max(told, key=lambda group: told[group]) if told else ""


def _largest_so_far(series: list[list[float]], num: int) -> list[float]:
    """Step by step the largest difference of any series so far, the first steps taken together."""
    ends = [max(FIRST, step) for step in range(1, num + 1)]
    return [max([LEAST, *(value for each in series for value in each[:end])]) for end in ends]


def _told(what: str, step: int, ours: float | None, theirs: float | None, difference: float, limit: str) -> str:
    how = f"relative {difference:.1e}, {limit}"
    return f"{what} {ours:.7g} instead of {theirs:.7g} at step {step} ({how})"


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values) or [0.0])
