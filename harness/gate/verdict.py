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

from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core.job import WEIGHT_DECAY, Workload
from harness.core.record import VERDICTS, Gate, Record
from harness.gate import departures, evidence, flaws
from harness.gate.evidence import MOMENTS, Trial
from harness.gate.flaws import Flaw
from harness.gate.limits import DROPOUT_MULTIPLE, LOSS_TOLERANCE
from harness.gate.probe import NONE, Probe, extent_of

UNPROBED_TEXT = "a run whose probe did not train has no throughput; try --no-probe, which the verdict states"
# Reasons that are certain without a probe, because they name something that the run lacks or has wrong.
CERTAIN_REASONS = ("not-finite", "incomplete", "missing", "dtype", "unchanged", "data")
# Verdicts, from best to worst.
VERDICTS_BY_SEVERITY = [*(verdict for verdict in VERDICTS if verdict != "failed"), "failed"]
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
    if flaw := flaws.find_flaw(record):
        return _fail_by_flaw(flaw)
    if flaw := flaws.find_uncounted_training(record):
        return Gate("untested", flaw.reason, flaw.text)
    if reference is record:
        text = f"is the reference: every loss of {_steps_text(record)} finite, every tensor changed"
        return Gate("exact", "", text)
    if reference is not None:
        return _judge_by_reference(record, reference, undropped)
    if twins is not None:
        return _judge_by_twin(record, *twins, peers)
    return Gate()


def judge_models(record: Record) -> Gate | None:
    """Return a failed verdict if the run's models are not those that its job asks for; else None."""
    return _fail_by_flaw(flaw) if (flaw := flaws.find_wrong_models(record)) else None


def combine_verdicts(verdicts: list[Gate]) -> Gate:
    """Return one verdict on several models that were trained in turns: the worst one, with the number of its model."""
    if len(verdicts) == 1:
        return verdicts[0]
    severities = [VERDICTS_BY_SEVERITY.index(verdict.verdict) for verdict in verdicts]
    number = 1 + severities.index(max(severities))
    worst = verdicts[number - 1]
    model = f"each of {len(verdicts)} models" if worst.passed else f"model {number} of {len(verdicts)}"
    verdict_evidence = {**worst.evidence, "models": [verdict.verdict for verdict in verdicts]}
    return dataclasses.replace(worst, text=f"{model}: {worst.text}", evidence=verdict_evidence)


def _judge_by_reference(record: Record, reference: Record, undropped: Record | None) -> Gate:
    loss_differences = [difference for *_, difference in evidence.loss_differences(record, reference)]
    largest = max(loss_differences, default=math.nan)
    verdict_evidence: JsonObject = {"reference": reference.key, "loss_difference": largest}
    if why := flaws.untrained_reason(reference):
        verdict_evidence["reference_ended"] = reference.status
        return Gate(
            "untested", "no-reference", f"the reference itself did not train: {why}", verdict_evidence
        )
    if record.data_sha256 != reference.data_sha256:
        return _fail("data", "trained on other data than the reference", verdict_evidence)
    if set(record.tensors) != set(reference.tensors):
        names = sorted(set(record.tensors) ^ set(reference.tensors))
        return _fail(
            "missing", f"the tensors are not the reference's: {evidence.names_text(names)}", verdict_evidence
        )
    if text := evidence.scale_difference_text(record, reference):
        return _fail("loss-scale", text, verdict_evidence)
    if evidence.is_bit_equal(record, reference):
        text = f"{_steps_text(record)} and all weights bit-equal to {reference.job.method}"
        return Gate("exact", "", text, verdict_evidence)
    if undropped is not None:
        return _judge_by_dropout(record, reference, undropped, verdict_evidence)
    must_be_exact = evidence.promises_bits(record)
    tolerance = 0.0 if must_be_exact else LOSS_TOLERANCE[evidence.device_and_dtype(record)]
    if departure := departures.run_departure(record, reference):
        verdict_evidence = {"tolerance": tolerance, **verdict_evidence, "step": departure.step}
        return _fail(departure.reason, departure.text, verdict_evidence)
    if must_be_exact:
        return _fail(
            "weights", "losses agree but the final weights are not the reference's bits", verdict_evidence
        )
    text = f"{_steps_text(record)} within {tolerance:g} of {reference.job.method} (largest {largest:.1e})"
    return Gate("tolerance", "", text, {**verdict_evidence, "tolerance": tolerance})


