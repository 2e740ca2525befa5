"""The verb `case`: makes the missing runs of one figure or of all, writes tables, draws figures.

The missing runs are planned from the records and the time left. Before each run, they are planned again, so an
interrupted call loses nothing. If time is short, runs are chosen by the number of claims about their method, most
claims first; of runs with equal numbers, the quickest goes first. A run's time is a rough estimate from the bytes and
operations of its plan.
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

from cases import overlap
from harness.base.console import print_table
from harness.core import method
from harness.core.job import MOST_LAYERS, Job, Plan, gib
from harness.core.record import Record, added_folders, records_of
from harness.devices.room import host_limit_bytes
from harness.gate.probe import Extent
from harness.jobs.largest_size import Probes, find_largest
from harness.jobs.progress import reporter
from harness.jobs.sweep import Report, Sweep
from harness.plan.fit import Planned, resolve
from harness.plan.run_time import PROCESS_SECONDS, run_seconds
from papers.claims import claims
from papers.figures import case, case_files, searches
from papers.figures.point import machine_of
from papers.figures.points import current_key
from papers.figures.profile import CaseProfile

PROBES_OF_SEARCH = 5  # number of runs that a search is assumed to need


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
        job, one_run = self.job, run_seconds(self.job, self.plan)
        num_models = int(job.options.get("num_models", 1))
        references = self.missing if self.is_search else min(1, self.missing)
        seconds_of_other_models = references * (num_models - 1) * PROCESS_SECONDS[job.device]
        return (self.missing + references) * one_run + seconds_of_other_models + self.probe_seconds

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
        self.claims = claims.load_claims()
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
            next_run = min(todo, key=lambda run: (not run.is_search, -run.missing))
            done = len(self.finished)
            self._advance(next_run, {"index": done + 1, "total": done + len(todo)})

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
        its_case = case.load_case(number)
        records = case.select_runs(number, self.case_profile, list(self.sweep.records.values()))
        planned_depths = {name: max(1, self.case_profile.largest_planned(name)) for name in its_case.searches}
        for name, depth in planned_depths.items():
            if name in self.methods:
                job, plan, _ = resolve(self.case_profile.probe(name, depth))
                missing = self._missing_of_search(job, records)
                _add_run(
                    runs,
                    PlannedRun([number], job, plan, missing, is_search=True),
                    self._num_claims(number, name),
                )
        depths = searches.largest_depths(its_case.searches, records)
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
                _add_run(runs, run, self._num_claims(number, job.method))

    def _num_claims(self, number: int, method_name: str) -> int:
        """Return the number of the case's claims that name the method."""
        claims_of_case = (claim for claim in self.claims if claim.case == number)
        return sum(
            any(point.method == method_name for point in claim.expected.named) for claim in claims_of_case
        )

    def _missing(self, job: Job, records: list[Record]) -> int:
        key = current_key(job)
        measured = [
            record for record in records if record.key == key and record.is_lasting and record.is_judged
        ]
        num_repeats = self._repeats(job)
        is_tried = self.tried.count((job, False)) >= num_repeats
        if is_tried or any(record.status != "ok" for record in measured):
            return 0
        return max(0, num_repeats - len(measured))

    def _repeats(self, job: Job) -> int:
        """Return the number of processes that this job needs: the profile's repeats if the job measures a time, 1 if it
        only finds a size."""
        timed_lengths = set()
        for number in self.numbers:
            for case_profile in case.load_case(number).profiles(self.case_profile):
                timed_lengths.add((case_profile.steps, case_profile.warmup))
        return self.case_profile.repeats if (job.steps, job.warmup) in timed_lengths else 1

    def _missing_of_search(self, job: Job, records: list[Record]) -> int:
        """Return the number of runs that a search still needs.

        The number is 0 if the records show that one depth trained and the next one failed, or if this call has already
        searched. In all other cases it is PROBES_OF_SEARCH, an estimate, because find_largest() decides which runs are
        needed.
        """
        best, failed = searches.largest_and_failed(job.method, records)
        depths = [repeats[-1].job.workload.num_layers for repeats in (best, failed) if repeats]
        is_done = len(depths) == 2 and depths[1] == depths[0] + 1 and best[-1].is_judged
        is_tried = any(is_search and tried.method == job.method for tried, is_search in self.tried)
        return 0 if is_done or is_tried else PROBES_OF_SEARCH

    def _advance(self, run: PlannedRun, progress: dict[str, int]) -> None:
        job = run.job
        if run.is_search:
            self.tried.append((job, True))
            answer = find_largest(Probes(self.sweep, self.case_profile.probe(job.method)), 1, MOST_LAYERS)
            self.finished += [answer["record"]] if answer["record"] else []
            return
        host_limit = host_limit_bytes(job.budget, job.device)
        # the run would take more memory than this machine has: let run() refuse it by plan
        if host_limit is not None and run.plan.host_bytes > host_limit:
            record = self.sweep.run([resolve(job)])[0]
        else:
            record = self.sweep.attempt(
                Planned(job, run.plan, None), self._repeats(job) - run.missing + 1, progress
            )
        # a crash is not repeated
        self.tried += [(job, False)] * (1 if record.is_result else self.case_profile.repeats)
        self.finished.append(record)


