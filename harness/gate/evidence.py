"""Reads the evidence of a training from its record, and finds what is missing or wrong, from one record or two.

Losses and gradient norms are compared step by step. Tensors are compared by the facts that inspect_training.py finds:
the share of elements that changed, the distance moved, a sketch of the final values, and the sizes of both moments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from harness.base.counted import counted
from harness.core.job import Job
from harness.core.record import PRODUCTS_IN, Record
from harness.gate import other_code
from harness.gate.other_code import some

LEAST = 1e-7  # smallest relative difference that counts: one rounding in fp32
# Allowed distance, relative to a tensor's size, because a few elements may round in the other direction. It matters for
# the weights of norms: they are near 1, and at the published rate they move by only a few units in the last place.
ROUNDING = 2**-24 / 4
# largest allowed relative difference between two norms of bit-equal gradients; engines differ by up to 1.2e-7
SUMMED = 1e-6
# Half the distance from 1 to the next larger float: a smaller step upwards leaves a weight of 1 unchanged. Downwards, a
# step of half this size changes the weight, but AdamW's step is often less than half its rate.
SMALLEST_STEP = 2**-24
Moment = Literal["exp_avg", "exp_avg_sq"]
MOMENTS: dict[str, Moment] = {"first moments": "exp_avg", "second moments": "exp_avg_sq"}


class Flaw(NamedTuple):
    """A fault that a record shows without comparison. `reason`: a word for programs. `text`: a text for people.
    `evidence`: further values for the verdict."""

    reason: str
    text: str
    evidence: dict[str, Any] = {}  # noqa: RUF012


def flaw(record: Record) -> Flaw | None:
    """Return a record's first flaw; None if all steps ran, all numbers are finite and every tensor changed."""
    for step, loss in enumerate(record.losses, start=1):
        if loss is not None and not math.isfinite(loss):
            return Flaw("not-finite", f"the loss is {loss} from step {step} on", {"step": step})
    if len(record.losses) != record.job.steps:
        return Flaw("incomplete", f"{len(record.losses)} of {record.job.steps} steps have a loss")
    # fp16 is left out: a step that fp16 skips has a norm that is not finite. other_scales() compares skipped steps.
    if record.origin == "run" and record.job.workload.dtype != "fp16":
        for step, norm in enumerate(record.grad_norms, start=1):
            if norm is not None and not math.isfinite(norm):
                return Flaw("not-finite", f"the gradient norm is {norm} at step {step}", {"step": step})
    if not record.tensors:
        return Flaw("missing", "the method returned no trained tensors")
    for name, tensor in record.tensors.items():
        numbers = (
            tensor["moved"],
            tensor.get("size"),
            tensor.get("exp_avg"),
            tensor.get("exp_avg_sq"),
            *(tensor.get("sketch") or ()),
        )
        if not all(number is None or math.isfinite(float(number)) for number in numbers):
            return Flaw("not-finite", f"{name} or a moment of it is not finite after the last step")
    dtype, products = (
        record.job.workload.dtype,
        [name for name in record.kernels if name.startswith(PRODUCTS_IN)],
    )
    if dtype != "fp32" and products and PRODUCTS_IN + dtype not in products:
        return Flaw(
            "dtype", f"it trained otherwise than in {dtype}: its second step had {some(products)} alone"
        )
    last_rate = record.job.workload.learning_rate_at(record.job.steps)
    unchanged = [
        name
        for name, tensor in record.tensors.items()
        # AdamW's step is at most the learning rate, which may be too small to change a weight near 1.
        if not tensor["changed"] and not (last_rate < SMALLEST_STEP and tensor.get("exp_avg"))
    ]
    if unchanged:
        told = f"{some(unchanged)} did not change in {counted(record.job.steps, 'step')}"
        return Flaw("unchanged", told, {"tensors": unchanged})
    return None


def untrained(record: Record, told: str = "") -> str:
    """Return, as text, why a record shows no training to compare with; empty if it shows one. `told`: a text to append
    to the record's status."""
    if record.status != "ok":
        return f"ended as {record.status}{told}"
    if fault := other_code.fault(record) or flaw(record):
        return fault[1]
    return ""


