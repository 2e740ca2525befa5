"""The gate: does a record show the reference's training? A verdict with its evidence, from records alone.

Own conditions first: all steps ran, all losses are finite, every tensor changed. Then the comparison: losses and
gradient norms step by step, and for each tensor the share that changed, the distance moved, where it ended and the size
of its moments. A method that promises bit-equality is held to it on a CPU; elsewhere the tolerances below apply.
At last the probe (probe.py), which trains at a rate at which faults show. The first departure names the reason of a
failure, the probe's before the run's own.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from harness.core.job import BETAS, WEIGHT_DECAY
from harness.core.record import VERDICTS, Gate, Record
from harness.jobs import departure
from harness.jobs import probe as probing
from harness.jobs.departure import Departure, Limits
from harness.jobs.probe import Probe, Trial

# Largest relative difference of a step's loss. fp32: kernels that sum in another order differ by about 1e-6 after 20
# steps; bf16 has 8 bits of mantissa, fp16 has 11. CUDA adds atomics and fused attention.
LOSS_TOLERANCE = {
    ("cpu", "fp32"): 1e-5, ("cpu", "bf16"): 5e-3, ("cpu", "fp16"): 5e-4,
    ("cuda", "fp32"): 1e-4, ("cuda", "bf16"): 1e-2, ("cuda", "fp16"): 1e-3,
}  # fmt: skip
# The same of a gradient norm: 2e-7, 1e-3 and 2e-4 were seen at 4 layers x 64, engines differ by 5e-7 in fp32.
NORM_TOLERANCE = {
    ("cpu", "fp32"): 1e-4, ("cpu", "bf16"): 5e-2, ("cpu", "fp16"): 1e-2,
    ("cuda", "fp32"): 1e-3, ("cuda", "bf16"): 1e-1, ("cuda", "fp16"): 2e-2,
}  # fmt: skip
# How far a tensor moved, relative to the reference's.
SIZE_TOLERANCE = 0.1
# How large its first moment is; the second, a square, may differ twice as much. In bf16 the gradient of a norm's bias
# before attention is a sum that nearly cancels: a ratio of 0.88 was seen where losses agree to 4e-5.
MOMENT_TOLERANCE = {"fp32": 0.1, "bf16": 0.3, "fp16": 0.1}
# The same over the median tensor: cancellation concerns few of them.
MEDIAN_TOLERANCE = 0.05
# Distance between a tensor's change and the reference's, relative to how far the reference's moved. In half precision
# the direction of a step where the gradient is rounding noise is noise, too. A CPU in fp32 shows 1e-3 and less.
DISTANCE_TOLERANCE = {
    ("cpu", "fp32"): 2e-3, ("cpu", "bf16"): 0.3, ("cpu", "fp16"): 0.3,
    ("cuda", "fp32"): 5e-2, ("cuda", "bf16"): 0.3, ("cuda", "fp16"): 0.3,
}  # fmt: skip
# The same over the median tensor: rounding noise moves few tensors, a stale or missing update all of them.
MEDIAN_DISTANCE_TOLERANCE = 0.05
# These two hold from so many steps on. The first steps of AdamW go the full rate in the sign of a gradient, be it
# noise: what 20 steps average out, one shows.
SETTLED_STEPS = 20
# Half the distance from 1 to the float above it: a shorter step up rounds to none, and a step of AdamW is a part of its
# rate, often less than half, so that one down does, too.
SMALLEST_STEP = 2**-24
# Of rate times decay: what is less is lost when it is subtracted from 1.
SMALLEST_DECAY = 2**-25
# A method that drops other elements may differ from the reference by this times what dropout changes in the reference.
# Compare the largest tensor distance with the largest that dropout causes: one tensor alone may by chance be near. The
# honest runs by which this was chosen needed 1.6 to 3.6 times (results/LOG.md), those of bench/dropout_rule.py 0.8 to
# 2.9.
DROPOUT_ALLOWED = 6.0
UNPROBED = "a run whose probe did not train has no throughput; --no-probe judges without one, and says so"
# Reasons that are as certain as a probe's: they name what is missing.
CERTAIN = ("not-finite", "incomplete", "missing", "unchanged", "data")
ROUNDED_AWAY = 1e-3  # of a difference of two squares in fp32, relative to the larger one's root
MOMENTS: dict[str, departure.Moment] = {"first moments": "exp_avg", "second moments": "exp_avg_sq"}
# Share of a tensor's elements that changed, relative to the reference's.
CHANGED_TOLERANCE = 0.1
SEVERITY = [*(word for word in VERDICTS if word != "failed"), "failed"]


def judge(
    record: Record, reference: Record | None = None, twins: tuple[Record, Record] | None = None,
    peers: Sequence[Record] = (), probe: Probe | None = None, undropped: Record | None = None,
) -> Gate:  # fmt: skip
    """The verdict on a record, and what it rests on.

    `reference` is the same workload trained by the reference, or the record itself. If the reference does not fit,
    `twins` are this method and the reference at the largest depth that fits, and `peers` are other methods' records of
    this very workload. `undropped` is the reference without dropout, where the method drops other elements: what
    dropout changes there is the measure of how far the two may differ.
    """
    verdict = _judge(record, reference, twins, peers, undropped)
    return verdict if probe is None or verdict.verdict == "untested" else _with_probe(verdict, record, probe)


def _judge(
    record: Record, reference: Record | None, twins: tuple[Record, Record] | None, peers: Sequence[Record],
    undropped: Record | None,
) -> Gate:  # fmt: skip
    """By the run alone."""
    if record.status != "ok":
        return Gate("untested", "not-finished", f"ended as {record.status}: nothing to compare")
    if own := _own_conditions(record) or _elsewhere(record):
        return own
    if reference is record:
        return Gate("exact", "", f"is the reference: every loss of {_steps(record)} finite, every tensor changed")
    if reference is not None:
        return _compare(record, reference, undropped)
    if twins is not None:
        return _by_twin(record, *twins, peers)
    return Gate()


def together(verdicts: list[Gate]) -> Gate:
    """The verdict on several models that took turns: the worst one's, with its number."""
    if len(verdicts) == 1:
        return verdicts[0]
    number, worst = max(enumerate(verdicts, start=1), key=lambda item: SEVERITY.index(item[1].verdict))
    told = f"each of {len(verdicts)} models: " if worst.passed else f"model {number} of {len(verdicts)}: "
    evidence = {**worst.evidence, "models": [verdict.verdict for verdict in verdicts]}
    return dataclasses.replace(worst, text=told + worst.text, evidence=evidence)