def _add_run(runs: list[PlannedRun], run: PlannedRun, num_claims: int) -> None:
    """Add a run, or its case to the same run of another case."""
    same = next((other for other in runs if (other.job, other.is_search) == (run.job, run.is_search)), None)
    if same is None:
        runs.append(run)
        same = run
    elif run.cases[0] not in same.cases:
        same.cases += run.cases
    same.num_claims += num_claims


def campaign_text(runs: Sequence[PlannedRun], case_profile: CaseProfile) -> str:
    taken_runs = [run for run in runs if run.is_taken]
    left_out = sum(run.missing > 0 and not run.is_taken for run in runs)
    minutes = sum(run.seconds for run in taken_runs) / 60
    device = gib(max((run.plan.device_bytes for run in taken_runs), default=0))
    host = gib(max((run.plan.host_bytes for run in taken_runs), default=0))
    num_missing = sum(run.missing > 0 for run in taken_runs)
    return (
        f"profile {case_profile.name}: {len(runs)} points, {num_missing} to measure, about"
        f" {minutes:.0f} minutes at a rough rate, at most {device} of device and {host} of host memory"
        + (f"; {left_out} left out, for time" if left_out else "")
    )


@dataclass(frozen=True)
class CaseCall:
    """A call of the verb. `number`: a case, or `all`. `seconds`: the time for all runs; None: no limit.

    `only`: "extract" only makes the table, "draw" only draws the figure; None runs what is missing and does both.
    `where`: choices of records, each as NAME=VALUE.
    """

    number: str
    results: Path
    profile: str | None = None
    machine: str | None = None
    seconds: float | None = None
    repeats: int | None = None
    out: Path | None = None
    only: str | None = None
    where: Sequence[str] = ()
    probe: Extent | None = None
    as_json: bool = False


@dataclass(frozen=True)
class CaseOutput:
    """The folder of the records, and that of the tables and figures. `only`: as in CaseCall. `is_one`: True if the call
    asks for a single case."""

    results: Path
    out: Path
    only: str | None = None
    is_one: bool = False


def run_case(call: CaseCall) -> list[Record]:
    """Run the verb; return the records of the runs that it made. If no record is of the profile, extract and draw use
    any records. Raises ValueError for an unknown case, profile or machine."""
    names = [*map(str, case.numbers()), overlap.NAME]
    if call.number not in ("all", *names):
        raise ValueError(f"expected a case of {', '.join(names)}, or all, got {call.number!r}")
    records = records_of(call.results)
    facts = records[-1].machine if call.only and records else None
    case_profile = case.profile_of(call.profile, call.machine, facts)
    out = call.out or call.results / "figures"
    if call.where and (not call.only or call.profile or call.machine):
        raise ValueError("--where: expected --extract or --draw with it, and neither --profile nor --machine")
    if not call.only:
        case_profile.check_machine()
    if call.number == overlap.NAME:  # this case makes its runs itself
        with reporter(call.as_json) as report:
            return overlap.make_timelines(case_profile, call.results, out, call.only, report)
    numbers = case.numbers_of_all() if call.number == "all" else [int(call.number)]
    case_profile = dataclasses.replace(case_profile, repeats=call.repeats or case_profile.repeats)
    output = CaseOutput(call.results, out, call.only, is_one=len(numbers) == 1)
    if not call.only:
        seconds = math.inf if call.seconds is None else call.seconds
        return make_figures(numbers, case_profile, output, RunChoice(None, seconds, call.probe), call.as_json)
    for number in numbers:
        if (
            call.profile
            or call.machine
            or (not call.where and case.has_run_of(number, case_profile, records))
        ):
            _write_figure(number, case_profile, records, output)
            _write_added_figures(number, case_profile, output)
        else:
            _write_figure(number, None, records, output, call.where)
    return []


