"""The verb `case`: runs what is missing for one figure or for all, writes tables, draws figures.

What is to be run is planned anew before each run, from the records there are and the time left, so that it can be
killed anywhere. When time is short, points whose method more claims of their cases name come first, and of those the
quick ones. Times are rough: a process, its reference's, and for each the bytes and operations of its plan.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.console import print_table
from harness.core.job import Job, Plan, gib
from harness.core.record import Record, read_all
from harness.devices import machine
from harness.evidence import claims
from harness.figures import case
from harness.figures.profile import Profile
from harness.jobs.largest_depth import Probes, find
from harness.jobs.progress import reporter
from harness.jobs.sweep import Report, Sweep, resolve

# Guesses, good to a factor of about two: a process with its imports and its judgement; fp32 arithmetic; building and
# inspecting a model's state; what moves between device and host and is updated there.
PROCESS_SECONDS = {"sim": 4.0, "cuda": 12.0}
OPERATIONS_PER_SECOND = {"sim": 2e10, "cuda": 2e13}
BUILT_BYTES_PER_SECOND = 2e9
MOVED_BYTES_PER_SECOND = {"sim": 2e9, "cuda": 1.5e10}
PROBES = 5  # of a search
MOST_LAYERS = 2**20


@dataclass
class Point:
    """A run, with its repeats, or the search for a method's largest size; `job` is resolved, a search's at the depth
    that its plan foresees."""

    cases: list[int]
    job: Job
    plan: Plan
    is_search: bool
    missing: int  # runs still to be made
    is_guess: bool = False  # at a size that a search has still to find
    claims: int = 0
    is_taken: bool = field(default=True)

    @property
    def seconds(self) -> float:
        """Of what is missing: each run, and a reference for each model of it; repeats share theirs."""
        job, state = self.job, self.plan.device_bytes + self.plan.host_bytes
        num_models = int(job.options.get("num_models", 1))
        step = num_models * job.workload.flops_per_step / OPERATIONS_PER_SECOND[job.device]
        step += (self.plan.moved_bytes + self.plan.host_bytes) / MOVED_BYTES_PER_SECOND[job.device]
        run = PROCESS_SECONDS[job.device] + state / BUILT_BYTES_PER_SECOND + job.steps * step
        references = self.missing if self.is_search else min(1, self.missing)
        return (self.missing + references) * run + references * (num_models - 1) * PROCESS_SECONDS[job.device]

    @property
    def state(self) -> str:
        return "recorded" if not self.missing else "left out" if not self.is_taken else f"{self.missing} to run"


class Campaign:
    """Some cases under one profile, in one folder of results."""

    def __init__(self, numbers: Sequence[int], used: Profile, results: Path, report: Report | None = None) -> None:
        self.numbers, self.used = numbers, used
        self.sweep = Sweep(results, report=report)
        self.told = claims.load()
        self.tried: list[tuple[Job, bool]] = []  # attempts of this call, and whether they were searches
        self.finished: list[Record] = []

    def run(self, seconds: float | None = None) -> None:
        """Run what is missing, as far as the time goes."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else end - time.monotonic()
            todo = [point for point in self.points(left) if point.missing and point.is_taken and not point.is_guess]
            if not todo:
                return
            # Searches first, for sizes depend on them; then in turn, so that repeats of a point lie apart in time.
            todo.sort(key=lambda point: (not point.is_search, -point.missing))
            done = len(self.finished)
            self._advance(todo[0], {"index": done + 1, "total": done + len(todo)})

    def points(self, seconds: float | None = None) -> list[Point]:
        """Every point of the cases; those left out are not taken."""
        found: list[Point] = []
        for number in self.numbers:
            module = case.load(number)
            records = case.select(number, self.used, list(self.sweep.records.values()))
            for name in module.SEARCHES:
                depth = max(1, self.used.largest_planned(name))
                self._add(found, number, self.used.probe(name, depth), records, is_search=True)
            known = case.sizes(module.SEARCHES, records)
            open_ = [name for name in module.SEARCHES if any(p.missing and p.job.method == name for p in found)]
            guessed = {name: max(1, self.used.largest_planned(name)) for name in open_}
            certain = module.jobs(self.used, {name: known[name] for name in known if name not in open_})
            for job in certain:
                self._add(found, number, job, records)
            for job in module.jobs(self.used, {**known, **guessed}):
                if job not in certain:
                    self._add(found, number, job, records, is_guess=True)
        self._choose(found, seconds)
        return found

    def _add(
        self,
        found: list[Point],
        number: int,
        job: Job,
        records: list[Record],
        is_search: bool = False,
        is_guess: bool = False,
    ) -> None:
        resolved, plan, _ = resolve(job)
        about = sum(
            claim.case == number and any(point.method == job.method for point in claim.expected.named)
            for claim in self.told
        )
        same = next((point for point in found if point.job == resolved and point.is_search == is_search), None)
        if same is not None:
            same.cases += [number] if number not in same.cases else []
            same.claims += about
            return
        missing = self._missing_of_search(job, records) if is_search else self._missing(resolved, records)
        found.append(Point([number], resolved, plan, is_search, missing, is_guess, about))

    def _missing(self, job: Job, records: list[Record]) -> int:
        done = [record for record in records if record.key == case.key(job) and record.is_lasting and is_judged(record)]
        wanted = self._repeats(job)
        if self.tried.count((job, False)) >= wanted or any(record.status != "ok" for record in done):
            return 0
        return max(0, wanted - len(done))

    def _repeats(self, job: Job) -> int:
        """Processes that are to run this job: a size is found by one, a time needs several."""
        lengths = {(each.steps, each.warmup) for number in self.numbers for each in case.profiles(number, self.used)}
        return self.used.repeats if (job.steps, job.warmup) in lengths else 1

    def _missing_of_search(self, job: Job, records: list[Record]) -> int:
        """None when both sides of the edge are on record; find() itself knows what else it needs."""
        best, failed = case.largest(job.method, records)
        depths = [part[-1].job.workload.num_layers for part in (best, failed) if part]
        is_done = len(depths) == 2 and depths[1] == depths[0] + 1 and is_judged(best[-1])
        is_tried = any(is_search and tried.method == job.method for tried, is_search in self.tried)
        return 0 if is_done or is_tried else PROBES

    def _choose(self, found: list[Point], seconds: float | None) -> None:
        """Take points while there is time: most claims first, then the quickest."""
        if seconds is None:
            return
        for point in sorted(found, key=lambda point: (-point.claims, point.seconds)):
            point.is_taken = point.seconds <= seconds
            seconds -= point.seconds if point.is_taken else 0.0

    def _advance(self, point: Point, place: dict[str, Any]) -> None:
        job = point.job
        if point.is_search:
            self.tried.append((job, True))
            found = find(Probes(self.sweep, self.used.probe(job.method)), 1, MOST_LAYERS)
            self.finished += [found["record"]] if found["record"] else []
            return
        host = machine.budget(job.budget, job.device).host_bytes
        if host is not None and point.plan.host_bytes > host:  # what it would exhaust is this machine
            record = self.sweep.run([job])[0]
        else:
            record = self.sweep.attempt(job, self._repeats(job) - point.missing + 1, place)
        self.tried += [(job, False)] * (1 if record.is_result else self.used.repeats)  # no crash is repeated
        self.finished.append(record)


