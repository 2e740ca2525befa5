"""The verb `case`: makes the missing runs of one figure or of all, writes tables, draws figures.

Before each run, the missing runs are planned again from the records and the time left, so an interrupted call loses
nothing. If time is short, runs are chosen by the number of claims about their method, most claims first; of runs with
equal numbers, the quickest goes first. A run's time is a rough estimate from the bytes and operations of its plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases import overlap
from harness.base.console import print_table
from harness.core import method
from harness.core.job import MOST_LAYERS, Job, Plan, gib
from harness.core.record import Record, added_folders, records_of
from harness.devices.room import host_limit_bytes
from harness.gate.probe import Extent
from harness.jobs.largest_size import Probes, find
from harness.jobs.progress import reporter
from harness.jobs.sweep import Report, Sweep
from harness.plan.fit import Planned, resolve
from harness.plan.run_time import PROCESS_SECONDS, run_seconds
from papers.claims import claims
from papers.figures import case, case_files, searches
from papers.figures.point import machine_of
from papers.figures.points import current_key
from papers.figures.profile import CaseProfile

PROBES = 5  # number of runs that a search is assumed to need


@dataclass
class PlannedRun:
    """A job with its repeats, or a search for the largest size. A search's job has the largest depth whose plan
    fits."""

    cases: list[int]
    job: Job
    plan: Plan
    is_search: bool
    missing: int  # number of runs without a record yet
    is_guess: bool = False  # True: the job's size is a guess, because the search that gives it is not over
    num_claims: int = 0  # number of the cases' claims that name the job's method
    # seconds of the method's probe; counted only in the method's first run with missing records
    probe_seconds: float = 0.0
    is_taken: bool = True  # False: left out, because the time is too short

    @property
    def seconds(self) -> float:
        """Return the seconds of the missing runs, of their references and of the method's probe. Repeats of a job share
        one reference. Each run of a search needs a reference of its own."""
        job, run = self.job, run_seconds(self.job, self.plan)
        num_models = int(job.options.get("num_models", 1))
        references = self.missing if self.is_search else min(1, self.missing)
        others = references * (num_models - 1) * PROCESS_SECONDS[job.device]
        return (self.missing + references) * run + others + self.probe_seconds

    def to_dict(self) -> dict[str, str]:
        """Return a row of the table of planned runs, as text by column."""
        about = "about " if self.is_search or self.is_guess else ""
        to_run = f"{self.missing} to run" if self.missing else "recorded"
        return {
            "case": ", ".join(map(str, self.cases)),
            "method": self.job.method
            + "".join(f" {name}={value}" for name, value in self.job.options.items()),
            "layers": f"{'search, ' if self.is_search else ''}{about}{self.job.workload.num_layers}",
            "device": gib(self.plan.device_bytes),
            "host": gib(self.plan.host_bytes),
            "claims": str(self.num_claims),
            "minutes": f"{self.seconds / 60:.1f}",
            "runs": to_run if self.is_taken or not self.missing else "left out",
        }


class Campaign:
    """The runs of several cases in one profile, and their records in one folder of results."""

    def __init__(
        self,
        numbers: Sequence[int],
        used: CaseProfile,
        results: Path,
        report: Report | None = None,
        methods: Sequence[str] | None = None,
        probe: Extent | None = None,
    ) -> None:
        self.numbers, self.used, self.methods = numbers, used, methods or method.names()
        self.sweep = Sweep(results, report=report, probe=probe)
        self.told = claims.load()
        self.tried: list[tuple[Job, bool]] = []  # each job that this call tried, and True if by a search
        self.finished: list[Record] = []

    def run(self, seconds: float) -> None:
        """Make the missing runs, until none is left or the time is over."""
        end = time.monotonic() + seconds
        while True:
            points = self.points(end - time.monotonic())
            todo = [point for point in points if point.missing and point.is_taken and not point.is_guess]
            if not todo:
                return
            # Searches go first, because the sizes of other jobs depend on them. All other jobs take turns, so that the
            # repeats of a job are spread over time.
            first = min(todo, key=lambda point: (not point.is_search, -point.missing))
            done = len(self.finished)
            self._advance(first, {"index": done + 1, "total": done + len(todo)})

    def points(self, seconds: float = math.inf) -> list[PlannedRun]:
        """Return every planned run of the cases, whether it is recorded or missing.

        `is_taken` tells which runs fit into `seconds`. Runs are taken by the number of claims about their method, most
        claims first; of runs with equal numbers, the quickest is taken first.
        """
        found: list[PlannedRun] = []
        for number in self.numbers:
            its = case.load(number)
            records = case.select(number, self.used, list(self.sweep.records.values()))
            planned = {name: max(1, self.used.largest_planned(name)) for name in its.searches}
            for name, depth in planned.items():
                self._add(found, number, self.used.probe(name, depth), records, is_search=True)
            known = searches.sizes(its.searches, records)
            open_ = {point.job.method for point in found if point.missing}
            guessed = {name: depth for name, depth in planned.items() if name in open_}
            certain = its.jobs(self.used, {name: depth for name, depth in known.items() if name not in open_})
            for job in certain:
                self._add(found, number, job, records)
            for job in its.jobs(self.used, {**known, **guessed}):
                if job not in certain:
                    self._add(found, number, job, records, is_guess=True)
        for point in {point.job.method: point for point in reversed(found) if point.missing}.values():
            point.probe_seconds = self.sweep.probe_seconds(point.job, run_seconds(point.job, point.plan))
        for point in sorted(found, key=lambda point: (-point.num_claims, point.seconds)):
            point.is_taken = point.seconds <= seconds
            seconds -= point.seconds if point.is_taken else 0.0
        return found

    def _add(
        self,
        found: list[PlannedRun],
        number: int,
        job: Job,
        records: list[Record],
        is_search: bool = False,
        is_guess: bool = False,
    ) -> None:
        if job.method not in self.methods:
            return
        resolved, plan, _ = resolve(job)
        about = sum(
            claim.case == number and any(point.method == job.method for point in claim.expected.named)
            for claim in self.told
        )
        same = next(
            (point for point in found if point.job == resolved and point.is_search == is_search), None
        )
        if same is not None:
            same.cases += [number] if number not in same.cases else []
            same.num_claims += about
            return
        missing = self._missing_of_search(job, records) if is_search else self._missing(resolved, records)
        found.append(PlannedRun([number], resolved, plan, is_search, missing, is_guess, about))

    def _missing(self, job: Job, records: list[Record]) -> int:
        key = current_key(job)
        done = [record for record in records if record.key == key and record.is_lasting and record.is_judged]
        wanted = self._repeats(job)
        if self.tried.count((job, False)) >= wanted or any(record.status != "ok" for record in done):
            return 0
        return max(0, wanted - len(done))

    def _repeats(self, job: Job) -> int:
        """Return the number of processes that this job needs: the profile's repeats if the job measures a time, 1 if it
        only finds a size."""
        profiles = (each for number in self.numbers for each in case.load(number).profiles(self.used))
        lengths = {(each.steps, each.warmup) for each in profiles}
        return self.used.repeats if (job.steps, job.warmup) in lengths else 1

    def _missing_of_search(self, job: Job, records: list[Record]) -> int:
        """Return the number of runs that a search still needs.

        The number is 0 if the records show that one depth trained and the next one failed, or if this call has already
        searched. In all other cases it is PROBES, an estimate, because find() decides which runs are needed.
        """
        best, failed = searches.largest(job.method, records)
        depths = [part[-1].job.workload.num_layers for part in (best, failed) if part]
        is_done = len(depths) == 2 and depths[1] == depths[0] + 1 and best[-1].is_judged
        is_tried = any(is_search and tried.method == job.method for tried, is_search in self.tried)
        return 0 if is_done or is_tried else PROBES

    def _advance(self, point: PlannedRun, place: dict[str, Any]) -> None:
        job = point.job
        if point.is_search:
            self.tried.append((job, True))
            found = find(Probes(self.sweep, self.used.probe(job.method)), 1, MOST_LAYERS)
            self.finished += [found["record"]] if found["record"] else []
            return
        host = host_limit_bytes(job.budget, job.device)
        # the run would take more memory than this machine has: let run() refuse it by plan
        if host is not None and point.plan.host_bytes > host:
            record = self.sweep.run([resolve(job)])[0]
        else:
            record = self.sweep.attempt(
                Planned(job, point.plan, None), self._repeats(job) - point.missing + 1, place
            )
        # a crash is not repeated
        self.tried += [(job, False)] * (1 if record.is_result else self.used.repeats)
        self.finished.append(record)


def closing_line(points: Sequence[PlannedRun], used: CaseProfile) -> str:
    taken = [point for point in points if point.is_taken]
    left_out = sum(point.missing > 0 and not point.is_taken for point in points)
    minutes = sum(point.seconds for point in taken) / 60
    device, host = (
        gib(max((getattr(p.plan, f"{of}_bytes") for p in taken), default=0)) for of in ("device", "host")
    )
    return (
        f"profile {used.name}: {len(points)} points, {sum(point.missing > 0 for point in taken)} to measure, about"
        f" {minutes:.0f} minutes at a rough rate, at most {device} of device and {host} of host memory"
        + (f"; {left_out} left out, for time" if left_out else "")
    )


def main(
    number: str,
    profile: str | None,
    machine: str | None,
    seconds: float | None,
    repeats: int | None,
    results: Path,
    out: Path | None,
    only: str | None,
    as_json: bool,
    where: Sequence[str] = (),
    probe: Extent | None = None,
) -> list[Record]:
    """Run the verb `case`; return the records of the runs that it made.

    `only`: "extract" only makes the table, "draw" only draws the figure; None runs what is missing and does both. If no
    record is of the profile, extract and draw use any records. Raises ValueError for an unknown case, profile or
    machine.
    """
    there = [*map(str, case.numbers()), overlap.NAME]
    if number not in ("all", *there):
        raise ValueError(f"expected a case of {', '.join(there)}, or all, got {number!r}")
    records = records_of(results)
    used = case.profile_of(profile, machine, records[-1].machine if only and records else None)
    out = out or results / "figures"
    if where and (not only or profile or machine):
        raise ValueError("--where: expected --extract or --draw with it, and neither --profile nor --machine")
    if not only:
        used.check_machine()
    if number == overlap.NAME:  # this case makes its runs itself
        with reporter(as_json) as report:
            return overlap.main(used, results, out, only, report)
    numbers = case.numbers_of_all() if number == "all" else [int(number)]
    used = dataclasses.replace(used, repeats=repeats or used.repeats)
    if not only:
        return make(
            numbers, used, results, out, as_json, math.inf if seconds is None else seconds, probe=probe
        )
    for each in numbers:
        is_of_profile = profile or machine or (not where and case.any_of(each, used, records))
        _write(
            each,
            used if is_of_profile else None,
            records,
            results,
            out,
            only,
            is_one=len(numbers) == 1,
            where=where,
        )
        if is_of_profile:
            _write_added(each, used, results, out, only)
    return []


def make(
    numbers: Sequence[int],
    used: CaseProfile,
    results: Path,
    out: Path,
    as_json: bool,
    seconds: float = math.inf,
    methods: Sequence[str] | None = None,
    probe: Extent | None = None,
) -> list[Record]:
    """Make the missing runs of the cases; then write tables and draw figures. Return the records of the runs that were
    made. `methods`: names of the methods whose runs are made; None: all."""
    with reporter(as_json) as report:
        finished = _measure(Campaign(numbers, used, results, report, methods, probe), seconds, as_json)
        for each in numbers:
            case.load(each).measure(used, results, report)
    records = records_of(results)
    for each in numbers:
        _write(each, used, records, results, out, None, is_one=len(numbers) == 1)
        _write_added(each, used, results, out, None)
    return finished


def _measure(campaign: Campaign, seconds: float, as_json: bool) -> list[Record]:
    points = campaign.points(seconds)
    rows = [point.to_dict() for point in points]
    if as_json:
        print(json.dumps({"event": "plan", "points": rows}), flush=True)
    else:
        if len(campaign.numbers) > 1 or seconds < math.inf:
            print_table(list(rows[0]), [row.values() for row in rows], has_lines=True)
        print(closing_line(points, campaign.used), flush=True)
    campaign.run(seconds)
    return campaign.finished


def _write(
    number: int,
    used: CaseProfile | None,
    records: list[Record],
    results: Path,
    out: Path,
    only: str | None,
    is_one: bool,
    where: Sequence[str] = (),
) -> None:
    """Write the table and the figure of a case, from the records of a profile or, if `used` is None, from any records.

    A case without a record raises ValueError if it is the only one that was asked for (`is_one`). If several were asked
    for, a line is printed instead.
    """
    try:
        path = Path(f"{case_files.stem(number, used.name if used else case_files.ANY_RUNS, out)}.csv")
        if only != "draw":
            rows = (
                case.table(number, used, records, results)
                if used
                else case.table_of_any_runs(number, records, where)
            )
            path = case_files.write_rows(number, used.name if used else case_files.ANY_RUNS, rows, out)
        made = [] if only == "extract" else case_files.draw(number, path)
    except ValueError as error:
        if is_one:
            raise
        print(f"case {number}: {error}", file=sys.stderr)
        return
    if only == "extract" and is_one:
        print(path.read_text(), end="")
    print(
        f"case {number}: {', '.join(map(str, [path, *made]))}",
        file=sys.stderr if only == "extract" else sys.stdout,
    )


def _write_added(number: int, used: CaseProfile, results: Path, out: Path, only: str | None) -> None:
    """Write a table and a figure for each folder of records that others sent in. Each folder's files are written to a
    subfolder of `out` that has the folder's name."""
    for folder in added_folders(results):
        records = records_of(folder)
        with contextlib.suppress(ValueError):  # ValueError: the folder has no record of this case
            path = case_files.extract(number, used, records, out / folder.name, folder)
            made = [] if only == "extract" else case_files.draw(number, path)
            told = (
                f"case {number}, sent in, on {machine_of(records[-1])}: {', '.join(map(str, [path, *made]))}"
            )
            print(told, file=sys.stderr if only == "extract" else sys.stdout)