def _own_conditions(record: Record) -> Gate | None:
    for step, loss in enumerate(record.losses, start=1):
        if loss is not None and not math.isfinite(loss):
            return _failed("not-finite", f"the loss is {loss} from step {step} on", step=step)
    if len(record.losses) != record.job.steps:
        return _failed("incomplete", f"{len(record.losses)} of {record.job.steps} steps have a loss")
    # In fp16 a scale that is wrong shows there: the comparison names it.
    if record.origin == "run" and record.job.workload.dtype != "fp16":
        for step, norm in enumerate(record.grad_norms, start=1):
            if norm is not None and not math.isfinite(norm):
                return _failed("not-finite", f"the gradient norm is {norm} at step {step}", step=step)
    if not record.tensors:
        return _failed("missing", "the method returned no trained tensors")
    for name, tensor in record.tensors.items():
        numbers = (
            tensor["moved"],
            tensor.get("size"),
            tensor.get("exp_avg"),
            tensor.get("exp_avg_sq"),
            *(tensor.get("sketch") or ()),
        )
        if not all(number is None or math.isfinite(float(number)) for number in numbers):
            return _failed("not-finite", f"{name} or a moment of it is not finite after the last step")
    last_rate = record.job.workload.learning_rate_at(record.job.steps)
    unchanged = [
        name
        for name, tensor in record.tensors.items()
        # A step of AdamW is no longer than its rate, which may be less than a weight near 1 can show.
        if not tensor["changed"] and not (last_rate < SMALLEST_STEP and tensor.get("exp_avg"))
    ]
    if unchanged:
        return _failed("unchanged", f"{_some(unchanged)} did not change in {record.job.steps} steps", tensors=unchanged)
    return None