def unasked(record: Record) -> Flaw | None:
    """Return a flaw if the record's models are not the ones that its job asks for; else None. The throughput of such a
    record would be wrong, because it counts the samples of all models."""
    asked, trained = record.job.options.get("num_models", 1), 1 + len(record.others)
    if trained != asked:
        return Flaw("models", f"{counted(trained, 'model')} trained, the job asks for {asked}")
    first, expected = (
        dataclasses.asdict(record.job.workload),
        record.job.workloads()[1:] if record.others else [],
    )
    for number, (mine, other) in enumerate(zip(expected, record.others, strict=True), start=2):
        if {**first, **other["workload"]} != dataclasses.asdict(mine):
            told = f"learning rate {mine.learning_rate:g} and batch size {mine.batch_size}, else as the first"
            return Flaw("models", f"model {number} of {asked} is not the one that the job asks for: {told}")
    return None


def elsewhere(record: Record) -> Flaw | None:
    """Return a flaw if the run did not do all of its training itself, by the code and data of its key; else None. Such
    a run executed code that its key does not cover, or code or data that changed meanwhile, resumed from a checkpoint
    of other source code, or computed on a device, or kept its state in a memory, that is not counted."""
    if fault := other_code.fault(record):
        return Flaw(*fault)
    steps, source = record.schedule.get("resumed_steps", 0), record.schedule.get("resumed_source")
    if steps >= record.job.steps:
        return Flaw("no-step", f"all of its {steps} steps are the checkpoint's: none was trained here")
    if steps and source != record.software.get("source", source):
        return Flaw(
            "other-source", f"other source trained its first {counted(steps, 'step')}: {source or 'unknown'}"
        )
    peak, least = record.peaks.get("device_allocated"), least_device_bytes(record.job)
    if peak is not None and peak < least and record.origin == "run":
        told = f"expected at least {least} bytes of the device in use, for the tokens and one sample's product with the"
        return Flaw("device", f"{told} largest matrix of a layer, got {peak}: it was trained elsewhere")
    if (accounted := record.peaks.get("host_accounted")) is not None and not record.job.options.get("disk"):
        held, least = (peak or 0) + accounted, least_state_bytes(record.job)
        if held < least:
            told = f"expected at least {least} bytes of device and host in use, for weights and both moments,"
            told += f" got {held}"
            return Flaw(
                "host", f"{told}: the rest lay where no budget counts, as in numpy; try tensors of torch"
            )
    return None


def least_device_bytes(job: Job) -> int:
    """Return a lower bound of the device memory, in bytes, that any training of this job takes. The bound is the bytes
    of all tokens, which the worker puts there, plus the bytes of one product: a layer's largest matrix, and the input
    and output of its product with one sample. Several ranks may each take a part of the product. A method that cuts a
    matrix or a sample needs less than this bound."""
    load = job.workload
    # int64 tokens; inputs and targets are copies
    tokens = 8 * job.steps * load.batch_size * (3 * load.seq_len + 1)
    matrix = load.anatomy.layer_matrix
    product = load.weight_bytes * (math.prod(matrix) + load.seq_len * sum(matrix))
    return tokens + product // job.world_size


def least_state_bytes(job: Job) -> int:
    """Return a lower bound of the bytes that a rank of the job, or each of its devices, takes of both memories
    together: weights in fp32, and both moments in the dtype of the training."""
    load, num_shares = job.workload, job.world_size * job.options.get("num_devices", 1)
    state_bytes: int = (4 + 2 * load.weight_bytes) * load.num_params
    return state_bytes // num_shares


def kernels(record: Record) -> tuple[str, str]:
    """Return the device and the dtype that determine the rounding to expect. For sim the device is the CPU, whose
    kernels it uses."""
    device = "cpu" if record.job.device == "sim" else record.job.device
    return device, record.job.workload.dtype


def promises_bits(record: Record) -> bool:
    """True if the record's method must give the reference's very bits. Methods promise them on a CPU only."""
    return record.bit_exact and kernels(record)[0] == "cpu"


def is_same(record: Record, reference: Record) -> bool:
    """True if all losses and final weights are bit-equal. The gradient norms may differ by the rounding of their own
    sums."""
    found = zip(differences(record.grad_norms, reference.grad_norms), reference.grad_norms, strict=False)
    # In a step that fp16 skipped, the reference's norm is not finite: leave it out.
    norms = [each for each, theirs in found if theirs is not None and math.isfinite(theirs)]
    return (
        record.losses == reference.losses
        and all(norm <= SUMMED for norm in norms)
        and all(
            name in record.tensors and record.tensors[name].get("sha256") == tensor.get("sha256") is not None
            for name, tensor in reference.tensors.items()
        )
    )


