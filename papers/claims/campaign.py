"""The missing runs of cases, planned from the records and the time left, and made.

Before each run, the missing runs are planned again, so an interrupted call loses nothing. If time is short, runs are
chosen by the number of claims about their method, most claims first; of runs with equal numbers, the quickest goes
first. A run's time is a rough estimate from the bytes and operations of its plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core import method
from harness.core.job import MOST_LAYERS, Job, Plan, gib
from harness.core.record import Record
from harness.devices.room import host_limit_bytes
from harness.gate.probe import Extent
from harness.jobs.largest_size import Probes, find_largest
from harness.jobs.sweep import Report, Sweep
from harness.plan.fit import Planned, resolve
from harness.plan.run_time import PROCESS_SECONDS, run_seconds
from papers.claims import claims
from papers.figures import case, searches
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
    missing: int  # number of runs without a record yet
    is_search: bool = False
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


@dataclass(frozen=True)
class RunChoice:
    """Which missing runs are made. `methods`: names of their methods; None: all. `seconds`: the time for all runs.
    `probe`: the extent of the gate's probes."""

    methods: Sequence[str] | None = None
    seconds: float = math.inf
    probe: Extent | None = None


class Campaign:
    """The runs of several cases in one profile, and their records in one folder of results."""

    def __init__(
        self,
        numbers: Sequence[int],
        case_profile: CaseProfile,
        results: Path,
        choice: RunChoice = RunChoice(),
        report: Report | None = None,
    ) -> None:
        self.numbers, self.case_profile, self.choice = numbers, case_profile, choice
        self.methods = choice.methods or method.names()
        self.sweep = Sweep(results, report=report, probe=choice.probe)
        self.claims = claims.load()
        self.tried: list[tuple[Job, bool]] = []  # each job that this call tried, and True if by a search
        self.finished: list[Record] = []

    def run(self) -> None:
        """Make the missing runs, until none is left or the time is over."""
        end = time.monotonic() + self.choice.seconds
        while True:
            runs = self.planned(end - time.monotonic())
            todo = [run for run in runs if run.missing and run.is_taken and not run.is_guess]
            if not todo:
                return
            # Searches go first, because the sizes of other jobs depend on them. All other jobs take turns, so that the
            # repeats of a job are spread over time.
            first = min(todo, key=lambda run: (not run.is_search, -run.missing))
            done = len(self.finished)
            self._advance(first, {"index": done + 1, "total": done + len(todo)})

    def planned(self, seconds: float = math.inf) -> list[PlannedRun]:
        """Return every planned run of the cases, whether it is recorded or missing.

        `is_taken` tells which runs fit into `seconds`. Runs are taken by the number of claims about their method, most
        claims first; of runs with equal numbers, the quickest is taken first.
        """
        runs: list[PlannedRun] = []
        for number in self.numbers:
            self._add_case(runs, number)
        # each method's probe counts in its first missing run
        for run in {run.job.method: run for run in reversed(runs) if run.missing}.values():
            run.probe_seconds = self.sweep.probe_seconds(run.job, run_seconds(run.job, run.plan))
        for run in sorted(runs, key=lambda run: (-run.num_claims, run.seconds)):
            run.is_taken = run.seconds <= seconds
            seconds -= run.seconds if run.is_taken else 0.0
        return runs

    def _add_case(self, runs: list[PlannedRun], number: int) -> None:
        """Add the searches and jobs of a case. A job whose size depends on an unfinished search is a guess."""
        its_case = case.load(number)
        records = case.select(number, self.case_profile, list(self.sweep.records.values()))
        planned_depths = {name: max(1, self.case_profile.largest_planned(name)) for name in its_case.searches}
        for name, depth in planned_depths.items():
            if name in self.methods:
                job, plan, _ = resolve(self.case_profile.probe(name, depth))
                missing = self._missing_of_search(job, records)
                _add(
                    runs,
                    PlannedRun([number], job, plan, missing, is_search=True),
                    self._num_claims(number, name),
                )
        depths = searches.sizes(its_case.searches, records)
        unfinished = {run.job.method for run in runs if run.missing}
        certain_depths = {name: depth for name, depth in depths.items() if name not in unfinished}
        guesses = {name: depth for name, depth in planned_depths.items() if name in unfinished}
        certain = its_case.jobs(self.case_profile, certain_depths)
        guessed = [
            job for job in its_case.jobs(self.case_profile, {**depths, **guesses}) if job not in certain
        ]
        for unplanned in (*certain, *guessed):
            if unplanned.method in self.methods:
                job, plan, _ = resolve(unplanned)
                run = PlannedRun(
                    [number], job, plan, self._missing(job, records), is_guess=unplanned in guessed
                )
                _add(runs, run, self._num_claims(number, job.method))

    def _num_claims(self, number: int, method_name: str) -> int:
        """Return the number of the case's claims that name the method."""
        claims_of_case = (claim for claim in self.claims if claim.case == number)
        return sum(
            any(point.method == method_name for point in claim.expected.named) for claim in claims_of_case
        )

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
        lengths = set()
        for number in self.numbers:
            lengths |= {
                (case_profile.steps, case_profile.warmup)
                for case_profile in case.load(number).profiles(self.case_profile)
            }
        return self.case_profile.repeats if (job.steps, job.warmup) in lengths else 1

    def _missing_of_search(self, job: Job, records: list[Record]) -> int:
        """Return the number of runs that a search still needs.

        The number is 0 if the records show that one depth trained and the next one failed, or if this call has already
        searched. In all other cases it is PROBES, an estimate, because find_largest() decides which runs are needed.
        """
        best, failed = searches.largest(job.method, records)
        depths = [part[-1].job.workload.num_layers for part in (best, failed) if part]
        is_done = len(depths) == 2 and depths[1] == depths[0] + 1 and best[-1].is_judged
        is_tried = any(is_search and tried.method == job.method for tried, is_search in self.tried)
        return 0 if is_done or is_tried else PROBES

    def _advance(self, run: PlannedRun, place: dict[str, Any]) -> None:
        job = run.job
        if run.is_search:
            self.tried.append((job, True))
            answer = find_largest(Probes(self.sweep, self.case_profile.probe(job.method)), 1, MOST_LAYERS)
            self.finished += [answer["record"]] if answer["record"] else []
            return
        host = host_limit_bytes(job.budget, job.device)
        # the run would take more memory than this machine has: let run() refuse it by plan
        if host is not None and run.plan.host_bytes > host:
            record = self.sweep.run([resolve(job)])[0]
        else:
            record = self.sweep.attempt(
                Planned(job, run.plan, None), self._repeats(job) - run.missing + 1, place
            )
        # a crash is not repeated
        self.tried += [(job, False)] * (1 if record.is_result else self.case_profile.repeats)
        self.finished.append(record)


def _add(runs: list[PlannedRun], run: PlannedRun, num_claims: int) -> None:
    """Add a run, or its case to the same run of another case."""
    same = next((other for other in runs if (other.job, other.is_search) == (run.job, run.is_search)), None)
    if same is None:
        runs.append(run)
        same = run
    elif run.cases[0] not in same.cases:
        same.cases += run.cases
    same.num_claims += num_claims


def closing_line(runs: Sequence[PlannedRun], case_profile: CaseProfile) -> str:
    taken = [run for run in runs if run.is_taken]
    left_out = sum(run.missing > 0 and not run.is_taken for run in runs)
    minutes = sum(run.seconds for run in taken) / 60
    device = gib(max((run.plan.device_bytes for run in taken), default=0))
    host = gib(max((run.plan.host_bytes for run in taken), default=0))
    return (
        f"profile {case_profile.name}: {len(runs)} points, {sum(run.missing > 0 for run in taken)} to measure, about"
        f" {minutes:.0f} minutes at a rough rate, at most {device} of device and {host} of host memory"
        + (f"; {left_out} left out, for time" if left_out else "")
    )