def is_judged(record: Record) -> bool:
    """False where a run ended and the harness was killed before its verdict: the next attempt only judges."""
    return record.status != "ok" or record.gate.verdict != "untested" or bool(record.gate.reason)


def plan_rows(points: Sequence[Point]) -> list[dict[str, str]]:
    """The plan as people read it."""
    return [
        {
            "case": ", ".join(map(str, point.cases)),
            "method": point.job.method + ("".join(f" {k}={v}" for k, v in point.job.options.items())),
            "layers": f"search, about {point.job.workload.num_layers}" if point.is_search else _layers(point),
            "device": gib(point.plan.device_bytes),
            "host": gib(point.plan.host_bytes),
            "claims": str(point.claims),
            "minutes": f"{point.seconds / 60:.1f}",
            "runs": point.state,
        }
        for point in points
    ]


def closing_line(points: Sequence[Point], used: Profile) -> str:
    taken = [point for point in points if point.is_taken]
    left_out = sum(point.missing > 0 and not point.is_taken for point in points)
    minutes = sum(point.seconds for point in taken) / 60
    most = [max((getattr(p.plan, f"{memory}_bytes") for p in taken), default=0) for memory in ("device", "host")]
    return (
        f"profile {used.name}: {len(points)} points, {sum(point.missing > 0 for point in taken)} to measure, about"
        f" {minutes:.0f} minutes at a rough rate, at most {gib(most[0])} of device and {gib(most[1])} of host memory"
        + (f"; {left_out} left out, for time" if left_out else "")
    )