def make_figures(
    numbers: Sequence[int], case_profile: CaseProfile, output: CaseOutput, choice: RunChoice, as_json: bool
) -> list[Record]:
    """Make the missing runs of the cases; then write tables and draw figures. Return the records of the runs that were
    made."""
    with reporter(as_json) as report:
        finished = _make_runs(Campaign(numbers, case_profile, output.results, choice, report), as_json)
        for number in numbers:
            case.load_case(number).measure(case_profile, output.results, report)
    records = records_of(output.results)
    for number in numbers:
        _write_figure(number, case_profile, records, output)
        _write_added_figures(number, case_profile, output)
    return finished


def _make_runs(campaign: Campaign, as_json: bool) -> list[Record]:
    seconds = campaign.choice.seconds
    runs = campaign.planned(seconds)
    rows = [run.to_dict() for run in runs]
    if as_json:
        print(json.dumps({"event": "plan", "points": rows}), flush=True)
    else:
        if len(campaign.numbers) > 1 or seconds < math.inf:
            print_table(list(rows[0]), [row.values() for row in rows], has_lines=True)
        print(campaign_text(runs, campaign.case_profile), flush=True)
    campaign.run()
    return campaign.finished


def _write_figure(
    number: int,
    case_profile: CaseProfile | None,
    records: list[Record],
    output: CaseOutput,
    where: Sequence[str] = (),
) -> None:
    """Write the table and the figure of a case, from the records of a profile or, if `case_profile` is None, from any
    records.

    A case without a record raises ValueError if it is the only one of the call. If the call asks for several, a line is
    printed instead.
    """
    name = case_profile.name if case_profile else case_files.ANY_RUNS
    try:
        path = Path(f"{case_files.stem(number, name, output.out)}.csv")
        if output.only != "draw":
            if case_profile:
                rows = case.figure_rows(number, case_profile, records, output.results)
            else:
                rows = case.rows_of_any_runs(number, records, where)
            path = case_files.write_rows(number, name, rows, output.out)
        figures = [] if output.only == "extract" else case_files.draw(number, path)
    except ValueError as error:
        if output.is_one:
            raise
        print(f"case {number}: {error}", file=sys.stderr)
        return
    if output.only == "extract" and output.is_one:
        print(path.read_text(), end="")
    _print_paths(f"case {number}", [path, *figures], output)


def _write_added_figures(number: int, case_profile: CaseProfile, output: CaseOutput) -> None:
    """Write a table and a figure for each folder of records that others sent in. Each folder's files are written to a
    subfolder of `out` that has the folder's name."""
    for folder in added_folders(output.results):
        records = records_of(folder)
        with contextlib.suppress(ValueError):  # ValueError: the folder has no record of this case
            path = case_files.extract(number, case_profile, records, output.out / folder.name, folder)
            figures = [] if output.only == "extract" else case_files.draw(number, path)
            about = f"case {number}, sent in, on {machine_of(records[-1])}"
            _print_paths(about, [path, *figures], output)


def _print_paths(about: str, paths: Sequence[Path], output: CaseOutput) -> None:
    """Print which files were written; on standard error if the table itself is what the call prints."""
    print(
        f"{about}: {', '.join(map(str, paths))}",
        file=sys.stderr if output.only == "extract" else sys.stdout,
    )