def _judge_by_dropout(
    record: Record, reference: Record, undropped: Record, verdict_evidence: JsonObject
) -> Gate:
    """Return the verdict on a run that drops other elements than the reference. The run may differ by no more than a
    few times the change that dropout causes."""
    if why := flaws.untrained_reason(undropped):
        return Gate(
            "untested",
            "no-reference",
            f"the reference without dropout did not train: {why}",
            verdict_evidence,
        )
    if departures.drops_nothing(record, reference, undropped):
        text = "it dropped nothing: within rounding it is the reference without dropout"
        return _fail("dropout", text, verdict_evidence)
    if departure := departures.dropout_departure(record, reference, undropped):
        return _fail(departure.reason, departure.text, {**verdict_evidence, "step": departure.step})
    text = f"{_steps_text(record)} within {DROPOUT_MULTIPLE:g} times what dropout changes in {reference.job.method}"
    return Gate("tolerance", "", f"{text}; which elements are dropped was not compared", verdict_evidence)


def _judge_by_twin(record: Record, twin: Record, twin_reference: Record, peers: Sequence[Record]) -> Gate:
    depth = twin.job.workload.num_layers
    if flaws.has_other_source(twin, record):
        verdict = Gate("untested", flaws.CHANGED_CODE, flaws.OTHER_CODE_TEXT)
    else:
        verdict = judge(twin, twin_reference)
    verdict_evidence: JsonObject = {"twin": twin.key, "twin_layers": depth, "twin_verdict": verdict.verdict}
    if not verdict.passed:
        reason = f"its twin at {counted(depth, 'layer')}: {verdict.text}"
        return Gate(
            "failed" if verdict.verdict == "failed" else "untested", verdict.reason, reason, verdict_evidence
        )
    agreeing_methods = []
    for peer in peers:
        if flaws.find_flaw(peer) is None and peer.data_sha256 == record.data_sha256:
            if other_loss := departures.first_loss_beyond_text(record, peer):
                text = f"{peer.job.method} trains this size otherwise: {other_loss}"
                return _fail("peers", text, verdict_evidence)
            agreeing_methods.append(peer.job.method)
    agreement = f", and agrees with {', '.join(agreeing_methods)} here" if agreeing_methods else ""
    text = f"its twin at {counted(depth, 'layer')} is {verdict.verdict}{agreement}"
    return Gate("twin", "", text, {**verdict_evidence, "peers": agreeing_methods})


def needs_no_probe(verdict: Gate, record: Record) -> bool:
    """True if no probe can change the verdict. A method that is inexact by design is probed only if it passed."""
    is_final = verdict.verdict == "untested" or verdict.reason in CERTAIN_REASONS
    return is_final or not (record.is_exact or verdict.passed)


def with_probe(verdict: Gate, record: Record, probe: Probe) -> Gate:
    """Return the verdict on a run, combined with the findings of its probe and a text on what was not tested."""
    if verdict.verdict == "untested":
        return verdict
    probe_keys = {trial.dtype: trial.record.key for trial in probe.trials}
    verdict_evidence = {**verdict.evidence, "probe": probe_keys}
    if probe.missing and verdict.passed:
        return Gate("untested", "probe", f"{probe.missing}; {verdict.text}", verdict_evidence)
    layers, steps, is_full = extent_of(probe.trials[0], record.job.workload) if probe.trials else NONE
    if steps:
        verdict_evidence |= {"probe_layers": layers, "probe_steps": steps}
    verdict_evidence |= {"probe_is_full": True} if is_full else {}
    if probe.refused and verdict.passed:
        return Gate("untested", "probe", f"{probe.refused}; {UNPROBED_TEXT}", verdict_evidence)
    tested_dtypes, gap_texts = [], [probe.untested] if probe.untested else []
    for trial in probe.trials:
        if verdict.passed and (why := flaws.uncovered_code_text(trial, record)):
            return Gate("untested", "probe", why, verdict_evidence)
        if why := _untrained_reference(trial):
            gap_texts.append(why)
            continue
        if trial.record.status != "ok":
            end_text = f"the probe in {trial.dtype} ended as {trial.record.status}: {trial.record.reason}"
            if verdict.passed:
                return Gate("untested", "probe", f"{end_text}; {UNPROBED_TEXT}", verdict_evidence)
            gap_texts.append(end_text)
            continue
        if (departure := departures.trial_departure(trial)) and verdict.reason not in CERTAIN_REASONS:
            text = _departure_text(trial, departure)
            if not verdict.passed:
                # the departure's text gives the cause already
                text += f"; the run itself: {verdict.text.removesuffix(f': {departure.cause}')}"
            return _fail(departure.reason, text, {**verdict_evidence, "step": departure.step})
        num_steps, gap = _compared_steps(trial)
        if num_steps > 0:
            tested_dtypes.append(trial.dtype)
        if gap:
            gap_texts.append(gap)
    text = "; ".join([verdict.text, *_coverage_texts(record, probe, tested_dtypes, gap_texts)])
    return dataclasses.replace(verdict, text=text, evidence=verdict_evidence)


