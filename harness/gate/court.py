"""The court: judges a run by the records that it needs.

These are the reference's record or, where the reference does not fit, twins' and peers' records; the reference's
without dropout, for a method that drops other elements; and the probe's. The court asks its Witnesses for them. A sweep
trains what has no record yet (harness/jobs/sweep.py). An archive only looks among the records that were sent together
(archive.py).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from harness.base.console import counted
from harness.core import method
from harness.core.job import MOST_LAYERS, Budget, Job, Workload
from harness.core.record import Gate, Record
from harness.gate import departures, probe
from harness.gate.evidence import Trial, is_bit_equal, promises_bits, scale_difference_text
from harness.gate.probe import Extent, Probe
from harness.gate.verdict import combine_verdicts, judge, judge_models, needs_no_probe, with_probe


class Witnesses(Protocol):
    """Gives the records on which a verdict rests. `folders`: further folders of methods."""

    @property
    def folders(self) -> tuple[Path, ...]: ...

    def needed_record(self, job: Job) -> Record | None:
        """Return the record of a job of the reference; None: it does not fit, or there is no record of it."""

    def twins(self, whole: Record, number: int, reference: Job, most: int) -> tuple[Record, Record] | Gate:
        """Return the records of the twins of model `number` and of its reference, at the largest depth at which the
        reference fits, up to `most` layers. If there are none, return the verdict."""

    def peers(self, job: Job) -> list[Record]:
        """Return the records of other methods' trainings of the same workload that passed."""

    def probe(self, whole: Record, number: int) -> Probe:
        """Return the probe of model `number` of a run."""


class Trainings(Protocol):
    """Trains the jobs that a verdict needs. `folders`: further folders of methods."""

    @property
    def folders(self) -> tuple[Path, ...]: ...

    def record_of(self, job: Job, role: str, may_exceed_plan: bool = False) -> Record:
        """Return the record of a job; train the job if it has none. `may_exceed_plan`: train it even if its plan does
        not fit."""

    def shortfall(self, job: Job) -> str | None:
        """Return, as text, the memory that the job's plan lacks; None if the plan fits. Raises ValueError if the job
        has no plan."""

    def most_layers(self, reference: Job) -> int:
        """Return the largest number of layers at which a job of the reference fits; 0 if it never fits."""


def judge_run(whole: Record, witnesses: Witnesses) -> Gate:
    """Return the verdict on a run that ended ok: the worst of the verdicts on its models."""
    models = range(1 + len(whole.others))
    return judge_models(whole) or combine_verdicts(
        [_judge_model(whole, number, witnesses) for number in models]
    )


