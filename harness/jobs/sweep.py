"""Runs many jobs in order, and judges each of them.

A job that has a record is not run again. Each run writes its record when it ends, so a crash loses no earlier record.
The gate's reference is a job like any other: it runs if it has no record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from harness.base.json_object import JsonObject
from harness.base.whole_file import own_folder
from harness.core import log_lines, method
from harness.core.failures import Failure
from harness.core.job import Job, Plan
from harness.core.record import Gate, Record, new_stem, read_all
from harness.devices import device_lock, machine
from harness.devices.room import room_of
from harness.gate import probe
from harness.gate.court import ProbeTraining, is_peer, judge_run, reference_of, train_twins
from harness.gate.probe import LEFT_OUT, Extent, Probe, extent_beneath
from harness.jobs.job_key import files_read_by, method_context, method_identity
from harness.plan.fit import Planned, most_layers, resolve
from harness.plan.run_time import probe_seconds, run_seconds
from harness.run.launch import Report, launch
from harness.run.place import OrderedJob, Place, mark_changed_keys
from harness.run.prepare import prepare

DEFAULT_EXTENT = Extent()  # the extent of the gate's probes, unless the caller gives another
# A run may share a device with other runs if it needs at most 1/MOST_SHARERS of the machine's memory.
MOST_SHARERS = 4

# Returns what the event of a job's start foretells, such as the seconds of its run.
Foretell = Callable[[Job, Plan], JsonObject]


class FolderLost(Exception):
    """The folder of results was removed or closed while jobs ran; the text names the folder."""


class Store:
    """The records of one folder, and the runs that add to them. A job that has a record is not run again."""

    def __init__(
        self,
        results: Path,
        folders: tuple[Path, ...],
        report: Report,
        place: Place | None = None,
        rerun: bool = False,
    ) -> None:
        self.results, self.folders, self.report = results, folders, report
        self.place, self.rerun = place, rerun
        self.timed_keys: set[str] = set()  # keys of the jobs whose speed the caller needs
        self.measured_keys: set[str] = set()  # keys of the jobs that this call has run or refused
        # the jobs of this call, each before and after it was planned
        self.plans: list[tuple[Job, Planned]] = []
        records, complaints = read_all(results)
        self.records = {path: record for path, record in records.items() if record.origin == "run"}
        self.old_paths = set(self.records) if rerun else set()  # records that this call measures again
        for complaint in complaints:
            self.report({"event": "warning", "text": complaint})

    def key(self, job: Job) -> str:
        facts = method_context(job.method, files_read_by(job), self.folders) | method_identity(
            job, self.folders
        )
        place_facts = self.place.context() if self.place else {}
        return job.key(**{**facts, **place_facts})

    def paths_with_key(self, key: str) -> list[Path]:
        """Return the paths of the records with this key, oldest first. A record made by this call counts even if its
        run failed, because no job runs twice in a call."""
        is_of_this_call = key in self.measured_keys
        if self.rerun and not is_of_this_call:
            return []
        paths = []
        for path, record in self.records.items():
            if record.key == key and (record.is_lasting or is_of_this_call):
                paths.append(path)
        return paths

    def planned(self, job: Job) -> Planned:
        """Return the planned job. A job is planned once in a call. Raises ValueError if the job has no plan."""
        for unplanned_job, planned in self.plans:
            if unplanned_job == job:
                return planned
        planned = resolve(job, self.folders)
        self.plans.append((job, planned))
        return planned

    def shortfall(self, job: Job) -> str | None:
        return self.planned(job).shortfall

    def most_layers(self, reference: Job) -> int:
        """Return the largest number of layers at which a job of the reference fits; 0 if it never fits."""
        return most_layers(reference, room_of(reference), self.folders)

    def record_of(self, job: Job, role: str, may_exceed_plan: bool = False) -> Record:
        """Return the record of a job that a verdict needs; run the job if it has none. `may_exceed_plan`: run it even
        if its plan does not fit."""
        planned, label = self.planned(job), {"role": role}
        path = self.attempt(planned, 1, label) if may_exceed_plan else self.measure(planned, label)
        return self.records[path]

    def measure(self, planned: Planned, label: JsonObject, foretell: Foretell | None = None) -> Path:
        """Return the path of the job's newest result. If there is none, run the job, or refuse it by its plan.
        `label`: the job's number or role, for events. `foretell`: None: the start foretells the seconds of the run."""
        job, plan, shortfall = planned
        key = self.key(job)
        known_paths = [path for path in self.paths_with_key(key) if self._answers(self.records[path], job)]
        if known_paths and self.records[known_paths[-1]].phase == "plan" and shortfall is None:
            known_paths = []  # the plan did not fit when that record was made, but fits now
        if known_paths:
            self.report({"event": "recorded", "path": str(known_paths[-1]), "job": job, **label})
            return known_paths[-1]
        forecast = {} if shortfall else (foretell or _foretell_run)(job, plan)
        self.report({"event": "start", "job": job, "plan": plan, **label, **forecast})
        return self._refuse(job, key, shortfall) if shortfall else self._launch(job, key, plan)

    def attempt(self, planned: Planned, number: int, label: JsonObject) -> Path:
        """Return the path of measurement `number` of a job. Run a missing one, even if its plan does not fit. A refusal
        by plan does not count as a measurement."""
        job, plan, _ = planned
        key = self.key(job)
        known_paths = []
        for path, record in self.records.items():
            is_measurement = record.key == key and record.is_lasting and record.phase != "plan"
            if is_measurement and path not in self.old_paths:
                known_paths.append(path)
        if len(known_paths) >= number:
            self.report({"event": "recorded", "path": str(known_paths[number - 1]), "job": job, **label})
            return known_paths[number - 1]
        self.report({"event": "start", "job": job, "plan": plan, **label})
        return self._launch(job, key, plan)

    def launch_at_once(self, place: Place, plans: Sequence[Planned]) -> None:
        """Run at once all jobs that have no record and whose plans fit. Leave a single such job to measure()."""
        fitting_jobs = {self.key(job): job for job, _, shortfall in plans if shortfall is None}
        keyed_jobs = [(job, key) for key, job in fitting_jobs.items() if not self.paths_with_key(key)]
        if len(keyed_jobs) < 2:
            return
        self.measured_keys |= {key for _, key in keyed_jobs}
        new_paths = place.launch(keyed_jobs, self.results, self.folders, self.report)
        for path in mark_changed_keys(new_paths, keyed_jobs, self.key):
            self.records[path] = Record.read(path)

    def judged(self, path: Path, verdict: Gate) -> Record:
        """Write a verdict into the record in the file `path`, and return the record."""
        record = dataclasses.replace(self.records[path], gate=verdict)
        record.write(path)
        self.records[path] = record
        return record

    def _answers(self, record: Record, job: Job) -> bool:
        return record.answers(job) and (record.is_timed or record.key not in self.timed_keys)

    def _launch(self, job: Job, key: str, plan: Plan) -> Path:
        self.measured_keys.add(key)
        if self.place:
            keyed_jobs = [(job, key)]
            new_paths = self.place.launch(keyed_jobs, self.results, self.folders, self.report)
            (path,) = mark_changed_keys(new_paths, keyed_jobs, self.key)
        else:
            prepare(job, self.results, self.folders, self.report)
            needed_bytes = plan.device_bytes + plan.host_bytes
            is_timed = key in self.timed_keys or needed_bytes > machine.host_bytes() / MOST_SHARERS
            path = launch(
                job,
                partial(self.key, job),
                self.results,
                self.folders,
                self.report,
                lambda present_key: self._path_of_other_call(job, present_key),
                is_timed=is_timed,
                foreseen_seconds=run_seconds(job, plan, room_of(job).rates),
            )
        self.records[path] = record = Record.read(path)
        self.measured_keys.add(record.key)  # the key that the job had when it was its turn
        return path

    def _path_of_other_call(self, job: Job, key: str) -> Path | None:
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
        self.measured_keys.add(key)
        stem = new_stem(self.results, job)
        Path(f"{stem}.txt").write_text("".join(f"{line}\n" for line in log_lines.header_lines(job)))
        facts = {**machine.facts(), **machine.kernel_environment()}
        observations = {"phase": "plan", "machine": facts, "software": machine.software()}
        path = OrderedJob(job, key, stem).write_end(Failure("does-not-fit", shortfall), observations)
        self.records[path] = Record.read(path)
        return path