def _elsewhere(record: Record) -> Gate | None:
    """A training that was not done here: by code or source without a name, by a checkpoint, or beside the device."""
    if unlisted := record.software.get("unlisted"):
        told = f"it executed {_some(unlisted)}, which its identity lacks"
        return Gate("untested", "unlisted-code", f"{told}; import it by its name in the method's file")
    steps, source = record.schedule.get("resumed_steps", 0), record.schedule.get("resumed_source")
    if steps >= record.job.steps:
        return Gate("untested", "no-step", f"all of its {steps} steps are the checkpoint's: none was trained here")
    if steps and source != record.software.get("source", source):
        told = f"its first {steps} steps were trained by other source: {source or 'unknown'}"
        return Gate("untested", "other-source", told)
    load, peak = record.job.workload, record.peaks.get("device_allocated")
    least = load.weight_bytes * 4 * load.hidden_size**2
    if peak is not None and peak < least and record.origin == "run":
        told = f"at most {peak} bytes of the device were in use, less than the {least} of the largest matrix of a layer"
        return Gate("untested", "device", f"{told}: it was trained elsewhere")
    return None


def _compare(record: Record, reference: Record, undropped: Record | None = None) -> Gate:
    where = _kernels(record)
    largest = max((difference for *_, difference in _loss_differences(record, reference)), default=math.nan)
    evidence: dict[str, Any] = {"reference": reference.key, "loss_difference": largest}
    own = _own_conditions(reference) if reference.status == "ok" else Gate(text=f"ended as {reference.status}")
    if own:
        evidence["reference_ended"] = reference.status
        return Gate("untested", "no-reference", f"the reference itself did not train: {own.text}", evidence)
    if record.data_sha256 != reference.data_sha256:
        return _failed("data", "trained on other data than the reference", **evidence)
    if set(record.tensors) != set(reference.tensors):
        names = sorted(set(record.tensors) ^ set(reference.tensors))
        return _failed("missing", f"the tensors are not the reference's: {_some(names)}", **evidence)
    if (record.loss_scales, record.skipped_steps) != (reference.loss_scales, reference.skipped_steps):
        return _failed("loss-scale", _other_scales(record, reference), **evidence)
    if departure.is_same(record, reference):
        return Gate("exact", "", f"{_steps(record)} and all weights bit-equal to {reference.job.method}", evidence)
    if undropped is not None:
        return _within_dropout(record, reference, undropped, evidence)
    must_be_exact = record.bit_exact and where[0] == "cpu"
    limits = _limits(record, reference)
    tolerance = 0.0 if must_be_exact else LOSS_TOLERANCE[where]
    if must_be_exact:
        limits = limits._replace(losses=[0.0] * len(limits.losses))
    found = departure.in_steps(record, reference, limits)
    if found and found.reason in ("update", "later"):
        # What shows late at the published rate, beyond a tolerance, may have begun at any step before.
        found = _partial_update(record, reference) or (found if must_be_exact else Departure("loss", found.seen))
    found = found or _partial_update(record, reference) or _update_size(record, reference)
    if found := found or departure.in_tensors(record, reference, limits) or _grown_keys(record):
        return _failed(found.reason, found.text, tolerance=tolerance, **evidence, step=found.step)
    if must_be_exact:
        return _failed("weights", "losses agree but the final weights are not the reference's bits", **evidence)
    text = f"{_steps(record)} within {tolerance:g} of {reference.job.method} (largest {largest:.1e})"
    return Gate("tolerance", "", text, {**evidence, "tolerance": tolerance})


