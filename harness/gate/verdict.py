"""The gate: does a record show the same training as the reference? judge() returns a verdict, from records alone.

evidence.py looks for flaws of the record alone: a missing step, a loss that is not finite, a tensor that did not
change. Then departures.py compares the record with the reference's, within rounding (limits.py): losses and gradient
norms by step, and for each tensor the share that changed, the distance moved, its final values and the size of its
moments. At last the probe (probe.py) trains at a learning rate at which faults show. The first departure gives the
reason of a failure; a departure of the probe goes before one of the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from harness.base.counted import counted
from harness.core.record import VERDICTS, Gate, Record
from harness.gate import causes, coverage, departures, evidence, other_code
from harness.gate.evidence import Flaw
from harness.gate.limits import DROPOUT_ALLOWED, LOSS_TOLERANCE
from harness.gate.probe import NONE, Probe, extent_of
from harness.gate.trial import Trial

UNPROBED = "a run whose probe did not train has no throughput; try --no-probe, which the verdict states"
# Reasons that are certain without a probe, because they name something that the run lacks or has wrong.
CERTAIN = ("not-finite", "incomplete", "missing", "dtype", "unchanged", "data")
SEVERITY = [*(word for word in VERDICTS if word != "failed"), "failed"]


def judge(
    record: Record,
    reference: Record | None = None,
    twins: tuple[Record, Record] | None = None,
    peers: Sequence[Record] = (),
    undropped: Record | None = None,
) -> Gate:
    """Return the verdict on a run, without its probe, which with_probe() adds.

    `reference`: the record of the same workload trained by the reference; for a run by the reference, `record` itself.
    If the reference does not fit, `twins` are the records of this method and of the reference at the largest depth at
    which it fits, and `peers` are other methods' records of the same workload. If the method drops other elements,
    `undropped` is the reference's record without dropout: the change that dropout causes measures how far the run may
    differ.
    """
    if record.status != "ok":
        return Gate("untested", "not-finished", f"ended as {record.status}: nothing to compare")
    if flaw := evidence.flaw(record):
        return _of_flaw(flaw)
    if flaw := evidence.elsewhere(record):
        return Gate("untested", flaw.reason, flaw.text)
    if reference is record:
        return Gate(
            "exact", "", f"is the reference: every loss of {_steps(record)} finite, every tensor changed"
        )
    if reference is not None:
        return _compare(record, reference, undropped)
    if twins is not None:
        return _by_twin(record, *twins, peers)
    return Gate()


def unasked(record: Record) -> Gate | None:
    """Return a failed verdict if the run's models are not those that its job asks for; else None."""
    return _of_flaw(flaw) if (flaw := evidence.unasked(record)) else None


def together(verdicts: list[Gate]) -> Gate:
    """Return one verdict on several models that were trained in turns: the worst one, with the number of its model."""
    if len(verdicts) == 1:
        return verdicts[0]
    number, worst = max(enumerate(verdicts, start=1), key=lambda item: SEVERITY.index(item[1].verdict))
    told = f"each of {len(verdicts)} models: " if worst.passed else f"model {number} of {len(verdicts)}: "
    found = {**worst.evidence, "models": [verdict.verdict for verdict in verdicts]}
    return dataclasses.replace(worst, text=told + worst.text, evidence=found)


def _compare(record: Record, reference: Record, undropped: Record | None) -> Gate:
    largest = max(
        (difference for *_, difference in evidence.loss_differences(record, reference)), default=math.nan
    )
    rests: dict[str, Any] = {"reference": reference.key, "loss_difference": largest}
    if why := evidence.untrained(reference):
        rests["reference_ended"] = reference.status
        return Gate("untested", "no-reference", f"the reference itself did not train: {why}", rests)
    if record.data_sha256 != reference.data_sha256:
        return _failed("data", "trained on other data than the reference", rests)
    if set(record.tensors) != set(reference.tensors):
        names = sorted(set(record.tensors) ^ set(reference.tensors))
        return _failed("missing", f"the tensors are not the reference's: {evidence.some(names)}", rests)
    if told := evidence.other_scales(record, reference):
        return _failed("loss-scale", told, rests)
    if evidence.is_same(record, reference):
        return Gate(
            "exact", "", f"{_steps(record)} and all weights bit-equal to {reference.job.method}", rests
        )
    if undropped is not None:
        return _within_dropout(record, reference, undropped, rests)
    must_be_exact = evidence.promises_bits(record)
    tolerance = 0.0 if must_be_exact else LOSS_TOLERANCE[evidence.kernels(record)]
    if found := departures.of_run(record, reference):
        return _failed(found.reason, found.text, {"tolerance": tolerance, **rests, "step": found.step})
    if must_be_exact:
        return _failed("weights", "losses agree but the final weights are not the reference's bits", rests)
    text = f"{_steps(record)} within {tolerance:g} of {reference.job.method} (largest {largest:.1e})"
    return Gate("tolerance", "", text, {**rests, "tolerance": tolerance})


def _within_dropout(record: Record, reference: Record, undropped: Record, rests: dict[str, Any]) -> Gate:
    """Return the verdict on a run that drops other elements than the reference. The run may differ by no more than a
    few times the change that dropout causes."""
    if why := evidence.untrained(undropped):
        return Gate("untested", "no-reference", f"the reference without dropout did not train: {why}", rests)
    if departures.drops_nothing(record, reference, undropped):
        told = "it dropped nothing: within rounding it is the reference without dropout"
        return _failed("dropout", told, rests)
    if found := departures.beyond_dropout(record, reference, undropped):
        return _failed(found.reason, found.text, {**rests, "step": found.step})
    text = f"{_steps(record)} within {DROPOUT_ALLOWED:g} times what dropout changes in {reference.job.method}"
    return Gate("tolerance", "", f"{text}; which elements are dropped was not compared", rests)


