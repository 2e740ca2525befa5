"""Judges imported records by their loss curves: did the logged run train the same as the reference?

A log has no weights, so the best verdict is `tolerance`. The reference is a log in the same folder, of a training that
keeps everything on the device. Its depth is the judged log's or, if there is no such log, the nearest to it. The
distance between two curves is given as a share of the reference's fall, which is its loss in the first logged interval
minus its loss in the last. So a curve that does not fall is 100 % away.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from harness.base.console import counted
from harness.core.record import Gate, Record

# Largest allowed distance at equal depth, as a share of the fall of the reference's loss. At 32 layers, the published
# log of ZeRO-Offload (dropout 0.1, other kernels, another Megatron) is 0.6 % from the resident log; the log of
# ZeRO-Infinity, whose training is wrong, is 32 % away.
ALLOWED = 0.05
# Further distance that is allowed for each doubling of depth between log and reference. ZeRO-Offload at 48 layers is
# 8.6 % from the resident run at 32 layers, which makes 15 % for a doubling.
ALLOWED_PER_DOUBLING = 0.2
# Largest ratio of depths, in doublings. At a larger ratio, the allowed distance would also cover a wrong training.
FARTHEST_DOUBLINGS = 1.0
# Smallest fall of a log's loss, as a share of the reference's fall. A run with a smaller fall has learned nothing: one
# run, for example, logged a loss of 11.21 five times.
LEAST_LEARNED = 0.1
# Smallest fall of a reference's loss, as a share of the loss. A smaller fall may be noise, because dropout and data
# move an interval's mean by 0.12 %.
LEAST_TELLING_FALL = 0.01


def judge_all(records: Sequence[Record], references: Sequence[str]) -> list[Gate]:
    """Return a verdict on each log of one folder. `references`: methods that may be the reference, best first.

    A record without a reference at its own depth is also compared with records of its method at a depth that has a
    reference, and with records of its own size by other methods. Of the other methods, only those count that agree with
    the reference at some depth.
    """
    anchors: list[Record] = []
    for name in references:
        anchors += [record for record in records if record.job.method == name]
    judged = [(record, _judge(record, anchors)) for record in records]
    return [_timed(record, _hold_to_others(record, gate, judged)) for record, gate in judged]


def _timed(record: Record, gate: Gate) -> Gate:
    """Return the verdict, or `untested` in place of a passing one for a log without times: a record that passed has a
    throughput."""
    if not gate.passed or any(record.timed_seconds):
        return gate
    text = f"no time of a step could be read; without times: {gate.text}"
    return Gate("untested", "incomplete", text, gate.evidence)


def learned(record: Record) -> float:
    """Return the fall of the loss from the first interval to the last. The fall is 0 if the curve is incomplete, not
    finite or not falling."""
    return max(0.0, record.losses[0] - record.losses[-1]) if _verdict_alone(record) is None else 0.0


def _verdict_alone(record: Record) -> Gate | None:
    """Return the verdict on a record that its own values decide; None if they do not."""
    wrong = record.evidence.get("other_parameters")
    if wrong:
        return Gate("failed", "parameters", wrong)
    for place, loss in enumerate(record.losses, start=1):
        if loss is not None and not math.isfinite(loss):
            last = place * record.interval_steps
            text = f"the loss is not finite in steps {last - record.interval_steps + 1} to {last}"
            return Gate("failed", "not-finite", text)
    expected = max(1, record.job.steps // record.interval_steps)
    num_losses = sum(loss is not None for loss in record.losses)
    if record.status != "ok" or num_losses < expected:
        return Gate("untested", "incomplete", f"{num_losses} of {expected} logged losses")
    if num_losses < 2:
        return Gate("untested", "too-short", "one logged loss shows no training")
    return None


def _judge(record: Record, anchors: list[Record]) -> Gate:
    verdict = _verdict_alone(record)
    if verdict is not None:
        return verdict
    same = [anchor for anchor in anchors if _is_comparable(record, anchor)]
    if not same:
        return Gate("untested", "no-reference", "no log beside it is the same training wholly on the device")
    nearest = min(same, key=lambda anchor: (not learned(anchor), _doublings(record, anchor)))
    if nearest is not record and learned(nearest):
        return compare_curves(record, nearest)
    if nearest is not record:
        return Gate(
            "untested",
            "no-reference",
            f"{_log_name_text(nearest)} beside it is no reference: {_flaw(nearest)}",
        )
    if not learned(record):
        return Gate("untested", "weak-reference", f"would be the reference, but {_flaw(record)}")
    first, last = record.losses[0], record.losses[-1]
    text = f"is the reference: the logged losses are finite and fall from {first:.4g} to {last:.4g}"
    return Gate("tolerance", "", text)


def _flaw(anchor: Record) -> str:
    """Return, as text, why a log cannot be the reference: it fails its own conditions or, if it meets them, its loss
    does not fall. Called only if one of these is so."""
    verdict, losses = _verdict_alone(anchor), anchor.losses
    return (
        verdict.text
        if verdict
        else f"its logged losses do not fall: from {losses[0]:.4g} to {losses[-1]:.4g}"
    )


def _log_name_text(record: Record) -> str:
    return f"{record.job.method} at {counted(record.job.workload.num_layers, 'layer')}"


def compare_curves(record: Record, other: Record) -> Gate:
    """Judge a record by the largest distance between its curve and the curve of the record `other`."""
    name, losses, expected = _log_name_text(other), record.losses, other.losses
    doublings, fall = _doublings(record, other), expected[0] - expected[len(losses) - 1]
    if fall <= 0:
        return Gate(
            "untested", "no-reference", f"{name} learned nothing in {counted(record.job.steps, 'step')}"
        )
    distances = [abs(loss - other_loss) / fall for loss, other_loss in zip(losses, expected, strict=False)]
    worst = distances.index(max(distances))
    allowed = ALLOWED + ALLOWED_PER_DOUBLING * doublings
    evidence = {
        "reference": other.key,
        "reference_method": other.job.method,
        "reference_layers": other.job.workload.num_layers,
        "learned": fall,
        "distances": distances,
        "allowed": allowed,
    }
    share = f"{distances[worst]:.1%} of what {name} learned"
    if distances[worst] <= allowed:
        if doublings > FARTHEST_DOUBLINGS:
            return Gate("untested", "far-reference", f"within {share}, but that is too far to tell", evidence)
        text = f"{len(distances)} logged losses within {share} ({allowed:.1%} allowed)"
        return Gate("tolerance", "", text, evidence)
    is_telling = fall >= LEAST_TELLING_FALL * expected[0]
    if is_telling and losses[0] - losses[-1] < LEAST_LEARNED * fall:
        text = f"it learns nothing: its loss goes from {losses[0]:.4g} to {losses[-1]:.4g}, {name} fell by {fall:.3g}"
        return Gate("failed", "no-learning", text, evidence)
    at = f"{losses[worst]:.4g} instead of {expected[worst]:.4g} at step {(worst + 1) * record.interval_steps}"
    text = f"loss {at}: off by {share} ({allowed:.1%} allowed)"
    if not is_telling:
        return Gate("untested", "weak-reference", f"{text}, which hardly learned itself", evidence)
    return Gate("failed", "loss", text, evidence)


def _hold_to_others(record: Record, gate: Gate, judged: list[tuple[Record, Gate]]) -> Gate:
    """Return the verdict on a record. If the record has a reference at its own depth, the verdict is `gate`. If not,
    the record's twins at other depths and the records of its size by other methods can change the verdict."""
    if "reference_layers" not in gate.evidence or _is_at_depth(record, gate):
        return gate
    twins = [(twin, verdict) for twin, verdict in judged if twin is not record and _is_twin(record, twin)]
    for twin, verdict in twins:
        # True: the twin was judged by its own values alone, for example by an infinite loss
        of_itself = "reference_layers" not in verdict.evidence
        has_failed = verdict.verdict == "failed" and gate.verdict != "failed"
        if has_failed and (of_itself or _is_at_depth(twin, verdict)):
            text = f"its twin at {counted(twin.job.workload.num_layers, 'layer')}: {verdict.text}"
            return Gate("failed", verdict.reason, text, gate.evidence)
    for peer, verdict in judged:
        is_size = _is_comparable(record, peer) and not _doublings(record, peer)
        if peer.job.method != record.job.method and is_size and _is_trusted(peer, verdict, judged):
            gate = compare_curves(record, peer)
            if not gate.passed:
                return gate
    if gate.reason == "far-reference":
        for twin, verdict in twins:
            if verdict.passed and _is_at_depth(twin, verdict):
                layers = counted(twin.job.workload.num_layers, "layer")
                text = f"its twin at {layers} is within tolerance; here {gate.text}"
                return Gate("twin", "", text, gate.evidence)
    return gate