def _judge_model(whole: Record, number: int, witnesses: Witnesses) -> Gate:
    record = whole.models()[number]
    reference_job = reference_of(record.job, witnesses.folders)
    if (record.job.method, record.job.device) == (reference_job.method, reference_job.device):
        return judge(record, record)
    reference, depth = witnesses.needed_record(reference_job), record.job.workload.num_layers
    if reference is None:
        verdict = _judge_by_twin(whole, number, reference_job, MOST_LAYERS, witnesses)
    elif reference.status.startswith("oom") and depth > 1:
        # the reference did not fit, although its plan did
        verdict = _judge_by_twin(whole, number, reference_job, depth // 2, witnesses)
    elif record.job.workload.dropout and not _drops_alike(record.job.method, witnesses.folders):
        load = dataclasses.replace(reference_job.workload, dropout=0.0)
        undropped = witnesses.needed_record(dataclasses.replace(reference_job, workload=load))
        if undropped is None:
            return Gate("untested", "no-reference", "no record of the reference without dropout came with it")
        verdict = judge(record, reference, undropped=undropped)
    else:
        verdict = judge(record, reference)
    if needs_no_probe(verdict, whole):
        return verdict
    return with_probe(verdict, record, witnesses.probe(whole, number))


def _judge_by_twin(whole: Record, number: int, reference: Job, most: int, witnesses: Witnesses) -> Gate:
    twins = witnesses.twins(whole, number, reference, most)
    if isinstance(twins, Gate):
        return twins
    record = whole.models()[number]
    return judge(record, twins=twins, peers=witnesses.peers(record.job))


def _drops_alike(name: str, folders: tuple[Path, ...]) -> bool:
    """True if the method drops the reference's elements; False for a method that is not known, as in an archive."""
    return name in method.names(folders) and method.load(name, folders).drops_alike


def reference_of(job: Job, folders: tuple[Path, ...] = ()) -> Job:
    """Return the job of the reference method whose training a job's training is compared with."""
    reference = dataclasses.replace(job, method=method.reference(folders), options={}, trace=None, save=None)
    if job.device == "sim":  # sim uses the CPU's kernels, so the reference trains on the CPU
        return dataclasses.replace(reference, device="cpu", budget=Budget())
    return reference


def is_peer(record: Record, job: Job) -> bool:
    """True if the record is another method's, of a training of the job's workload that passed."""
    has_passed = record.status == "ok" and record.gate.passed
    other = record.job
    is_same_training = (other.workload, other.steps, other.device) == (job.workload, job.steps, job.device)
    return has_passed and is_same_training and other.method != job.method


def model_of(record: Record, number: int) -> Record:
    """Return the record of model `number` of a twin or probe; of its last model, if it has fewer models."""
    return record.models()[min(number, len(record.others))]


def train_twins(
    whole: Record, number: int, reference: Job, most: int, trainings: Trainings
) -> tuple[Record, Record] | Gate:
    """Train the twins of model `number` of a run and of its reference, as Witnesses.twins() describes."""
    depth = min(most, trainings.most_layers(reference))
    if depth < 1:
        return Gate("untested", "no-reference", "the reference does not fit at any depth")
    least = min(whole.job.workload.num_layers, reference.workload.anatomy.num_layers_of_all_kinds)
    if depth < least:
        text = f"the reference fits at {counted(depth, 'layer')}, and the first {least} have one of each kind"
        return Gate("untested", "no-twin", text)
    twins = []
    for job in (whole.job, reference):
        try:
            twin = _at_depth(job, depth, trainings.folders)
            trainings.shortfall(twin)
        except ValueError as error:
            return Gate("untested", "no-twin", f"no twin at {counted(depth, 'layer')}: {error}")
        twins.append(trainings.record_of(twin, "twin"))
    return model_of(twins[0], number), twins[1]


def _at_depth(job: Job, depth: int, folders: tuple[Path, ...]) -> Job:
    """Return the same job with `depth` layers, so that the same code trains it."""
    configured_method = method.create(job.method, job.options, folders)
    options = configured_method.twin_options(job.workload.num_layers, depth)
    load = job.workload.at_depth(depth)
    return dataclasses.replace(job, workload=load, options=options, trace=None, save=None)


class NoTrial(NamedTuple):
    """The result of a probe that could not train. `reason`: a text. `is_at_run_size`: True if the probe had the size of
    the run, so that only its learning rate was different."""

    reason: str
    is_at_run_size: bool


@dataclass(frozen=True)
class ProbeTraining:
    """Trains the probe of model `number` of a job. `is_beyond_plan`: the run trained although its plan did not fit. Its
    plan asked for too much, and the plan of its probe does, too, so the probe trains even if its plan does not fit."""

    job: Job
    number: int
    extent: Extent
    trainings: Trainings
    is_beyond_plan: bool = False

    def train(self) -> Probe:
        """Return the probe. In half precision it is repeated in fp32, unless it gives the very bits of the
        reference."""
        trial = self._trial(self.job.workload.dtype)
        trials, untested = ([trial], "") if isinstance(trial, Trial) else ([], trial.reason)
        refused = trial.reason if isinstance(trial, NoTrial) and trial.is_at_run_size else ""
        has_bits = isinstance(trial, Trial) and is_bit_equal(trial.record, trial.reference)
        if self.job.workload.dtype != "fp32" and not has_bits:
            fp32_trial = self._trial("fp32")
            if isinstance(fp32_trial, Trial):
                trials.insert(0, fp32_trial)
            else:
                untested = "; ".join(filter(None, (untested, fp32_trial.reason)))
        return Probe(tuple(trials), untested, refused)

    def _trial(self, dtype: str) -> Trial | NoTrial:
        """Return the trial at the probe's size. If the method does not train at that size, return the trial at the
        smallest size or, if it does not train there either, at the job's. A trial that cannot be made gives a
        NoTrial."""
        load = self.job.workload
        for sizes in dict.fromkeys((probe.sized(self.job, self.extent), probe.capped(load), load)):
            trial = self._trial_of(probe.workload(sizes, dtype, self.extent.steps))
            if isinstance(trial, Trial) and trial.record.status == "ok":
                break
        return trial

    def _trial_of(self, load: Workload) -> Trial | NoTrial:
        """Return the trial at the sizes of `load`, or a NoTrial with the reason why there is none."""
        probed = dataclasses.replace(
            self.job, workload=load, steps=self.extent.steps, warmup=0, budget=self._budget()
        )
        probe_job, depth, reason = self._deep_enough(dataclasses.replace(probed, trace=None, save=None))
        if reason:
            whole = self.job.workload
            is_at_run_size = (depth, load.batch_size) == (whole.num_layers, whole.batch_size)
            return NoTrial(f"no probe in {load.dtype}: {reason}", is_at_run_size)
        record = model_of(self.trainings.record_of(probe_job, "probe", self.is_beyond_plan), self.number)
        reference_job = reference_of(record.job, self.trainings.folders)
        trial = Trial(record, self.trainings.record_of(reference_job, "probe"))
        if record.status != "ok" or trial.reference.status != "ok" or is_bit_equal(record, trial.reference):
            return trial
        for names in probe.roundings_of(load.dtype):
            budget = Budget(seconds=probe_job.budget.seconds)
            rounded = dataclasses.replace(probe.rounding(reference_job, names), budget=budget)
            models = self.trainings.record_of(rounded, "probe").models()
            trial = trial._replace(others=(*trial.others, *models))
            if load.loss_scale_window and not promises_bits(record) and skips_differ(trial):
                return self._trial_of(dataclasses.replace(load, loss_scale_window=None))
            if departures.trial_departure(trial) is None:
                break
        return trial

    def _budget(self) -> Budget:
        """Return a budget that gives each step of the probe as much time as a step of the job has. A simulated slow
        link is left out, because it does not change the training."""
        job, steps = self.job, self.extent.steps
        budget = job.budget
        if job.device == "sim":
            budget = dataclasses.replace(budget, link_bytes_per_second=None)
        if budget.seconds and job.steps < steps:
            return dataclasses.replace(budget, seconds=math.ceil(budget.seconds * steps / job.steps))
        return budget

    def _deep_enough(self, job: Job) -> tuple[Job, int, str]:
        """Double the probe's number of layers until the method can train the job with it. Return the job, its number of
        layers, and an empty text or, if no number works, the reason."""
        reference = reference_of(job, self.trainings.folders)
        most_layers = min(job.workload.num_layers, self.trainings.most_layers(reference))
        depth = min(most_layers, probe.depth_of(job.workload, self.extent))
        reason = "the reference does not fit at any depth"
        while depth >= 1:
            try:
                deeper_job = _at_depth(job, depth, self.trainings.folders)
                reason = "" if self.is_beyond_plan else self.trainings.shortfall(deeper_job) or ""
                if not reason:
                    return deeper_job, depth, ""
            except ValueError as error:  # the method has no model with so few layers
                reason = str(error)
            if depth == most_layers:
                break
            depth = min(2 * depth, most_layers)
        return job, depth, reason


def skips_differ(trial: Trial) -> bool:
    """True if a rounding, or an engine's own rule of the scale, decides whether a step overflows: then the trainings
    skip different steps, so that their distance is no measure of rounding. A method that promises the reference's bits
    needs no such measure."""
    return any(scale_difference_text(record, trial.reference) for record in (trial.record, *trial.others))
