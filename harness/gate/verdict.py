"""The gate: does a record show the same training as the reference? judge() returns a verdict, from records alone.

flaws.py looks for flaws of the record alone: a missing step, a loss that is not finite, a tensor that did not change.
Then departures.py compares the record with the reference's, within rounding (limits.py): losses and gradient norms by
step, and for each tensor the share that changed, the distance moved, its final values and the size of its moments. At
last the probe (probe.py) trains at a learning rate at which faults show. The first departure gives the reason of a
failure; a departure of the probe goes before one of the run. The text of a verdict also tells what it covers: the sizes
that the probe trained, the facts that the method returned, and what is left untested. court.py brings all these records
together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from harness.base.console import counted
from harness.core.job import WEIGHT_DECAY, Workload
from harness.core.record import VERDICTS, Gate, Record
from harness.gate import departures, evidence, flaws
from harness.gate.evidence import MOMENTS, Trial
from harness.gate.flaws import Flaw
from harness.gate.limits import DROPOUT_ALLOWED, LOSS_TOLERANCE
from harness.gate.probe import NONE, Probe, extent_of

UNPROBED = "a run whose probe did not train has no throughput; try --no-probe, which the verdict states"
# Reasons that are certain without a probe, because they name something that the run lacks or has wrong.
CERTAIN = ("not-finite", "incomplete", "missing", "dtype", "unchanged", "data")
SEVERITY = [
    *(verdict for verdict in VERDICTS if verdict != "failed"),
    "failed",
]  # verdicts, from best to worst
SMALLEST_DECAY = 2**-25  # 1 minus a smaller product of learning rate and weight decay is rounded to 1


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
    if flaw := flaws.flaw(record):
        return _of_flaw(flaw)
    if flaw := flaws.elsewhere(record):
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
    return _of_flaw(flaw) if (flaw := flaws.unasked(record)) else None


def together(verdicts: list[Gate]) -> Gate:
    """Return one verdict on several models that were trained in turns: the worst one, with the number of its model."""
    if len(verdicts) == 1:
        return verdicts[0]
    number, worst = max(enumerate(verdicts, start=1), key=lambda item: SEVERITY.index(item[1].verdict))
    model = f"each of {len(verdicts)} models" if worst.passed else f"model {number} of {len(verdicts)}"
    rests = {**worst.evidence, "models": [verdict.verdict for verdict in verdicts]}
    return dataclasses.replace(worst, text=f"{model}: {worst.text}", evidence=rests)


def _compare(record: Record, reference: Record, undropped: Record | None) -> Gate:
    largest = max(
        (difference for *_, difference in evidence.loss_differences(record, reference)), default=math.nan
    )
    rests: dict[str, Any] = {"reference": reference.key, "loss_difference": largest}
    if why := flaws.untrained(reference):
        rests["reference_ended"] = reference.status
        return Gate("untested", "no-reference", f"the reference itself did not train: {why}", rests)
    if record.data_sha256 != reference.data_sha256:
        return _failed("data", "trained on other data than the reference", rests)
    if set(record.tensors) != set(reference.tensors):
        names = sorted(set(record.tensors) ^ set(reference.tensors))
        return _failed("missing", f"the tensors are not the reference's: {evidence.names_text(names)}", rests)
    if text := evidence.other_scales(record, reference):
        return _failed("loss-scale", text, rests)
    if evidence.is_same(record, reference):
        return Gate(
            "exact", "", f"{_steps(record)} and all weights bit-equal to {reference.job.method}", rests
        )
    if undropped is not None:
        return _within_dropout(record, reference, undropped, rests)
    must_be_exact = evidence.promises_bits(record)
    tolerance = 0.0 if must_be_exact else LOSS_TOLERANCE[evidence.kernels(record)]
    if departure := departures.of_run(record, reference):
        rests = {"tolerance": tolerance, **rests, "step": departure.step}
        return _failed(departure.reason, departure.text, rests)
    if must_be_exact:
        return _failed("weights", "losses agree but the final weights are not the reference's bits", rests)
    text = f"{_steps(record)} within {tolerance:g} of {reference.job.method} (largest {largest:.1e})"
    return Gate("tolerance", "", text, {**rests, "tolerance": tolerance})


def _within_dropout(record: Record, reference: Record, undropped: Record, rests: dict[str, Any]) -> Gate:
    """Return the verdict on a run that drops other elements than the reference. The run may differ by no more than a
    few times the change that dropout causes."""
    if why := flaws.untrained(undropped):
        return Gate("untested", "no-reference", f"the reference without dropout did not train: {why}", rests)
    if departures.drops_nothing(record, reference, undropped):
        text = "it dropped nothing: within rounding it is the reference without dropout"
        return _failed("dropout", text, rests)
    if departure := departures.beyond_dropout(record, reference, undropped):
        return _failed(departure.reason, departure.text, {**rests, "step": departure.step})
    text = f"{_steps(record)} within {DROPOUT_ALLOWED:g} times what dropout changes in {reference.job.method}"
    return Gate("tolerance", "", f"{text}; which elements are dropped was not compared", rests)


def _by_twin(record: Record, twin: Record, twin_reference: Record, peers: Sequence[Record]) -> Gate:
    depth = twin.job.workload.num_layers
    if flaws.is_of_another(twin, record):
        verdict = Gate("untested", flaws.CHANGED, flaws.AGAIN)
    else:
        verdict = judge(twin, twin_reference)
    rests: dict[str, Any] = {"twin": twin.key, "twin_layers": depth, "twin_verdict": verdict.verdict}
    if not verdict.passed:
        reason = f"its twin at {counted(depth, 'layer')}: {verdict.text}"
        return Gate("failed" if verdict.verdict == "failed" else "untested", verdict.reason, reason, rests)
    agreeing = []
    for peer in peers:
        if flaws.flaw(peer) is None and peer.data_sha256 == record.data_sha256:
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
    if steps:
        rests |= {"probe_layers": layers, "probe_steps": steps}
    if is_full:
        rests |= {"probe_is_full": True}
    if probe.refused and verdict.passed:
        return Gate("untested", "probe", f"{probe.refused}; {UNPROBED}", rests)
    tested, untested = [], [probe.untested] if probe.untested else []
    for trial in probe.trials:
        if verdict.passed and (why := flaws.other_code_of_trial(trial, record)):
            return Gate("untested", "probe", why, rests)
        if why := _untrained_reference(trial):
            untested.append(why)
            continue
        if trial.record.status != "ok":
            ended = f"the probe in {trial.dtype} ended as {trial.record.status}: {trial.record.reason}"
            if verdict.passed:
                return Gate("untested", "probe", f"{ended}; {UNPROBED}", rests)
            untested.append(ended)
            continue
        if (departure := departures.of_trial(trial)) and verdict.reason not in CERTAIN:
            text = _departure_text(trial, departure)
            if not verdict.passed:
                # the departure's text gives the cause already
                text += f"; the run itself: {verdict.text.removesuffix(f': {departure.cause}')}"
            return _failed(departure.reason, text, {**rests, "step": departure.step})
        num_steps, gap = _compared_steps(trial)
        tested += [trial.dtype] * (num_steps > 0)
        untested += [gap] * bool(gap)
    text = "; ".join([verdict.text, *_coverage_texts(record, probe, tested, untested)])
    return dataclasses.replace(verdict, text=text, evidence=rests)


def _coverage_texts(record: Record, probe: Probe, tested: list[str], untested: list[str]) -> list[str]:
    """Return texts on what the probe tested and what was not tested. `tested`: the dtypes in which it trained;
    `untested`: texts on what its trials left untested."""
    facts, missing = facts_and_gaps(record, probe)
    if tested:
        probed = probe.trials[0].record.job
        size = smaller_sizes_text(probed.workload, record.job.workload)
        extent = f"{counted(probed.steps, 'step')}{size} in {' and '.join(tested)}"
        return [f"probe: {extent}, {', '.join(facts)}", *untested, *missing]
    steps_untested = untested_steps(record)
    return [*untested, *missing, *([steps_untested] if steps_untested else [])]


def untested_steps(record: Record) -> str:
    """Return, as text, what a run without a probe leaves untested of its updates: weight decay, if it is too small to
    change a weight, and the learning rate of later steps. Empty if nothing is left."""
    load, steps = record.job.workload, record.job.steps
    parts = ["decay"] * (load.learning_rate_at(steps) * WEIGHT_DECAY < SMALLEST_DECAY)
    parts += [f"the learning rate after step {steps}"] * (steps < load.lr_decay_steps)
    return f"{' and '.join(parts)} {'was' if len(parts) == 1 else 'were'} not tested" if parts else ""


def smaller_sizes_text(probed: Workload, whole: Workload) -> str:
    """Return, as text, how much of the run's model a probe trained; empty if it trained all. The probe cannot see a
    fault that shows only with more layers or larger sizes."""
    sizes = {
        "layers": "num_layers",
        "columns": "hidden_size",
        "heads": "num_heads",
        "tokens": "seq_len",
        "words": "vocab_size",
    }
    pairs = {noun: (getattr(probed, name), getattr(whole, name)) for noun, name in sizes.items()}
    pairs["columns of a head"] = (
        probed.hidden_size // probed.num_heads,
        whole.hidden_size // whole.num_heads,
    )
    parts = [f"{part} of {most} {noun}" for noun, (part, most) in pairs.items() if part < most]
    return f" at {', '.join(parts)}" if parts else ""


def facts_and_gaps(record: Record, probe: Probe) -> tuple[list[str], list[str]]:
    """Return two lists of texts: the facts that the method returns of its training, and notes on facts that were not
    tested because the method does not return them."""
    records = (record, *(trial.record for trial in probe.trials))
    has_norms = all(len(one.grad_norms) == len(one.losses) for one in records)
    has = {name: evidence.has_moments(record, moment) for name, moment in MOMENTS.items()}
    moments = ["both moments"] if all(has.values()) else [name for name in has if has[name]]
    missing = [f"{name} were not tested: the method returns none" for name in has if not has[name]]
    missing += [] if has_norms else ["norms were not tested: the method returns none, or not in every step"]
    return ["losses", *["norms"] * has_norms, "weights", *moments], missing


def _compared_steps(trial: Trial) -> tuple[int, str]:
    """Return the number of steps of a trial that are compared, and a text on the steps that are not; the text is empty
    if all are, skipped ones of fp16 included."""
    num_steps = evidence.comparable_steps(trial.record, trial.reference)
    if num_steps < trial.record.job.steps:
        return num_steps, f"{trial.dtype} was tested up to step {num_steps}, before its loss scale changes"
    if trial.dtype == "fp16" and not trial.record.skipped_steps:
        return num_steps, "a step that fp16 skips was not tested"
    return num_steps, ""


def _untrained_reference(trial: Trial) -> str:
    """Return, as text, why a trial cannot be compared with the reference; empty if it can."""
    for record in (trial.reference, *trial.others):
        if why := flaws.untrained(record, f": {record.reason}"):
            return f"the reference's probe in {trial.dtype} did not train: {why}"
    return ""


def _departure_text(trial: Trial, departure: departures.Departure) -> str:
    """Return a departure as text, with the group of tensors that has the largest errors, if one stands out."""
    place = departures.outstanding(trial.record, trial.reference)
    is_in_weights = departure.reason in ("update", "later", "weights")
    where = f"; farthest off: {place}" if place and is_in_weights else ""
    return f"{departure.text}{where} (probe in {trial.dtype})"


def _steps(record: Record) -> str:
    """Return, as text, the number of steps and the number of steps that fp16 skipped, if it skipped any."""
    skipped = f" ({len(record.skipped_steps)} skipped by the loss scale)" if record.skipped_steps else ""
    return f"{counted(record.job.steps, 'step')}{skipped}"


def _of_flaw(flaw: Flaw) -> Gate:
    return _failed(flaw.reason, flaw.text, dict(flaw.evidence))


def _failed(reason: str, text: str, rests: dict[str, Any]) -> Gate:
    return Gate("failed", reason, text, rests)
