"""Finds what a single record lacks or has wrong: a missing step, a loss that is not finite, a tensor that did not
change, another model than its job's, code that its key does not cover, memory that no budget counts."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core.adapters import is_first_factor
from harness.core.job import Job
from harness.core.method import workloads_of
from harness.core.record import PRODUCTS_IN, Record
from harness.gate.evidence import Trial, names_text

# Half the distance from 1 to the next larger float: a smaller step upwards leaves a weight of 1 unchanged. Downwards, a
# step of half this size changes the weight, but AdamW's step is often less than half its rate.
SMALLEST_STEP = 2**-24
CHANGED_CODE = "changed-code"  # reason of a verdict that rests on code that changed meanwhile
OTHER_CODE_TEXT = "trained by other source code than the run; try the same call again"


class Flaw(NamedTuple):
    """A fault that a record shows without comparison. `reason`: a word for programs. `text`: a text for people.
    `evidence`: further values for the verdict."""

    reason: str
    text: str
    evidence: JsonObject = {}  # noqa: RUF012


def find_flaw(record: Record) -> Flaw | None:
    """Return a record's first flaw; None if all steps ran, all numbers are finite and every tensor changed."""
    return _flaw_of_steps(record) or _flaw_of_tensors(record)


def _flaw_of_steps(record: Record) -> Flaw | None:
    for step, loss in enumerate(record.losses, start=1):
        if loss is not None and not math.isfinite(loss):
            return Flaw("not-finite", f"the loss is {loss} from step {step} on", {"step": step})
    if len(record.losses) != record.job.steps:
        return Flaw("incomplete", f"{len(record.losses)} of {record.job.steps} steps have a loss")
    # fp16 is left out: a step that fp16 skips has a norm that is not finite. scale_difference_text() compares skips.
    if record.origin == "run" and record.job.workload.dtype != "fp16":
        for step, norm in enumerate(record.grad_norms, start=1):
            if norm is not None and not math.isfinite(norm):
                return Flaw("not-finite", f"the gradient norm is {norm} at step {step}", {"step": step})
    return None


def _flaw_of_tensors(record: Record) -> Flaw | None:
    if not record.tensors:
        return Flaw("missing", "the method returned no trained tensors")
    facts = ("moved", "size", "exp_avg", "exp_avg_sq")
    for name, tensor in record.tensors.items():
        numbers = (*(tensor.get(fact) for fact in facts), *(tensor.get("sketch") or ()))
        if not all(number is None or math.isfinite(float(number)) for number in numbers):
            return Flaw("not-finite", f"{name} or a moment of it is not finite after the last step")
    dtype = record.job.workload.dtype
    product_kernels = [name for name in record.kernels if name.startswith(PRODUCTS_IN)]
    if dtype != "fp32" and product_kernels and PRODUCTS_IN + dtype not in product_kernels:
        text = (
            f"it trained otherwise than in {dtype}: its second step had {names_text(product_kernels)} alone"
        )
        return Flaw("dtype", text)
    # AdamW's step is at most the learning rate, which may be too small to change a weight near 1.
    is_small_step = record.job.workload.learning_rate_at(record.job.steps) < SMALLEST_STEP
    unchanged_tensors = []
    anatomy, is_first_step = record.job.workload.anatomy, record.job.steps == 1
    for name, tensor in record.tensors.items():
        if not anatomy.is_trained(name):
            if tensor["changed"]:
                return Flaw("frozen", f"{name} changed, although it is frozen", {"tensors": [name]})
        elif is_first_step and is_first_factor(name):
            continue
        elif not tensor["changed"] and not (is_small_step and tensor.get("exp_avg")):
            unchanged_tensors.append(name)
    if unchanged_tensors:
        text = f"{names_text(unchanged_tensors)} did not change in {counted(record.job.steps, 'step')}"
        return Flaw("unchanged", text, {"tensors": unchanged_tensors})
    return None


def untrained_reason(record: Record, reason: str = "") -> str:
    """Return, as text, why a record shows no training to compare with; empty if it shows one. `reason`: a text to
    append to the record's status."""
    if record.status != "ok":
        return f"ended as {record.status}{reason}"
    flaw = find_uncovered_code(record) or find_flaw(record)
    return flaw.text if flaw else ""