def _layers(point: Point) -> str:
    return f"about {point.job.workload.num_layers}" if point.is_guess else str(point.job.workload.num_layers)


def main(
    number: str, name: str | None, on: str | None, seconds: float | None, repeats: int | None, results: Path,
    out: Path | None, only: str | None, as_json: bool,
) -> list[Record]:  # fmt: skip
    """The verb; returns the records of what was run. Raises ValueError for words that make no sense together."""
    there = case.numbers()
    if number not in ("all", *map(str, there), *case.others()):
        words = ", ".join([*map(str, there), *case.others()])
        raise ValueError(f"no case {number!r}: choose one of {words}, or all of those with a number")
    records = list(read_all(results)[0].values())
    facts = records[-1].machine if only and records else None
    used = case.profile_of(name, on, facts)
    if number in case.others():
        return _run_other(number, used, results, out or results / "figures", only, as_json)
    numbers = there if number == "all" else [int(number)]
    used = used if repeats is None else dataclasses.replace(used, repeats=repeats)
    finished = [] if only else _measure(numbers, used, results, seconds, as_json)
    records = list(read_all(results)[0].values())
    out = out or results / "figures"
    for each in numbers:
        _write(each, used, records, out, only, is_one=len(numbers) == 1)
    return finished


def _run_other(name: str, used: Profile, results: Path, out: Path, only: str | None, as_json: bool) -> list[Record]:
    """A case that does it all itself: it has one run, and no time to divide."""
    if not only:
        used.check_machine()
    with reporter(as_json) as report:
        return case.load(name).main(used, results, out, only, report)


def _measure(numbers: list[int], used: Profile, results: Path, seconds: float | None, as_json: bool) -> list[Record]:
    used.check_machine()
    with reporter(as_json) as report:
        campaign = Campaign(numbers, used, results, report)
        points = campaign.points(seconds)
        if as_json:
            print(json.dumps({"event": "plan", "points": plan_rows(points)}), flush=True)
        else:
            if len(numbers) > 1 or seconds is not None:
                rows = plan_rows(points)
                print_table(list(rows[0]), [row.values() for row in rows], has_lines=True)
            print(closing_line(points, used), flush=True)
        campaign.run(seconds)
    return campaign.finished


def _write(number: int, used: Profile, records: list[Record], out: Path, only: str | None, is_one: bool) -> None:
    """The table and the figure of a case; of several cases, one without records is only told."""
    try:
        path = (
            case.extract(number, used, records, out) if only != "draw" else Path(f"{case.stem(number, used, out)}.csv")
        )
        made = [] if only == "extract" else case.draw(number, path)
    except ValueError as error:
        if is_one:
            raise
        print(f"case {number}: {error}", file=sys.stderr)
        return
    if only == "extract" and is_one:
        print(path.read_text(), end="")
    print(f"case {number}: {', '.join(map(str, [path, *made]))}", file=sys.stderr if only == "extract" else sys.stdout)