def _by_twin(record: Record, twin: Record, twin_reference: Record, peers: Sequence[Record]) -> Gate:
    depth = twin.job.workload.num_layers
    changed = Gate("untested", other_code.CHANGED, other_code.AGAIN)
    verdict = changed if other_code.is_of_another(twin, record) else judge(twin, twin_reference)
    rests: dict[str, Any] = {"twin": twin.key, "twin_layers": depth, "twin_verdict": verdict.verdict}
    if not verdict.passed:
        reason = f"its twin at {counted(depth, 'layer')}: {verdict.text}"
        return Gate("failed" if verdict.verdict == "failed" else "untested", verdict.reason, reason, rests)
    agreeing = []
    for peer in peers:
        if evidence.flaw(peer) is None and peer.data_sha256 == record.data_sha256:
            if beyond := departures.first_loss_beyond(record, peer):
                return _failed("peers", f"{peer.job.method} trains this size otherwise: {beyond}", rests)
            agreeing.append(peer.job.method)
    also = f", and agrees with {', '.join(agreeing)} here" if agreeing else ""
    text = f"its twin at {counted(depth, 'layer')} is {verdict.verdict}{also}"
    return Gate("twin", "", text, {**rests, "peers": agreeing})


def needs_no_probe(verdict: Gate, record: Record) -> bool:
    """True if no probe can change the verdict. A method that is inexact by design is probed only if it passed."""
    is_final = verdict.verdict == "untested" or verdict.reason in CERTAIN
    return is_final or not (record.is_exact or verdict.passed)


def with_probe(verdict: Gate, record: Record, probe: Probe) -> Gate:
    """Return the verdict on a run, combined with the findings of its probe and a text on what was not tested."""
    if verdict.verdict == "untested":
        return verdict
    rests = {**verdict.evidence, "probe": {trial.dtype: trial.record.key for trial in probe.trials}}
    if probe.missing and verdict.passed:
        return Gate("untested", "probe", f"{probe.missing}; {verdict.text}", rests)
    layers, steps, is_full = extent_of(probe.trials[0], record.job.workload) if probe.trials else NONE
    rests |= {"probe_layers": layers, "probe_steps": steps} if steps else {}
    rests |= {"probe_is_full": True} if is_full else {}
    tested, untested = [], [probe.untested] if probe.untested else []
    if probe.refused and verdict.passed:
        return Gate("untested", "probe", f"{probe.refused}; {UNPROBED}", rests)
    for trial in probe.trials:
        if verdict.passed and (why := other_code.of_trial(trial, record)):
            return Gate("untested", "probe", why, rests)
        if untrained := _untrained_reference(trial):
            untested.append(untrained)
            continue
        if trial.record.status != "ok":
            ended = f"the probe in {trial.dtype} ended as {trial.record.status}: {trial.record.reason}"
            if verdict.passed:
                return Gate("untested", "probe", f"{ended}; {UNPROBED}", rests)
            untested.append(ended)
            continue
        if (found := departures.of_trial(trial)) and verdict.reason not in CERTAIN:
            itself = verdict.text.removesuffix(f": {found.cause}")  # _told() gives the cause already
            also = "" if verdict.passed else f"; the run itself: {itself}"
            return _failed(found.reason, _told(trial, found) + also, {**rests, "step": found.step})
        num = evidence.comparable_steps(trial.record, trial.reference)
        tested += [trial.dtype] * (num > 0)
        if num < trial.record.job.steps:
            untested.append(f"{trial.dtype} was tested up to step {num}, before its loss scale changes")
        elif trial.dtype == "fp16" and not trial.record.skipped_steps:
            untested.append("a step that fp16 skips was not tested")
    parts, missing = coverage.told_by(record, probe)
    untested += missing
    if tested:
        size = coverage.smaller(probe.trials[0].record.job.workload, record.job.workload)
        untested.insert(
            0, f"probe: {counted(steps, 'step')}{size} in {' and '.join(tested)}, {', '.join(parts)}"
        )
    elif steps_untested := coverage.untested_steps(record):
        untested.append(steps_untested)
    return dataclasses.replace(verdict, text="; ".join([verdict.text, *untested]), evidence=rests)


def _untrained_reference(trial: Trial) -> str:
    """Return, as text, why a trial cannot be compared with the reference; empty if it can."""
    for other in (trial.reference, *trial.others):
        if why := evidence.untrained(other, f": {other.reason}"):
            return f"the reference's probe in {trial.dtype} did not train: {why}"
    return ""


def _told(trial: Trial, found: departures.Departure) -> str:
    """Return a departure as text, with the group of tensors that has the largest errors, if one stands out."""
    place = causes.outstanding(trial.record, trial.reference)
    where = f"; farthest off: {place}" if place and found.reason in ("update", "later", "weights") else ""
    return f"{found.text}{where} (probe in {trial.dtype})"


def _steps(record: Record) -> str:
    """Return, as text, the number of steps and the number of steps that fp16 skipped, if it skipped any."""
    skipped = f" ({len(record.skipped_steps)} skipped by the loss scale)" if record.skipped_steps else ""
    return f"{counted(record.job.steps, 'step')}{skipped}"


def _of_flaw(flaw: Flaw) -> Gate:
    return _failed(flaw.reason, flaw.text, dict(flaw.evidence))


def _failed(reason: str, text: str, rests: dict[str, Any]) -> Gate:
    return Gate("failed", reason, text, rests)