class Sweep:
    """Runs jobs, judges them, and adds their records to a folder of results. As the court's Witnesses it runs what a
    verdict needs and has no record yet."""

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
        """`probe`: extent of the gate's probe; None: DEFAULT_EXTENT. `is_timed`: False if the caller does not need
        the speed of the jobs, so they may share the device with other runs."""
        self.results, self.rerun = results, rerun
        self.folders = folders or tuple(method.REGISTRY.added_paths)
        self.report = report or (lambda event: None)
        self.extent = DEFAULT_EXTENT if probe is None else probe
        self.is_timed = is_timed
        self.store = Store(results, self.folders, self.report, place, rerun)

    @functools.cached_property
    def probe_store(self) -> Store:
        """The trainings of the gate's probes, which also find the methods that only a probe uses."""
        folder, folders = own_folder(self.results / probe.FOLDER), (*self.folders, probe.METHODS)
        return Store(folder, folders, self._report_probe, self.store.place)

    @property
    def records(self) -> dict[Path, Record]:
        return self.store.records

    def key(self, job: Job) -> str:
        return self.store.key(job)

    def run(self, plans: Sequence[Planned]) -> list[Record]:
        """Return the judged records of the planned jobs, in order; run a job that has no record. Raises FolderLost."""
        self.store.plans += [(planned.job, planned) for planned in plans]
        with self._in_its_folder():
            place = self.store.place
            if place and place.is_parallel:
                self.store.launch_at_once(place, plans)
                self.store.launch_at_once(place, self._references(plans))
            if self.is_timed:
                self.store.timed_keys |= {self.key(planned.job) for planned in plans}
            records = []
            for number, planned in enumerate(plans, start=1):
                records.append(self._run_job(planned, {"index": number, "total": len(plans)}))
            return records

    def _run_job(self, planned: Planned, label: JsonObject) -> Record:
        """Return the judged record of a job that the call asked for. Its code may have changed since the call began."""
        if self.is_timed:
            self.store.timed_keys.add(self.key(planned.job))
        return self._end(self.store.measure(planned, label, self._foretell))

    def attempt(self, planned: Planned, number: int, label: JsonObject) -> Record:
        """Return the record of measurement `number` of a planned job, judged; see Store.attempt(). Raises
        FolderLost."""
        with self._in_its_folder():
            self.store.timed_keys.add(self.key(planned.job))
            return self._end(self.store.attempt(planned, number, label))

    @contextlib.contextmanager
    def _in_its_folder(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # a record cannot be written, or is missing
            if os.access(self.results, os.R_OK | os.W_OK | os.X_OK):
                raise
            message = f"expected a folder of results to write to, got {self.results} removed or closed while a job ran"
            message += ", and its record is lost; try again with another --results"
            raise FolderLost(message) from error

    def _end(self, path: Path) -> Record:
        record = self._judge(path)
        self.report({"event": "end", "path": str(path), "record": record})
        return record

    def _judge(self, path: Path) -> Record:
        """Return the record with a new verdict, by the present reference. A verdict is arithmetic on records."""
        record = self.records[path]
        return self.store.judged(path, judge_run(record, self)) if record.status == "ok" else record

    def _references(self, plans: Sequence[Planned]) -> list[Planned]:
        """Return the references of those jobs that trained to the end."""
        references = []
        for job, _, _ in plans:
            for path in self.store.paths_with_key(self.key(job)):
                record = self.records[path]
                if record.status == "ok":
                    jobs = [reference_of(model.job, self.folders) for model in record.models()]
                    references += [self.store.planned(reference_job) for reference_job in jobs]
        return references

    def _foretell(self, job: Job, plan: Plan) -> JsonObject:
        """Return what the progress lines foretell: the seconds of the job's own run, the seconds with its missing
        reference and probe included, whether a reference will run, and the probe's duration divided by the run's."""
        own_seconds = _foretell_run(job, plan)["run_seconds"]
        reference = reference_of(job, self.folders)
        is_reference = (reference.method, reference.device) == (job.method, job.device)
        needs_none = is_reference or self.store.paths_with_key(self.key(self.store.planned(reference).job))
        num_runs = 1 if needs_none else 2
        probe_seconds = self.probe_seconds(job, own_seconds)
        return {
            "run_seconds": own_seconds,
            "foreseen_seconds": device_lock.wait_seconds(job) + num_runs * own_seconds + probe_seconds,
            "has_reference": num_runs == 2,
            "probe_runs": probe_seconds / own_seconds,
        }

    def probe_seconds(self, job: Job, job_seconds: float) -> float:
        """Return the seconds of the probe that the verdict still needs, or 0. `job_seconds`: those of the job's run."""
        needed_extent = self.extent._replace(layers=min(self.extent.layers, job.workload.num_layers))
        for record in self.records.values():
            other = record.job
            is_alike = (other.method, other.device) == (job.method, job.device)
            extent = extent_beneath(record.gate)
            has_extent = extent == extent.or_more(needed_extent)
            if is_alike and other.workload.dtype == job.workload.dtype and has_extent:
                return 0.0
        return probe_seconds(job, job_seconds, method.load(job.method, self.folders), self.extent)

    def needed_record(self, job: Job) -> Record | None:
        """Return the judged record of a job of the reference; None if its plan does not fit."""
        planned = self.store.planned(job)
        if planned.shortfall is not None:
            return None
        return self._judge(self.store.measure(planned, {"role": "reference"}))

    def twins(self, whole: Record, number: int, reference: Job, most: int) -> tuple[Record, Record] | Gate:
        return train_twins(whole, number, reference, most, self.store)

    def peers(self, job: Job) -> list[Record]:
        """Return the records of other methods' trainings that passed, by the present source and machine."""
        method_names = method.names(self.folders)
        peers = []
        for record in self.records.values():
            is_known_peer = is_peer(record, job) and record.job.method in method_names
            if is_known_peer and record.key == self.key(record.job):
                peers.append(record)
        return peers

    def probe(self, whole: Record, number: int) -> Probe:
        # not less than the extent of an earlier verdict
        extent = self.extent.or_more(extent_beneath(whole.gate))
        if not extent:
            return Probe(untested=LEFT_OUT)
        is_beyond_plan = self.store.shortfall(whole.job) is not None  # as in a search
        return ProbeTraining(whole.job, number, extent, self.probe_store, is_beyond_plan).train()

    def _report_probe(self, event: JsonObject) -> None:
        """Report the start and the end of each training of a probe, but not its steps."""
        if event["event"] not in ("recorded", "step"):
            self.report(event)


def _foretell_run(job: Job, plan: Plan) -> JsonObject:
    """Return what the progress lines foretell of a job that the call did not ask for: the seconds of its run."""
    return {"run_seconds": run_seconds(job, plan, room_of(job).rates)}