def _within_dropout(record: Record, reference: Record, undropped: Record, evidence: dict[str, Any]) -> Gate:
    """By what dropout itself changes: other elements dropped may change no more than a few times that."""
    if (
        untrained := _own_conditions(undropped)
        if undropped.status == "ok"
        else Gate(text=f"ended as {undropped.status}")
    ):
        return Gate(
            "untested", "no-reference", f"the reference without dropout did not train: {untrained.text}", evidence
        )
    rounding = _limits(record, undropped)
    shows = departure.departure(reference, undropped, rounding.times(DROPOUT_ALLOWED))
    if shows and not departure.departure(record, undropped, rounding):
        told = "it dropped nothing: within rounding it is the reference without dropout"
        return _failed("dropout", told, **evidence)
    limits = departure.floor(reference, [undropped]).alike().times(DROPOUT_ALLOWED)
    if found := departure.departure(record, reference, limits):
        return _failed(found.reason, found.text, **evidence, step=found.step)
    text = f"{_steps(record)} within {DROPOUT_ALLOWED:g} times what dropout changes in {reference.job.method}"
    return Gate("tolerance", "", f"{text}; which elements are dropped was not compared", evidence)


def _limits(record: Record, reference: Record) -> Limits:
    """What rounding may amount to at the published rate, by device and dtype."""
    where = _kernels(record)
    steps, names = len(reference.losses), list(reference.tensors)
    unsettled = max(1.0, math.sqrt(SETTLED_STEPS / steps))
    moment = MOMENT_TOLERANCE[where[1]]
    each = {"way": unsettled * DISTANCE_TOLERANCE[where], "exp_avg": moment, "exp_avg_sq": 2 * moment}
    medians = {"way": unsettled * MEDIAN_DISTANCE_TOLERANCE, "exp_avg": MEDIAN_TOLERANCE,
               "exp_avg_sq": 2 * MEDIAN_TOLERANCE}  # fmt: skip
    tensors = {part: dict.fromkeys(names, limit) for part, limit in each.items()}
    limits = Limits([LOSS_TOLERANCE[where]] * steps, [NORM_TOLERANCE[where]] * steps, tensors, medians)
    return limits.of_norms_summed_by(reference)


def _by_twin(record: Record, twin: Record, twin_reference: Record, peers: Sequence[Record]) -> Gate:
    depth = twin.job.workload.num_layers
    verdict = judge(twin, twin_reference)
    evidence: dict[str, Any] = {"twin": twin.key, "twin_layers": depth, "twin_verdict": verdict.verdict}
    if not verdict.passed:
        reason = f"its twin at {depth} layers: {verdict.text}"
        return Gate("failed" if verdict.verdict == "failed" else "untested", verdict.reason, reason, evidence)
    tolerance = LOSS_TOLERANCE[_kernels(record)]
    agreeing = []
    for peer in peers:
        if _own_conditions(peer) is None and peer.data_sha256 == record.data_sha256:
            if beyond := _first_loss_beyond(record, peer, tolerance):
                return _failed("peers", f"{peer.job.method} trains this size otherwise: {beyond[1]}", **evidence)
            agreeing.append(peer.job.method)
    also = f", and agrees with {', '.join(agreeing)} here" if agreeing else ""
    return Gate("twin", "", f"its twin at {depth} layers is {verdict.verdict}{also}", {**evidence, "peers": agreeing})


def _kernels(record: Record) -> tuple[str, str]:
    """Device and dtype whose rounding to expect: sim computes with the CPU's kernels."""
    device = "cpu" if record.job.device == "sim" else record.job.device
    return device, record.job.workload.dtype


def _steps(record: Record) -> str:
    """The number of steps, and of those that fp16 skipped, if any."""
    skipped = f" ({len(record.skipped_steps)} skipped by the loss scale)" if record.skipped_steps else ""
    return f"{record.job.steps} steps{skipped}"


