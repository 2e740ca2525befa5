"""Judges a record that others sent in, by the records sent with it, because nothing can be run again on their machine.

The record's reference, twin and probe are looked for among these records. The verdict that the record brings is not
trusted to be good: it tells which twin and which probes to look for, and the new verdict is never better than it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.job import Job
from harness.core.record import Gate, Record
from harness.gate import evidence
from harness.gate.court import is_peer, judge_run, model_of, reference_of
from harness.gate.evidence import Trial
from harness.gate.probe import RATES, ROUNDED, Probe
from harness.gate.verdict import VERDICTS_BY_SEVERITY

JUDGED_HERE_TEXT = "judged here, not by the sender"


@dataclass(frozen=True)
class Archive:
    """The records that were sent together. `runs`: records of jobs. `probes`: records of the trainings of the gate's
    probes."""

    runs: Sequence[Record]
    probes: Sequence[Record]
    folders: tuple[Path, ...] = ()

    def judge(self, record: Record) -> Gate:
        """Judge a record by the records that were sent with it, and return the verdict.

        It is not better than the verdict that the record brings: what made that one worse, such as a probe, may not
        have come with it. A record whose call ended before the gate judged it brings none, nor does one whose verdict
        was removed; nothing tells these apart, so the verdict says whose it is. Raises ValueError if the record has
        values that cannot be judged.
        """
        if record.status != "ok":
            return Gate()
        try:
            verdict = judge_run(record, self)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            # some fields may hold any JSON value
            message = f"expected a record that can be judged, got {type(error).__name__}: {error}"
            raise ValueError(message) from error
        if not record.is_judged:
            return dataclasses.replace(verdict, text=f"{verdict.text}; {JUDGED_HERE_TEXT}")
        sent_verdict = record.gate
        if VERDICTS_BY_SEVERITY.index(verdict.verdict) >= VERDICTS_BY_SEVERITY.index(sent_verdict.verdict):
            return verdict
        text = f"sent as {sent_verdict.verdict}: {sent_verdict.text}; by what came with it: {verdict.text}"
        return Gate(sent_verdict.verdict, sent_verdict.reason, text, verdict.evidence)

    def needed_record(self, job: Job) -> Record | None:
        return _newest_ended(_trainings_like(job, self.runs))

    def twins(self, whole: Record, number: int, reference: Job, most: int) -> tuple[Record, Record] | Gate:
        """Return the twin that the run's verdict names, and its reference, at whatever depth they have."""
        key = whole.gate.evidence.get("twin")
        twins = (run for run in self.runs if run.key == key and run.job.method == whole.job.method)
        twin = _newest_ended(twins)
        model = twin and model_of(twin, number)
        twin_reference = model and self.needed_record(reference_of(model.job))
        if model is None or twin_reference is None:
            return Gate("untested", "no-reference", "no record of the reference came with it")
        return model, twin_reference

    def peers(self, job: Job) -> list[Record]:
        return [run for run in self.runs if is_peer(run, job)]

    def probe(self, whole: Record, number: int) -> Probe:
        """Return the probes that the run's verdict names, fp32 first."""
        key_by_dtype = whole.gate.evidence.get("probe")
        trials: tuple[Trial, ...] = ()
        if isinstance(key_by_dtype, dict):
            trials = tuple(self._trials(whole, number, key_by_dtype))
        untested, missing = "" if trials else "no probe came with it", ""
        if key_by_dtype and len(trials) < len(key_by_dtype):
            missing = f"{len(trials)} of the {len(key_by_dtype)} probes that its verdict names came with it"
        return Probe(trials, untested, missing=missing)

    def _trials(self, whole: Record, number: int, key_by_dtype: dict[str, str]) -> Iterator[Trial]:
        """Yield the trials of the run's probe, each with all trainings that it is compared with. A probe counts only if
        it was trained by the same source code as the run."""
        for dtype, key in sorted(key_by_dtype.items(), key=lambda pair: pair[0] != "fp32"):
            probes = (
                probe for probe in self.probes if probe.key == key and _is_probe_of(whole, probe, dtype)
            )
            newest_probe = _newest_ended(probes)
            if newest_probe is None:
                continue
            record = model_of(newest_probe, number)
            reference = _newest_ended(_trainings_like(reference_of(record.job), self.probes))
            if reference is None:
                continue
            if evidence.is_bit_equal(record, reference):
                yield Trial(record, reference)
                continue
            rounded_job = dataclasses.replace(reference.job, method=ROUNDED)
            others: list[Record] = []
            for training in _trainings_like(rounded_job, self.probes):
                others += training.models()
            if others:
                yield Trial(record, reference, tuple(others))


def _trainings_like(job: Job, records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records of trainings with the same method, workload, steps and device as the job."""
    for record in records:
        other = record.job
        is_alike = (other.method, other.workload) == (job.method, job.workload)
        if is_alike and (other.steps, other.device) == (job.steps, job.device):
            yield record


def _newest_ended(records: Iterable[Record]) -> Record | None:
    """Return the newest record of a training that ended with status ok; None if there is none."""
    ended_ok = (record for record in records if record.status == "ok")
    return max(ended_ok, key=lambda record: record.started, default=None)


def _is_probe_of(whole: Record, probe: Record, dtype: str) -> bool:
    source, load = whole.software.get("source"), probe.job.workload
    is_of_method = (probe.job.method, load.dtype) == (whole.job.method, dtype) and load.learning_rate in RATES
    return is_of_method and source is not None and probe.software.get("source") == source
