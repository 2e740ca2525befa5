"""Judges a record that others sent in, by the records sent with it, because nothing can be run again on their machine.

The record's reference, twin and probe are looked for among these records. The verdict that the record brings is not
trusted to be good: it tells which twin and which probes to look for, and the new verdict is never better than it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.core import method
from harness.core.record import Gate, Record
from harness.gate import evidence
from harness.gate.probe import RATES, ROUNDED, Probe
from harness.gate.trial import Trial
from harness.gate.verdict import judge, needs_no_probe, together, unasked, with_probe

ASCENDING = ("failed", "untested", "twin", "tolerance", "exact")  # verdicts, from the worst to the best

JUDGED_HERE = "judged here, not by the sender"


class Beside(NamedTuple):
    """The records that were sent together. `runs`: records of jobs. `probes`: records of the trainings of the gate's
    probes."""

    runs: Sequence[Record]
    probes: Sequence[Record]


def judge_anew(record: Record, beside: Beside) -> Gate:
    """Judge a record by the records that were sent with it, and return the verdict.

    It is not better than the verdict that the record brings: what made that one worse, such as a probe, may not have
    come with it. A record whose call ended before the gate judged it brings none, nor does one whose verdict was
    removed; nothing tells these apart, so the verdict says whose it is. Raises ValueError if the record has values that
    cannot be judged.
    """
    if record.status != "ok":
        return Gate()
    try:
        verdict = unasked(record) or together(
            [_verdict(record, n, beside) for n in range(1 + len(record.others))]
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # some fields may hold any JSON value
        raise ValueError(
            f"expected a record that can be judged, got {type(error).__name__}: {error}"
        ) from error
    if not record.is_judged:
        return dataclasses.replace(verdict, text=f"{verdict.text}; {JUDGED_HERE}")
    if ASCENDING.index(verdict.verdict) <= ASCENDING.index(record.gate.verdict):
        return verdict
    text = f"sent as {record.gate.verdict}: {record.gate.text}; by what came with it: {verdict.text}"
    return Gate(record.gate.verdict, record.gate.reason, text, verdict.evidence)


def _verdict(whole: Record, number: int, beside: Beside) -> Gate:
    record = whole.models()[number]
    if record.job.method == method.reference() and record.job.device != "sim":
        return judge(record, record)
    reference = _reference(record, beside.runs)
    if reference is None:
        verdict = _by_twin(record, beside)
    elif record.job.workload.dropout and not _drops_alike(record.job.method):
        undropped = _reference(_with(record, dropout=0.0), beside.runs)
        if undropped is None:
            return Gate("untested", "no-reference", "no record of the reference without dropout came with it")
        verdict = judge(record, reference, undropped=undropped)
    else:
        verdict = judge(record, reference)
    if needs_no_probe(verdict, whole):
        return verdict
    trials, named = tuple(_trials(whole, number, beside.probes)), whole.gate.evidence.get("probe")
    if verdict.passed and named and len(trials) < len(named):
        rests = {**verdict.evidence, "probe": {trial.dtype: trial.record.key for trial in trials}}
        text = f"{len(trials)} of the {len(named)} probes that its verdict names came with it; {verdict.text}"
        return Gate("untested", "probe", text, rests)
    return with_probe(verdict, record, Probe(trials, "" if trials else "no probe came with it"))


def _reference(record: Record, among: Sequence[Record]) -> Record | None:
    """Return the newest record of the reference with the same workload and steps on the same device; None if there is
    none. For a record on sim the device is the CPU, whose kernels sim uses."""
    job, device = record.job, evidence.kernels(record)[0]
    wanted = (method.reference(), job.workload, job.steps, device)
    return _newest(
        other
        for other in among
        if (other.job.method, other.job.workload, other.job.steps, other.job.device) == wanted
    )


def _newest(records: Iterator[Record]) -> Record | None:
    """Return the newest record of a training that ended with status ok; None if there is none."""
    return max((each for each in records if each.status == "ok"), key=lambda each: each.started, default=None)


def _with(record: Record, **changes: float | str) -> Record:
    workload = dataclasses.replace(record.job.workload, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(record, job=dataclasses.replace(record.job, workload=workload))


def _drops_alike(name: str) -> bool:
    return name in method.names() and method.load(name).drops_alike


def _by_twin(record: Record, beside: Beside) -> Gate:
    key = record.gate.evidence.get("twin")
    own = (each for each in beside.runs if each.key == key and each.job.method == record.job.method)
    twin = _newest(own)
    reference = twin and _reference(twin, beside.runs)
    if twin is None or reference is None:
        return Gate("untested", "no-reference", "no record of the reference came with it")
    same = ("workload", "steps", "device")
    peers = [
        other
        for other in beside.runs
        if other.job.method != record.job.method
        and other.status == "ok"
        and other.gate.passed
        and all(getattr(other.job, name) == getattr(record.job, name) for name in same)
    ]
    return judge(record, twins=(twin, reference), peers=peers)


def _trials(whole: Record, number: int, probes: Sequence[Record]) -> Iterator[Trial]:
    """Yield the trials of the run's probe, fp32 first, each with all trainings that it is compared with. A probe counts
    only if it was trained by the same source code as the run."""
    named = whole.gate.evidence.get("probe")
    for dtype, key in (
        sorted(named.items(), key=lambda pair: pair[0] != "fp32") if isinstance(named, dict) else ()
    ):
        trained = _newest(each for each in probes if each.key == key and _is_probe_of(whole, each, dtype))
        if trained is None:
            continue
        record = trained.models()[min(number, len(trained.others))]
        reference = _reference(record, probes)
        if reference is None:
            continue
        if evidence.is_same(record, reference):
            yield Trial(record, reference)
            continue
        others = tuple(
            model
            for each in probes
            if each.job.method == ROUNDED
            and (each.job.workload, each.job.steps, each.job.device)
            == (reference.job.workload, reference.job.steps, reference.job.device)
            for model in each.models()
        )
        if others:
            yield Trial(record, reference, others)


def _is_probe_of(whole: Record, probe: Record, dtype: str) -> bool:
    source, load = whole.software.get("source"), probe.job.workload
    is_of_method = (probe.job.method, load.dtype) == (whole.job.method, dtype) and load.learning_rate in RATES
    return is_of_method and source is not None and probe.software.get("source") == source