def _coverage_texts(
    record: Record, probe: Probe, tested_dtypes: list[str], gap_texts: list[str]
) -> list[str]:
    """Return texts on what the probe tested and what was not tested. `tested_dtypes`: the dtypes in which it trained;
    `gap_texts`: texts on what its trials left untested."""
    facts, missing_facts = facts_and_gaps(record, probe)
    if tested_dtypes:
        probe_job = probe.trials[0].record.job
        sizes = smaller_sizes_text(probe_job.workload, record.job.workload)
        extent = f"{counted(probe_job.steps, 'step')}{sizes} in {' and '.join(tested_dtypes)}"
        return [f"probe: {extent}, {', '.join(facts)}", *gap_texts, *missing_facts]
    untested_updates = untested_updates_text(record)
    return [*gap_texts, *missing_facts, *([untested_updates] if untested_updates else [])]


def untested_updates_text(record: Record) -> str:
    """Return, as text, what a run without a probe leaves untested of its updates: weight decay, if it is too small to
    change a weight, and the learning rate of later steps. Empty if nothing is left."""
    load, steps = record.job.workload, record.job.steps
    untested = ["decay"] * (load.learning_rate_at(steps) * WEIGHT_DECAY < SMALLEST_DECAY)
    untested += [f"the learning rate after step {steps}"] * (steps < load.lr_decay_steps)
    if not untested:
        return ""
    return f"{' and '.join(untested)} {'was' if len(untested) == 1 else 'were'} not tested"


def smaller_sizes_text(probed: Workload, whole: Workload) -> str:
    """Return, as text, how much of the run's model a probe trained; empty if it trained all. The probe cannot see a
    fault that shows only with more layers or larger sizes."""
    head_sizes = probed.hidden_size // probed.num_heads, whole.hidden_size // whole.num_heads
    size_pairs = {
        "layers": (probed.num_layers, whole.num_layers),
        "columns": (probed.hidden_size, whole.hidden_size),
        "heads": (probed.num_heads, whole.num_heads),
        "tokens": (probed.seq_len, whole.seq_len),
        "words": (probed.vocab_size, whole.vocab_size),
        "columns of a head": head_sizes,
    }
    smaller_sizes = []
    for noun, (probed_size, whole_size) in size_pairs.items():
        if probed_size < whole_size:
            smaller_sizes.append(f"{probed_size} of {whole_size} {noun}")
    return f" at {', '.join(smaller_sizes)}" if smaller_sizes else ""


def facts_and_gaps(record: Record, probe: Probe) -> tuple[list[str], list[str]]:
    """Return two lists of texts: the facts that the method returns of its training, and notes on facts that were not
    tested because the method does not return them."""
    trainings = (record, *(trial.record for trial in probe.trials))
    has_norms = all(len(training.grad_norms) == len(training.losses) for training in trainings)
    moments = [name for name, moment in MOMENTS.items() if evidence.has_moments(record, moment)]
    gaps = [f"{name} were not tested: the method returns none" for name in MOMENTS if name not in moments]
    if not has_norms:
        gaps.append("norms were not tested: the method returns none, or not in every step")
    if len(moments) == len(MOMENTS):
        moments = ["both moments"]
    return ["losses", *["norms"] * has_norms, "weights", *moments], gaps


def _compared_steps(trial: Trial) -> tuple[int, str]:
    """Return the number of steps of a trial that are compared, and a text on the steps that are not; the text is empty
    if all are, skipped ones of fp16 included."""
    num_steps = evidence.num_comparable_steps(trial.record, trial.reference)
    if num_steps < trial.record.job.steps:
        return num_steps, f"{trial.dtype} was tested up to step {num_steps}, before its loss scale changes"
    if trial.dtype == "fp16" and not trial.record.skipped_steps:
        return num_steps, "a step that fp16 skips was not tested"
    return num_steps, ""


def _untrained_reference(trial: Trial) -> str:
    """Return, as text, why a trial cannot be compared with the reference; empty if it can."""
    for record in (trial.reference, *trial.others):
        if why := flaws.untrained_reason(record, f": {record.reason}"):
            return f"the reference's probe in {trial.dtype} did not train: {why}"
    return ""


def _departure_text(trial: Trial, departure: departures.Departure) -> str:
    """Return a departure as text, with the group of tensors that has the largest errors, if one stands out."""
    group = departures.outstanding_group(trial.record, trial.reference)
    is_in_weights = departure.reason in ("update", "later", "weights")
    group_text = f"; farthest off: {group}" if group and is_in_weights else ""
    return f"{departure.text}{group_text} (probe in {trial.dtype})"


def _steps_text(record: Record) -> str:
    """Return, as text, the number of steps and the number of steps that fp16 skipped, if it skipped any."""
    skipped = f" ({len(record.skipped_steps)} skipped by the loss scale)" if record.skipped_steps else ""
    return f"{counted(record.job.steps, 'step')}{skipped}"


def _fail_by_flaw(flaw: Flaw) -> Gate:
    return _fail(flaw.reason, flaw.text, dict(flaw.evidence))


def _fail(reason: str, text: str, verdict_evidence: JsonObject) -> Gate:
    return Gate("failed", reason, text, verdict_evidence)