def _other_scales(record: Record, reference: Record) -> str:
    """The first difference in loss scales, or in the steps skipped for gradients that are not finite."""
    if record.skipped_steps != reference.skipped_steps:
        names = ([*map(str, each.skipped_steps)] for each in (record, reference))
        ours, theirs = (f"steps {_some(found)}" if found else "no step" for found in names)
        return f"it skipped {ours} for gradients that are not finite, the reference {theirs}"
    pairs = zip_longest(record.loss_scales, reference.loss_scales)
    step, (scale, other) = next((step, pair) for step, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    return f"loss scale {scale} instead of {other} at step {step}"


def _partial_update(record: Record, reference: Record) -> Departure | None:
    """A tensor of which too few elements changed."""
    ratios = _ratios(record, reference, "changed")
    if ratios and not ratios[worst := min(ratios, key=lambda name: ratios[name])] >= 1 - CHANGED_TOLERANCE:
        ours, theirs = (each.tensors[worst]["changed"] for each in (record, reference))
        return Departure(
            "partial-update", f"{worst} changed in {ours:.1%} of its elements, {theirs:.1%} in the reference"
        )
    return None


def _update_size(record: Record, reference: Record) -> Departure | None:
    """A tensor that moved another way, or, less, all of them."""
    ratios = _ratios(record, reference, "moved")
    if not ratios:
        return None
    worst, median = max(ratios, key=lambda name: abs(ratios[name] - 1)), statistics.median(ratios.values())
    if abs(ratios[worst] - 1) <= SIZE_TOLERANCE and abs(median - 1) <= MEDIAN_TOLERANCE:
        return None
    return Departure("update-size", f"{worst} moved {ratios[worst]:.3g} times as far as in the reference")


def _grown_keys(record: Record) -> Departure | None:
    """A bias of keys, which no gradient moves but by rounding, beyond what AdamW makes of any gradient: a step of an
    element is at most the learning rate times (1 - beta1) / sqrt(1 - beta2). It starts at 0. Source: Kingma and Ba
    2015, section 2.1."""
    load = record.job.workload
    rates = sum(load.learning_rate_at(step) for step in range(1, record.job.steps + 1))
    allowed = math.sqrt(load.hidden_size) * rates * (1 - BETAS[0]) / math.sqrt(1 - BETAS[1])
    for name, tensor in record.tensors.items():
        if tensor.get("left_out") == "keys":
            keys = math.sqrt(max(0.0, tensor.get("size", 0.0) ** 2 - tensor["moved"] ** 2))
            if keys > allowed + ROUNDED_AWAY * tensor["moved"]:
                told = f"{name}: the keys' part is {keys:.1e} large, where AdamW cannot make it more than {allowed:.1e}"
                return Departure("weights", told)
    return None


def _ratios(record: Record, reference: Record, key: str) -> dict[str, float]:
    pairs = {
        name: (record.tensors[name].get(key), theirs.get(key))
        for name, theirs in reference.tensors.items()
        if record.tensors[name].get("left_out") == theirs.get("left_out")
    }
    return {name: ours / theirs for name, (ours, theirs) in pairs.items() if ours is not None and theirs}  # type: ignore


def _with_probe(verdict: Gate, record: Record, probe: Probe) -> Gate:
    """The verdict by the probe, too: what it found, or that it found nothing, and what was not tested."""
    evidence = {**verdict.evidence, "probe": {trial.dtype: trial.record.key for trial in probe.trials}}
    layers, steps = probe.trials[0].extent if probe.trials else probing.NONE
    evidence |= {"probe_layers": layers, "probe_steps": steps} if steps else {}
    tested, untested = [], [probe.untested] if probe.untested else []
    if probe.refused and verdict.passed:
        return Gate("untested", "probe", f"{probe.refused}; {UNPROBED}", evidence)
    for trial in probe.trials:
        if untrained := _untrained_reference(trial):
            untested.append(untrained)
            continue
        if trial.record.status != "ok":
            ended = f"the probe in {trial.dtype} ended as {trial.record.status}: {trial.record.reason}"
            if verdict.passed:
                return Gate("untested", "probe", f"{ended}; {UNPROBED}", evidence)
            untested.append(ended)
            continue
        if (found := _departure_of(trial)) and verdict.reason not in CERTAIN:
            itself = verdict.text.removesuffix(f": {found.cause}")  # which is said once
            also = "" if verdict.passed else f"; the run itself: {itself}"
            return _failed(found.reason, probing.told(trial, found) + also, **{**evidence, "step": found.step})
        num = departure.comparable_steps(trial.record, trial.reference)
        tested += [trial.dtype] * (num > 0)
        if num < trial.extent.steps:
            untested.append(f"{trial.dtype} was tested up to step {num}, before its loss scale changes")
    has = {name: departure.has_moments(record, moment) for name, moment in MOMENTS.items()}
    untested += [f"{name} were not tested: the method returns none" for name in has if not has[name]]
    has_norms = all(len(each.grad_norms) == len(each.losses) for each in (record, *(t.record for t in probe.trials)))
    untested += [] if has_norms else ["norms were not tested: the method returns none, or not in every step"]
    if tested:
        parts = [
            "losses",
            *["norms"] * has_norms,
            "weights",
            *(["both moments"] if all(has.values()) else [n for n in has if has[n]]),
        ]
        of = record.job.workload.num_layers
        depth_told = f" of {layers} of its {of} layers" if layers < of else ""
        rests = f"probe: {steps} steps{depth_told} in {' and '.join(tested)}, {', '.join(parts)}"
        return dataclasses.replace(verdict, text="; ".join([verdict.text, rests, *untested]), evidence=evidence)
    if record.job.workload.learning_rate_at(record.job.steps) * WEIGHT_DECAY < SMALLEST_DECAY:
        untested.append("decay was not tested")
    return dataclasses.replace(verdict, text="; ".join([verdict.text, *untested]), evidence=evidence)


def _untrained_reference(trial: Trial) -> str:
    """Why there is nothing to compare a trial with; empty if there is."""
    for other in (trial.reference, *trial.others, *trial.wide):
        own = _own_conditions(other) if other.status == "ok" else Gate(text=f"ended as {other.status}: {other.reason}")
        if own:
            return f"the reference's probe in {trial.dtype} did not train: {own.text}"
    return ""


def _departure_of(trial: Trial) -> Departure | None:
    own = _own_conditions(trial.record)
    if own is None and set(trial.record.tensors) != set(trial.reference.tensors):
        own = Gate("failed", "missing", "the tensors are not the reference's")
    scales = [(each.loss_scales, each.skipped_steps) for each in (trial.record, trial.reference)]
    if own is None and trial.dtype != "fp16" and scales[0] != scales[1]:
        own = Gate("failed", "loss-scale", _other_scales(trial.record, trial.reference))
    if own:
        return Departure(own.reason, own.text)
    return probing.find(trial, trial.record.bit_exact and _kernels(trial.record)[0] == "cpu")


def _first_loss_beyond(record: Record, other: Record, tolerance: float) -> tuple[str, str] | None:
    for step, ours, theirs, difference in _loss_differences(record, other):
        if not difference <= tolerance:
            allowed = f"relative {difference:.1e}, {tolerance:g} allowed"
            return "loss", f"loss {ours:.7g} instead of {theirs:.7g} at step {step} ({allowed})"
    return None


def _loss_differences(record: Record, other: Record) -> list[tuple[int, float, float, float]]:
    """Of the steps that both have: number, both losses, and their relative difference."""
    pairs = enumerate(zip(record.losses, other.losses, strict=False), start=1)
    return [(step, a, b, abs(a - b) / abs(b)) for step, (a, b) in pairs if a is not None and b is not None]


def _failed(reason: str, text: str, **evidence: Any) -> Gate:
    return Gate("failed", reason, text, evidence)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