def _is_trusted(peer: Record, gate: Gate, judged: list[tuple[Record, Gate]]) -> bool:
    """True if the peer agrees with the nearest reference, and a twin of the peer agrees with a reference of the twin's
    own depth."""
    if not gate.passed:
        return False
    twins = [(twin, verdict) for twin, verdict in judged if _is_twin(peer, twin)]
    return any(verdict.passed and _is_at_depth(twin, verdict) for twin, verdict in twins)


def _is_at_depth(record: Record, gate: Gate) -> bool:
    """True if the record was judged by a reference of the same depth."""
    return bool(gate.evidence.get("reference_layers") == record.job.workload.num_layers)


def _is_twin(record: Record, other: Record) -> bool:
    """True if both records have the same method, options and training. Their depths may differ."""
    same = (record.job.method, record.job.options) == (other.job.method, other.job.options)
    return same and _is_comparable(record, other)


def _is_comparable(record: Record, other: Record) -> bool:
    """True if both records have the same training and intervals, and `other` has at least as many steps. Their depths
    may differ, and so may fields that one of the logs does not tell."""
    load, other_load = dataclasses.asdict(record.job.workload), dataclasses.asdict(other.job.workload)
    unsaid = {*record.evidence.get("unsaid", ()), *other.evidence.get("unsaid", ()), "num_layers"}
    return (
        all(load[name] == other_load[name] for name in load if name not in unsaid)
        and record.interval_steps == other.interval_steps
        and record.job.steps <= other.job.steps
    )


def _doublings(record: Record, other: Record) -> float:
    return abs(math.log2(record.job.workload.num_layers / other.job.workload.num_layers))
