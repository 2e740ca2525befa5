"""Runs many jobs in order, and judges each of them.

A job that has a record is not run again. Each run writes its record when it ends, so a crash loses no earlier record.
The gate's reference is a job like any other: it runs if it has no record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.base.counted import counted
from harness.base.whole_file import own_folder
from harness.core import log_lines, method
from harness.core.failures import Failure
from harness.core.job import Budget, Job, Plan, Workload
from harness.core.record import Gate, Record, new_stem, read_all
from harness.devices import device_lock, machine
from harness.devices.room import room_of
from harness.gate import probe
from harness.gate.probe import LEFT_OUT, MOST_STEPS, NONE, STEPS, Extent, Probe, train_probe
from harness.gate.verdict import judge, needs_no_probe, together, unasked, with_probe
from harness.models import weight_files
from harness.plan.fit import Planned, largest, resolve
from harness.plan.run_time import probe_seconds, run_seconds
from harness.run.launch import Report, launch
from harness.run.place import Place, marked, write_end
from harness.run.prepare import prepare

PROBES = Extent()  # the extent of the gate's probes, unless the caller gives another
SHARERS = 4  # a run may share a device with other runs if it needs at most 1/SHARERS of the machine's memory


class FolderLost(Exception):
    """The folder of results was removed or closed while jobs ran; the text names the folder."""


class Sweep:
    """Runs jobs and adds their records to a folder of results."""

    def __init__(
        self,
        results: Path,
        folders: tuple[Path, ...] = (),
        report: Report | None = None,
        rerun: bool = False,
        place: Place | None = None,
        probe: Extent | None = None,
        is_timed: bool = True,
    ) -> None:
        """`probe`: extent of the gate's probe; None: PROBES. `is_timed`: False if the caller does not need the speed of
        the jobs, so they may share the device with other runs."""
        self.results, self.rerun, self.place = results, rerun, place
        self.folders = folders or tuple(method.REGISTRY.added)
        self.report = report or (lambda event: None)
        self.extent = PROBES if probe is None else probe
        self._probe_records: Sweep | None = None
        found, complaints = read_all(results)
        self.is_timed = is_timed
        self.timed_keys: set[str] = set()  # keys of the jobs that the call asked for
        self.records = {path: record for path, record in found.items() if record.origin == "run"}
        self.plans: list[
            tuple[Job, Planned]
        ] = []  # the jobs of this call, each before and after it was planned
        self.measured_now: set[str] = set()
        self.replaced = set(self.records) if rerun else set()
        for complaint in complaints:
            self.report({"event": "warning", "text": complaint})

    def run(self, plans: Sequence[Planned]) -> list[Record]:
        """Return the judged records of the planned jobs, in order; run a job that has no record. Raises FolderLost."""
        self.plans += [(planned.job, planned) for planned in plans]
        with self._in_its_folder():
            if self.place and self.place.is_parallel:
                self._launch_at_once(self.place, plans)
                self._launch_at_once(self.place, self._references(plans))
            total = len(plans)
            self.timed_keys |= {self.key(planned.job) for planned in plans} if self.is_timed else set()
            return [
                self._asked_for(planned, {"index": number, "total": total})
                for number, planned in enumerate(plans, start=1)
            ]

    def _asked_for(self, planned: Planned, place: dict[str, Any]) -> Record:
        """Return the judged record of a job that the call asked for. Its code may have changed since the call began."""
        self.timed_keys |= {self.key(planned.job)} if self.is_timed else set()
        return self._end(self._measure(planned, place))

    def attempt(self, planned: Planned, number: int, place: dict[str, Any]) -> Record:
        """Return the record of measurement `number` of a planned job, judged. If the folder has fewer measurements of
        the job, run the job now, even if its plan does not fit. A refusal by plan does not count as a measurement.
        Raises FolderLost."""
        with self._in_its_folder():
            self.timed_keys.add(self.key(planned.job))
            return self._end(self._tried(planned, number, place))

    def _tried(self, planned: Planned, number: int, place: dict[str, Any]) -> Path:
        """Return the path of measurement `number` of a job. Run a missing one, even if its plan does not fit."""
        job, plan, _ = planned
        key = self.key(job)
        known = [path for path, record in self.records.items() if record.key == key and record.is_lasting]
        known = [path for path in known if self.records[path].phase != "plan" and path not in self.replaced]
        if len(known) >= number:
            self.report({"event": "recorded", "path": str(known[number - 1]), "job": job, **place})
            return known[number - 1]
        self.report({"event": "start", "job": job, "plan": plan, **place})
        return self._launch(job, key, plan)

    @contextlib.contextmanager
    def _in_its_folder(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a record cannot be written, or is missing
            if os.access(self.results, os.R_OK | os.W_OK | os.X_OK):
                raise
            told = f"expected a folder of results to write to, got {self.results} removed or closed while a job ran"
            raise FolderLost(f"{told}, and its record is lost; try again with another --results") from error

    def _end(self, path: Path) -> Record:
        record = self._judge(path)
        self.report({"event": "end", "path": str(path), "record": record})
        return record

    def key(self, job: Job) -> str:
        found = context(job.method, read_by(job), self.folders) | identity(job, self.folders)
        return job.key(**{**found, **(self.place.context() if self.place else {})})

    def _planned(self, job: Job) -> Planned:
        """Return the planned job. A job is planned once in a call."""
        for known, planned in self.plans:
            if known == job:
                return planned
        planned = resolve(job, self.folders)
        self.plans.append((job, planned))
        return planned

    def _launch_at_once(self, place: Place, plans: Sequence[Planned]) -> None:
        """Run at once all jobs that have no record and whose plans fit. Leave a single such job to run()."""
        missing = {self.key(job): job for job, _, shortfall in plans if shortfall is None}
        pairs = [(job, key) for key, job in missing.items() if not self._known(key)]
        if len(pairs) < 2:
            return
        self.measured_now |= {key for _, key in pairs}
        for path in marked(place.launch(pairs, self.results, self.folders, self.report), pairs, self.key):
            self.records[path] = Record.read(path)

    def _references(self, plans: Sequence[Planned]) -> list[Planned]:
        """Return the references of those jobs that trained to the end."""
        trained = [self.records[path] for job, _, _ in plans for path in self._known(self.key(job))]
        models = [model for record in trained if record.status == "ok" for model in record.models()]
        return [self._planned(self._reference(model.job)) for model in models]

    def _known(self, key: str) -> list[Path]:
        """Return the paths of the records with this key, oldest first. A record made by this call counts even if its
        run failed, because no job runs twice in a call."""
        fresh = key in self.measured_now
        if self.rerun and not fresh:
            return []
        return [
            path
            for path, record in self.records.items()
            if record.key == key and (record.is_lasting or fresh)
        ]

    def _answers(self, record: Record, job: Job) -> bool:
        return record.answers(job) and (record.is_timed or record.key not in self.timed_keys)

    def _measure(self, planned: Planned, place: dict[str, Any]) -> Path:
        """Return the path of the job's newest result. If there is none, run the job, or refuse it by its plan."""
        job, plan, shortfall = planned
        key = self.key(job)
        known = [path for path in self._known(key) if self._answers(self.records[path], job)]
        if known and self.records[known[-1]].phase == "plan" and shortfall is None:
            known = []  # the plan did not fit when that record was made, but fits now
        if known:
            self.report({"event": "recorded", "path": str(known[-1]), "job": job, **place})
            return known[-1]
        foreseen = self._foreseen(job, plan, is_asked_for="index" in place) if not shortfall else {}
        self.report({"event": "start", "job": job, "plan": plan, **place, **foreseen})
        return self._refuse(job, key, shortfall) if shortfall else self._launch(job, key, plan)

    def _foreseen(self, job: Job, plan: Plan, is_asked_for: bool) -> dict[str, Any]:
        """Return what the progress lines foretell: the seconds of the job's own run, the seconds with its missing
        reference and probe included, whether a reference will run, and the probe's duration divided by the run's. For a
        job that the call did not ask for, such as a reference, return only the seconds of its own run."""
        run = run_seconds(job, plan, room_of(job).rates)
        if not is_asked_for:
            return {"run_seconds": run}
        other = self._reference(job)
        is_own = other.method == job.method and other.device == job.device
        runs = 1 if is_own or self._known(self.key(self._planned(other).job)) else 2
        probe = self.probe_seconds(job, run)
        seconds = device_lock.wait_seconds(job) + runs * run + probe
        return {
            "run_seconds": run,
            "foreseen_seconds": seconds,
            "has_reference": runs == 2,
            "probe_runs": probe / run,
        }

    def probe_seconds(self, job: Job, run: float) -> float:
        """Return the seconds of the probe that the verdict still needs, or 0. `run`: seconds of the job's run."""
        there = (job.method, job.workload.dtype, job.device)
        for record in self.records.values():
            known = (record.job.method, record.job.workload.dtype, record.job.device)
            layers = min(self.extent.layers, job.workload.num_layers)
            if known == there and _probed(record) == _probed(record).or_more(
                self.extent._replace(layers=layers)
            ):
                return 0.0
        return probe_seconds(job, run, method.load(job.method, self.folders), self.extent)

    def _launch(self, job: Job, key: str, plan: Plan) -> Path:
        self.measured_now.add(key)
        if self.place:
            keyed = [(job, key)]
            (path,) = marked(
                self.place.launch(keyed, self.results, self.folders, self.report), keyed, self.key
            )
        else:
            prepare(job, self.results, self.folders, self.report)
            needed = plan.device_bytes + plan.host_bytes
            is_timed = key in self.timed_keys or needed > machine.host_bytes() / SHARERS
            path = launch(
                job,
                partial(self.key, job),
                self.results,
                self.folders,
                self.report,
                lambda now: self._made_meanwhile(job, now),
                is_timed=is_timed,
                foreseen_seconds=run_seconds(job, plan, room_of(job).rates),
            )
        self.records[path] = record = Record.read(path)
        self.measured_now.add(record.key)  # the key that the job had when it was its turn
        return path

    def _made_meanwhile(self, job: Job, key: str) -> Path | None:
        """Return the path of a result that another call wrote after this call read the folder; None: no such result."""
        if self.rerun:
            return None
        for path in sorted(set(self.results.glob("log_*.json")) - set(self.records)):
            with contextlib.suppress(ValueError):
                record = Record.read(path)
                if record.key == key and record.is_lasting and self._answers(record, job):
                    return path
        return None

    def _refuse(self, job: Job, key: str, shortfall: str) -> Path:
        self.measured_now.add(key)
        stem = new_stem(self.results, job)
        Path(f"{stem}.txt").write_text("".join(f"{line}\n" for line in log_lines.header_lines(job)))
        here = {**machine.facts(), **machine.kernel_environment()}
        seen = {"phase": "plan", "machine": here, "software": machine.software()}
        path = write_end(job, key, stem, Failure("does-not-fit", shortfall), seen)
        self.records[path] = Record.read(path)
        return path

    def _judge(self, path: Path) -> Record:
        """Return the record with a new verdict, by the present reference. A verdict is arithmetic on records."""
        record = self.records[path]
        if record.status != "ok":
            return record
        verdict = unasked(record) or together(
            [self._verdict(record, n) for n in range(1 + len(record.others))]
        )
        record = dataclasses.replace(record, gate=verdict)
        record.write(path)
        self.records[path] = record
        return record

    def _verdict(self, whole: Record, number: int) -> Gate:
        """Return the verdict on model `number` of a record."""
        record = whole.models()[number]
        other = self._reference(record.job)
        if record.job.method == other.method and record.job.device == other.device:
            return judge(record, record)
        planned = self._planned(other)
        if planned.shortfall is not None:
            return self._judge_by_twin(whole, number, other)
        judged_by = self._judge(self._measure(planned, {"role": "reference"}))
        depth = record.job.workload.num_layers
        if judged_by.status.startswith("oom") and depth > 1:
            # the reference did not fit, although its plan did
            return self._judge_by_twin(whole, number, other, most=depth // 2)
        undropped = None
        if record.job.workload.dropout and not method.load(record.job.method, self.folders).drops_alike:
            load = dataclasses.replace(other.workload, dropout=0.0)
            without = self._planned(dataclasses.replace(other, workload=load))
            undropped = self.records[self._measure(without, {"role": "reference"})]
        return self._with_probe(whole, number, judge(record, judged_by, undropped=undropped))

    def _reference(self, job: Job) -> Job:
        """Return the job of the reference method whose training this job's training is compared with."""
        other = dataclasses.replace(
            job, method=method.reference(self.folders), options={}, trace=None, save=None
        )
        if job.device == "sim":  # sim uses the CPU's kernels, so the reference trains on the CPU
            return dataclasses.replace(other, device="cpu", budget=Budget())
        return other

    def _judge_by_twin(self, whole: Record, number: int, reference: Job, most: int = 2**20) -> Gate:
        depth = min(most, self._most_layers(reference))
        if depth < 1:
            return Gate("untested", "no-reference", "the reference does not fit at any depth")
        twins = []
        for job in (whole.job, reference):
            try:
                small = self._planned(self._twin(job, depth))
            except ValueError as error:
                return Gate("untested", "no-twin", f"no twin at {counted(depth, 'layer')}: {error}")
            twins.append(self.records[self._measure(small, {"role": "twin"})])
        record, twin = whole.models()[number], twins[0].models()[min(number, len(twins[0].others))]
        peers = [other for other in self.records.values() if self._is_peer(other, record.job)]
        return self._with_probe(whole, number, judge(record, twins=(twin, twins[1]), peers=peers))

    def _twin(self, job: Job, depth: int) -> Job:
        """Return the same job with `depth` layers, so that the same code trains it."""
        options = method.create(job.method, job.options, self.folders).twin_options(
            job.workload.num_layers, depth
        )
        return dataclasses.replace(
            job, workload=job.workload.at_depth(depth), options=options, trace=None, save=None
        )

    def _most_layers(self, reference: Job) -> int:
        trained = method.create(reference.method, {}, self.folders)
        return largest(trained, reference, room_of(reference))

    def _with_probe(self, whole: Record, number: int, verdict: Gate) -> Gate:
        """Return the verdict on a run, combined with the verdict on a probe. If a probe cannot change the verdict,
        return it as it is."""
        if needs_no_probe(verdict, whole):
            return verdict
        extent = self.extent.or_more(_probed(whole))  # not less than the extent of an earlier verdict
        left_out = Probe(untested=LEFT_OUT)
        # A search also runs jobs whose plans do not fit. If such a job trained, its plan asked for too much, and the
        # plan of its probe does, too: the probe runs even if its plan does not fit.
        beyond = whole.job.method if self._planned(whole.job).shortfall else None
        found = train_probe(whole.job, number, extent, self._probe_runs(beyond)) if extent else left_out
        return with_probe(verdict, whole.models()[number], found)

    def _probe_runs(self, beyond: str | None = None) -> probe.Runs:
        """Return the functions by which a probe runs its jobs. `beyond`: a method whose jobs run even if their plans do
        not fit; None: no such method."""
        if self._probe_records is None:
            folder, folders = own_folder(self.results / probe.FOLDER), (*self.folders, probe.METHODS)
            self._probe_records = Sweep(
                folder, folders, self._report_probe, place=self.place, probe=NONE, is_timed=False
            )
        records = self._probe_records

        def measure(job: Job) -> Record:
            planned, role = records._planned(job), {"role": "probe"}
            if job.method == beyond:
                return records.records[records._tried(planned, 1, role)]
            return records.records[records._measure(planned, role)]

        def why_not(job: Job) -> str | None:
            return None if job.method == beyond else records._planned(job).shortfall

        return probe.Runs(measure, self._reference, self._most_layers, why_not, self._twin)

    def _report_probe(self, event: dict[str, Any]) -> None:
        """Report the start and the end of each training of a probe, but not its steps."""
        if event["event"] not in ("recorded", "step"):
            self.report(event)

    def _is_peer(self, other: Record, job: Job) -> bool:
        """True if `other` is another method's passing record of this training, by the present source and machine."""
        same = all(getattr(other.job, name) == getattr(job, name) for name in ("workload", "steps", "device"))
        is_another = other.job.method != job.method and other.job.method in method.names(self.folders)
        passed = other.status == "ok" and other.gate.passed
        return same and is_another and passed and other.key == self.key(other.job)


def _probed(record: Record) -> Extent:
    """Return the extent of the probe on which the record's verdict rests; NONE if there was none."""
    found = record.gate.evidence
    layers, steps = found.get("probe_layers"), found.get("probe_steps")
    is_full = bool(found.get("probe_is_full"))
    return Extent(layers, min(max(STEPS, steps), MOST_STEPS), is_full) if layers and steps else NONE


def read_by(job: Job) -> tuple[Workload, int] | None:
    """Return the workload and the number of samples of a job that reads a corpus or weights from files; else None."""
    load = job.workload
    return None if load.corpus is load.weights is None else (load, job.steps * load.batch_size)


def identity(job: Job, folders: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return the facts that a job's key contains because of its method's options, such as the hash of an archive."""
    return method.create(job.method, job.options, folders).identity()


def context(name: str, files: tuple[Workload, int] | None, folders: tuple[Path, ...] = ()) -> dict[str, str]:
    """Return the facts on which a measurement depends beside its job, so that a changed file changes the job's key. The
    facts are a hash of the source of the method `name`, hashes of the files that the job reads, and facts of this
    machine. `files`: what read_by() returns for the job."""
    found = {"source": method.source_hash(name, folders), "corpus": "", **machine.checked()}
    load, num_samples = files or (None, 0)
    if load and load.corpus is not None:
        from harness.core.data import corpus_hash

        found["corpus"] = corpus_hash(load, num_samples)
    if load and load.weights is not None:
        found["weights"] = weight_files.files_hash(load.weights)
    return found
