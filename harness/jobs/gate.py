"""The gate: does a record show the reference's training? A verdict with its evidence, from two records alone.

Own conditions first: all steps ran, all losses are finite, every tensor changed. Then the comparison: losses step by
step, and for each tensor the share that changed, the distance moved and the size of its first moment. A method that
promises bit-equality is held to it on a CPU in fp32; elsewhere the tolerances below apply. The most telling difference
names the reason of a failure.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from harness.core.record import VERDICTS, Gate, Record

# Largest relative difference of a step's loss. fp32: kernels that sum in another order differ by about 1e-6 after 20
# steps; bf16 has 8 bits of mantissa, fp16 has 11. CUDA adds atomics and fused attention.
LOSS_TOLERANCE = {
    ("cpu", "fp32"): 1e-5, ("cpu", "bf16"): 5e-3, ("cpu", "fp16"): 5e-4,
    ("cuda", "fp32"): 1e-4, ("cuda", "bf16"): 1e-2, ("cuda", "fp16"): 1e-3,
}  # fmt: skip
# How far a tensor moved, and how large its first moment is, relative to the reference's. In bf16 the gradient of a
# norm's bias before attention is a sum that nearly cancels: a ratio of 0.88 was seen where losses agree to 4e-5.
SIZE_TOLERANCE = 0.1
MOMENT_TOLERANCE = {"fp32": 0.1, "bf16": 0.3, "fp16": 0.1}
# The same over the median tensor: cancellation concerns few of them.
MEDIAN_TOLERANCE = 0.05
# Distance between a tensor's change and the reference's, relative to how far the reference's moved. In bf16 the
# direction of a step where the gradient is rounding noise is noise, too. A CPU in fp32 shows 3e-4 and less.
DISTANCE_TOLERANCE = {
    ("cpu", "fp32"): 2e-3, ("cpu", "bf16"): 0.7, ("cpu", "fp16"): 0.7,
    ("cuda", "fp32"): 5e-2, ("cuda", "bf16"): 0.7, ("cuda", "fp16"): 0.7,
}  # fmt: skip
# The same over the median tensor: rounding noise moves few tensors, a stale or missing update all of them.
MEDIAN_DISTANCE_TOLERANCE = 0.05
# And, relative to the tensor itself, what a few elements that round the other way amount to: a norm's weights, near 1,
# move by a few units in the last place at the published learning rate.
ROUNDING = 2**-24 / 4
# Half the distance from 1 to the float above it: a shorter step up rounds to none, and a step of AdamW is a part of its
# rate, often less than half, so that one down does, too.
SMALLEST_STEP = 2**-24
# Share of a tensor's elements that changed, relative to the reference's.
CHANGED_TOLERANCE = 0.1
SEVERITY = [*(word for word in VERDICTS if word != "failed"), "failed"]


def judge(
    record: Record, reference: Record | None = None, twins: tuple[Record, Record] | None = None,
    peers: Sequence[Record] = (),
) -> Gate:  # fmt: skip
    """The verdict on a record.

    `reference` is the same workload trained by the reference, or the record itself. If the reference does not fit,
    `twins` are this method and the reference at the largest depth that fits, and `peers` are other methods' records of
    this very workload.
    """
    if record.status != "ok":
        return Gate("untested", "not-finished", f"ended as {record.status}: nothing to compare")
    if own := _own_conditions(record):
        return own
    if reference is record:
        return Gate("exact", "", f"is the reference: every loss of {_steps(record)} finite, every tensor changed")
    if reference is not None:
        return _compare(record, reference)
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
    if not record.tensors:
        return _failed("missing", "the method returned no trained tensors")
    for name, tensor in record.tensors.items():
        numbers = (tensor["moved"], tensor.get("exp_avg"), *(tensor.get("sketch") or ()))
        if not all(number is None or math.isfinite(float(number)) for number in numbers):
            return _failed("not-finite", f"{name} or its first moment is not finite after the last step")
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


def _compare(record: Record, reference: Record) -> Gate:
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
    if record.losses == reference.losses and all(
        record.tensors[name].get("sha256") == tensor.get("sha256", "none") for name, tensor in reference.tensors.items()
    ):
        return Gate("exact", "", f"{_steps(record)} and all weights bit-equal to {reference.job.method}", evidence)
    must_be_exact = record.bit_exact and where == ("cpu", "fp32")
    tolerance = 0.0 if must_be_exact else LOSS_TOLERANCE[where]
    difference = (
        _wrong_start(record, reference)
        or _tensor_difference(record, reference)
        or _first_loss_beyond(record, reference, tolerance)
        or _distant_weights(record, reference, DISTANCE_TOLERANCE[where])
    )
    if difference:
        return _failed(*difference, tolerance=tolerance, **evidence)
    if must_be_exact:
        return _failed("weights", "losses agree but the final weights are not the reference's bits", **evidence)
    text = f"{_steps(record)} within {tolerance:g} of {reference.job.method} (largest {largest:.1e})"
    return Gate("tolerance", "", text, {**evidence, "tolerance": tolerance})


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


def _wrong_start(record: Record, reference: Record) -> tuple[str, str] | None:
    """A first loss, before any update, beyond the tolerance of rounding."""
    first = dataclasses.replace(record, losses=record.losses[:1])
    beyond = _first_loss_beyond(first, reference, LOSS_TOLERANCE[_kernels(record)])
    return ("start", f"it did not start from the reference's weights: {beyond[1]}") if beyond else None


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


def _tensor_difference(record: Record, reference: Record) -> tuple[str, str] | None:
    """The most telling difference between final tensors: a partial update, a wrong step size, a wrong gradient."""
    checks = (
        ("partial-update", "changed", CHANGED_TOLERANCE,
         "{name} changed in {ours:.1%} of its elements, {theirs:.1%} in"),
        ("update-size", "moved", SIZE_TOLERANCE, "{name} moved {ratio:.3g} times as far as in"),
        ("gradient-scale", "exp_avg", MOMENT_TOLERANCE[record.job.workload.dtype],
         "{name}'s first moment is {ratio:.3g} times that in"),
    )  # fmt: skip
    for reason, key, tolerance, text in checks:
        pairs = {name: (record.tensors[name].get(key), theirs.get(key)) for name, theirs in reference.tensors.items()}
        ratios = {name: ours / theirs for name, (ours, theirs) in pairs.items() if ours is not None and theirs}
        if not ratios:
            continue
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
        ratio, median = ratios[worst], statistics.median(ratios.values())
        if not (abs(ratio - 1) <= tolerance and abs(median - 1) <= MEDIAN_TOLERANCE):
            ours, theirs = pairs[worst]
            return reason, f"{text.format(name=worst, ratio=ratio, ours=ours, theirs=theirs)} the reference"
    return None


def _distant_weights(record: Record, reference: Record, tolerance: float) -> tuple[str, str] | None:
    """A tensor that moved as far as the reference's but to other values, by their sketches."""
    distances = {}
    for name, theirs in reference.tensors.items():
        ours, other = record.tensors[name].get("sketch"), theirs.get("sketch")
        if ours and other and theirs["moved"] and "size" in theirs:
            distances[name] = (math.dist(ours, other) - ROUNDING * theirs["size"]) / theirs["moved"]
    if not distances:
        return None
    median = statistics.median(distances.values())
    if not median <= MEDIAN_DISTANCE_TOLERANCE:
        return "weights", f"half of the tensors end {median:.1e} or more of their way from the reference's"
    worst = max(distances, key=lambda name: distances[name])
    distance = distances[worst]
    if distance <= tolerance:
        return None
    return "weights", f"{worst} ends {distance:.1e} of its way from the reference's ({tolerance:g} allowed)"


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