def comparable_steps(record: Record, reference: Record) -> int:
    """Return the number of steps to compare. In fp16 only the steps before the first different loss scale or skip are
    compared, because from there on the two trainings skip different steps."""
    if "fp16" not in (record.job.workload.dtype, reference.job.workload.dtype):
        return min(len(record.losses), len(reference.losses))
    pairs = zip(record.loss_scales, reference.loss_scales, strict=False)
    skips = set(record.skipped_steps) ^ set(reference.skipped_steps)
    differing = [step for step, (ours, theirs) in enumerate(pairs, start=1) if ours != theirs]
    return min([*differing, *skips, min(len(record.losses), len(reference.losses)) + 1]) - 1


def other_scales(record: Record, reference: Record) -> str:
    """Return, as text, the first difference in skipped steps or in loss scales; empty if there is none."""
    if record.skipped_steps != reference.skipped_steps:
        names = ([*map(str, each.skipped_steps)] for each in (record, reference))
        ours, theirs = (f"steps {some(found)}" if found else "no step" for found in names)
        return f"it skipped {ours} for gradients that are not finite, the reference {theirs}"
    pairs = zip_longest(record.loss_scales, reference.loss_scales)
    found = ((step, *pair) for step, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    return next((f"loss scale {scale} instead of {other} at step {step}" for step, scale, other in found), "")


def loss_differences(record: Record, other: Record) -> list[tuple[int, float, float, float]]:
    """Return, for each step with a loss in both records, its number, both losses and their relative difference."""
    pairs = enumerate(zip(record.losses, other.losses, strict=False), start=1)
    return [(step, a, b, abs(a - b) / abs(b)) for step, (a, b) in pairs if a is not None and b is not None]


def differences(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Return the relative difference of each step's two values. The difference is 0 if a log lacks a value, or if
    neither value is finite. In fp16 both trainings skip such a step; the order of a sum decides whether its norm is
    infinite or NaN."""

    def difference(a: float | None, b: float | None) -> float:
        if a is None or b is None or a == b or not (math.isfinite(a) or math.isfinite(b)):
            return 0.0
        return abs(a - b) / (abs(b) or LEAST)

    return [difference(a, b) for a, b in zip(ours, theirs, strict=False)]


def distances(record: Record, reference: Record) -> dict[str, float]:
    """Return, for each tensor, the distance between its change and its change in the reference, divided by the size of
    the reference's change. The distance is measured between the two sketches, less an allowance (ROUNDING) for the
    rounding of single elements."""
    found = {}
    for name, theirs in reference.tensors.items():
        ours = record.tensors.get(name, theirs)
        sketch, other = ours.get("sketch"), theirs.get("sketch")
        if sketch and other and theirs["moved"] and ours.get("left_out") == theirs.get("left_out"):
            far = math.dist(sketch, other) - ROUNDING * theirs.get("size", 0.0)
            found[name] = max(0.0, far) / theirs["moved"]
    return found


def moment_differences(record: Record, reference: Record, moment: Moment) -> dict[str, float]:
    """Return the relative difference in size of each tensor's moment; empty if the method returns no such moments."""
    if not has_moments(record, moment):
        return {}
    found = {}
    for name, theirs in reference.tensors.items():
        ours, other = record.tensors.get(name, theirs), theirs.get(moment)
        if other and ours.get("left_out") == theirs.get("left_out"):
            size = ours.get(moment)
            found[name] = math.inf if size is None else abs(size / other - 1)
    return found


def size_differences(record: Record, reference: Record) -> dict[str, float]:
    """Return the relative difference of each tensor's final size. Weight decay shows in it, because rounding changes a
    size far less than it changes the single elements. A tensor with elements that only rounding changes is left out."""
    pairs = ratios(record, reference, "size").items()
    return {name: abs(ratio - 1) for name, ratio in pairs if "left_out" not in reference.tensors[name]}


def has_moments(record: Record, moment: Moment) -> bool:
    return any(tensor.get(moment) is not None for tensor in record.tensors.values())


# For each compared fact: the function that returns the relative difference of every tensor from the reference.
COMPARED: dict[str, Callable[[Record, Record], dict[str, float]]] = {
    "way": distances,
    "exp_avg": partial(moment_differences, moment="exp_avg"),
    "exp_avg_sq": partial(moment_differences, moment="exp_avg_sq"),
    "size": size_differences,
}


def ratios(record: Record, reference: Record, key: str) -> dict[str, float]:
    """Return, for each tensor, its fact `key` (such as the distance moved) divided by the reference's fact."""
    pairs = {
        name: (record.tensors[name].get(key), theirs.get(key))
        for name, theirs in reference.tensors.items()
        if record.tensors[name].get("left_out") == theirs.get("left_out")
    }
    return {name: ours / theirs for name, (ours, theirs) in pairs.items() if ours is not None and theirs}  # type: ignore