def find_wrong_models(record: Record) -> Flaw | None:
    """Return a flaw if the record's models are not the ones that its job asks for; else None. The throughput of such a
    record would be wrong, because it counts the samples of all models."""
    num_models, num_trained = record.job.options.get("num_models", 1), 1 + len(record.others)
    if num_trained != num_models:
        text = f"{counted(num_trained, 'model')} trained, the job asks for {num_models}"
        return Flaw("models", text)
    first_workload = dataclasses.asdict(record.job.workload)
    expected = workloads_of(record.job)[1:] if record.others else []
    for number, (load, other) in enumerate(zip(expected, record.others, strict=True), start=2):
        if {**first_workload, **other["workload"]} != dataclasses.asdict(load):
            load_text = (
                f"learning rate {load.learning_rate:g} and batch size {load.batch_size}, else as the first"
            )
            text = f"model {number} of {num_models} is not the one that the job asks for: {load_text}"
            return Flaw("models", text)
    return None


def find_uncounted_training(record: Record) -> Flaw | None:
    """Return a flaw if the run did not do all of its training itself, by the code and data of its key; else None. Such
    a run executed code that its key does not cover, or code or data that changed meanwhile, resumed from a checkpoint
    of other source code, or computed on a device, or kept its state in a memory, that is not counted."""
    if code_flaw := find_uncovered_code(record):
        return code_flaw
    steps, source = record.schedule.get("resumed_steps", 0), record.schedule.get("resumed_source")
    if steps >= record.job.steps:
        return Flaw("no-step", f"all of its {steps} steps are the checkpoint's: none was trained here")
    if steps and source != record.software.get("source", source):
        text = f"other source trained its first {counted(steps, 'step')}: {source or 'unknown'}"
        return Flaw("other-source", text)
    return _uncounted(record)


def _uncounted(record: Record) -> Flaw | None:
    """Return a flaw if the run took less of the counted memories than any training of its job takes; else None."""
    peak, least = record.peaks.get("device_allocated"), least_device_bytes(record.job)
    if peak is not None and peak < least and record.origin == "run":
        text = f"expected at least {least} bytes of the device in use, for the tokens and one sample's product with the"
        return Flaw("device", f"{text} largest matrix of a layer, got {peak}: it was trained elsewhere")
    accounted = record.peaks.get("host_accounted")
    if accounted is None or record.job.options.get("disk"):
        return None
    held, least = (peak or 0) + accounted, least_state_bytes(record.job)
    if held < least:
        text = f"expected at least {least} bytes of device and host in use, for weights and both moments, got {held}"
        return Flaw("host", f"{text}: the rest lay where no budget counts, as in numpy; try tensors of torch")
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
    together: of trained parameters weights in fp32, and both moments in the dtype of the training; of frozen ones the
    weights in this dtype."""
    load, num_shares = job.workload, job.world_size * job.options.get("num_devices", 1)
    trained_bytes = (4 + 2 * load.weight_bytes) * load.num_trained
    frozen_bytes = load.weight_bytes * (load.num_params - load.num_trained)
    return (trained_bytes + frozen_bytes) // num_shares


def find_uncovered_code(record: Record) -> Flaw | None:
    """Return a flaw if the run executed code that its key does not cover, or if its code or data changed meanwhile;
    else None. No verdict may rest on such a record."""
    if unlisted := record.software.get("unlisted"):
        text = f"it executed {names_text(unlisted)}, which its identity lacks"
        return Flaw("unlisted-code", f"{text}; import it by its name in the method's file")
    if changed := record.software.get("changed"):
        text = f"{names_text(changed)} changed while it ran or waited; try the same call again"
        return Flaw(CHANGED_CODE, text)
    return None


def has_other_source(record: Record, run: Record) -> bool:
    """True if other source code of the method trained `record` than the run that it is evidence for."""
    return record.software.get("source") != run.software.get("source")


def uncovered_code_text(trial: Trial, run: Record) -> str:
    """Return, as text, why a trial is no evidence of how the run's code trains; empty if it is."""
    if has_other_source(trial.record, run):
        return f"the probe in {trial.dtype}: {OTHER_CODE_TEXT}"
    for record in (trial.record, trial.reference, *trial.others):
        if code_flaw := find_uncovered_code(record):
            return f"{record.job.method}'s probe in {trial.dtype}: {code_flaw.text}"
    return ""
