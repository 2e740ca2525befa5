"""Cases: one file in cases/ is one figure of the papers. Tables and figures are made of records and nothing else.

A case says which methods to search for their largest size (SEARCHES), at which sizes or windows to run (RUNS, by
profile), the jobs that makes, the rows of its table, what was PUBLISHED, and how its figure is drawn.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from harness.core import method
from harness.core.job import Job
from harness.core.method import ROOT
from harness.core.record import Record
from harness.devices import machine
from harness.figures import plot, profile
from harness.figures.point import Row, machine_of, row
from harness.figures.profile import PROBE, Profile
from harness.jobs.depth_search import Answer, Outcome, Trial
from harness.jobs.sweep import context

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = ROOT / "cases"
COLUMNS = [field.name for field in dataclasses.fields(Row) if field.name != "values"]


class Case(Protocol):
    """A module of cases/."""

    __doc__: str | None
    METHODS: tuple[str, ...]  # all that it runs
    SEARCHES: tuple[str, ...]  # of these the largest size is searched first
    RUNS: dict[str, Any]  # by kind of profile: what jobs() makes jobs of
    PUBLISHED: list[Row]

    def jobs(self, used: Profile, sizes: dict[str, int]) -> list[Job]:
        """The runs of a profile; `sizes`: the largest trained depth of each searched method, as far as known."""
        ...

    def table(self, records: Sequence[Record], used: Profile) -> list[Row]:
        """Rows in the figure's order, from records of this profile."""
        ...

    def figure(self, rows: Sequence[Row], note: str) -> Figure: ...

    # May have: AXIS, what its rows differ in; profiles(used), where not all its runs are of the profile itself;
    # simulated(rows), what the figure shows beside measured rows.


def numbers() -> list[int]:
    return sorted(int(found[1]) for path in FOLDER.glob("case*.py") if (found := re.fullmatch(r"case(\d+)", path.stem)))


def others() -> list[str]:
    """Cases without a number: no figures of the papers, and no part of `all`."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.py") if not path.stem.startswith("case"))


def other(name: str) -> Any:
    """One of these: main() does it all; profiles(), shown(), table(), extract() and draw() are what a report takes."""
    return importlib.import_module(f"cases.{name}")


def load(number: int) -> Case:
    return cast(Case, importlib.import_module(f"cases.case{number}"))


def profile_of(name: str | None, on: str | None, facts: dict[str, Any] | None = None) -> Profile:
    """The profile of that name, or what suits the machine, with the memories of a named machine or of the machine that
    `facts` tell of, else of this one."""
    if facts is None:
        drop = () if machine.devices()[0] == "cuda" else ("gpu", "gpu_bytes")
        facts = {key: value for key, value in machine.facts().items() if key not in drop}
    methods = dict.fromkeys(name for number in numbers() for name in load(number).SEARCHES)
    return profile.make(name or profile.default(facts), on, tuple(methods), facts)


def profiles(number: int, used: Profile) -> Sequence[Profile]:
    """The profile, or what a case makes of it, such as other batches."""
    module: Any = load(number)
    return module.profiles(used) if hasattr(module, "profiles") else (used,)


def is_of(used: Profile, job: Job) -> bool:
    """Whether a job is one of some case's in this profile, at whatever depth, of whatever method."""
    return any(each.is_of(job) for number in numbers() for each in profiles(number, used))


def label(name: str) -> str:
    return method.load(name).label


# ---- Records to rows


def select(number: int, used: Profile, records: Sequence[Record]) -> list[Record]:
    """The runs of a profile that a case may read, oldest first; of a method, only those by its present code where there
    are any.

    Raises ValueError where they are of several machines.
    """
    its = profiles(number, used)
    own = [record for record in records if record.origin == "run" and any(each.is_of(record.job) for each in its)]
    fresh = {record.job.method for record in own if is_current(record)}
    own = [record for record in own if record.job.method not in fresh or is_current(record)]
    machines = {machine_of(record) for record in own}
    if len(machines) > 1:
        raise ValueError(
            f"records of several machines meet ({'; '.join(sorted(machines))}): keep each machine's in a folder of its"
            " own and name one with --results"
        )
    return own


_context = functools.cache(context)


def key(job: Job) -> str:
    """The identity that a run of this resolved job would have here and now."""
    return job.key(**_context(job.method, job.workload.corpus))


def is_current(record: Record) -> bool:
    """Whether a run here and now would measure the same."""
    return record.job.method in method.names() and record.key == key(record.job)


def repeats(job: Job, records: Sequence[Record]) -> list[Record]:
    """The measurements of a job with at least its options, by the newest code that measured it; results before
    attempts that ended without one, measurements before refusals by plan."""
    same = [
        record
        for record in records
        if dataclasses.replace(record.job, options={}) == dataclasses.replace(job, options={})
        and job.options.items() <= record.job.options.items()
    ]
    same = [record for record in same if record.is_result] or same
    same = [record for record in same if record.phase != "plan"] or same
    return [record for record in same if record.key == same[-1].key]


def rows(metric: str, jobs: Sequence[Job], records: Sequence[Record]) -> list[Row]:
    """A row for each job that has a record."""
    return [row(metric, found) for job in jobs if (found := repeats(job, records))]


def largest(name: str, records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """What a search's records say: those of the largest depth that trained with no failure at it or below, and one of
    the smallest that failed with no success at it or above. Either may be empty."""
    probes = _probes(name, records)
    depths = _by_depth(probes)
    trained = {depth: [record for record in found if record.status == "ok"] for depth, found in depths.items()}
    answer = _answer(depths)
    best = trained.get(answer.largest, [])
    failed = depths[answer.failed_above][-1:] if answer.failed_above else []
    if not depths:
        failed = probes[-1:]  # why there is no answer
    return repeats(best[-1].job, best) if best else [], failed


def is_searched(name: str, records: Sequence[Record]) -> bool:
    """Whether a search's records show the edge from both sides: all up to the largest size trained, and the next depth
    failed, or was not run because its plan would exhaust the machine."""
    depths = _by_depth(_probes(name, records))
    answer = _answer(depths)
    if answer.failed_above is None:
        best = depths.get(answer.largest)
        return best is not None and _is_refused_beyond(best[-1])
    return answer.first_failing == answer.largest + 1 and answer.failed_above == answer.last_passing + 1


def _probes(name: str, records: Sequence[Record]) -> list[Record]:
    length = PROBE["steps"], PROBE["warmup"]
    return [
        record for record in records if record.job.method == name and (record.job.steps, record.job.warmup) == length
    ]


def _by_depth(probes: Sequence[Record]) -> dict[int, list[Record]]:
    """What was really run to its end, by number of layers."""
    depths: dict[int, list[Record]] = {}
    for record in probes:
        if record.is_result and record.phase != "plan":
            depths.setdefault(record.job.workload.num_layers, []).append(record)
    return depths


def _answer(depths: dict[int, list[Record]]) -> Answer:
    passed = {depth: any(record.status == "ok" for record in found) for depth, found in depths.items()}
    return Answer(trials=[Trial(depth, Outcome(each)) for depth, each in passed.items()])


def _is_refused_beyond(record: Record) -> bool:
    """Whether one more layer would, by plan, take more host memory than the machine of the record has."""
    job, have = record.job, record.machine.get("host_bytes")
    if have is None or job.method not in method.names():
        return False
    try:
        deeper = job.workload.at_depth(job.workload.num_layers + 1)
        plan = method.create(job.method, job.options).plan(deeper, job.budget)
    except ValueError:  # options of another state of the code
        return False
    return plan.host_bytes + (0 if job.device == "cuda" else plan.device_bytes) > have


def sizes(names: Sequence[str], records: Sequence[Record]) -> dict[str, int]:
    """The largest depth that each method trained, where the gate passed."""
    found = {name: largest(name, records)[0] for name in names}
    return {name: best[-1].job.workload.num_layers for name, best in found.items() if best and best[-1].gate.passed}


# ---- Rows to files


def stem(number: int, used: Profile, out: Path) -> Path:
    return out / f"case{number}_{used.name}"


def table(number: int, used: Profile, records: Sequence[Record]) -> list[Row]:
    """Our rows of a case. Raises ValueError where there are none, or where they would mix machines or windows."""
    module = load(number)
    found = module.table(select(number, used, records), used)
    if not found:
        raise ValueError(f"no record of profile {used.name} here: ./run.sh case {number} --profile {used.kind} runs it")
    windows = {row.window_size for row in found if row.status == "ok" and row.window_size}
    if len(windows) > 1 and getattr(module, "AXIS", "") != "window_size":
        raise ValueError(f"rows of several windows meet in case {number}: {', '.join(map(str, sorted(windows)))}")
    return [*found, *getattr(module, "simulated", lambda rows: [])(found)]


def extract(number: int, used: Profile, records: Sequence[Record], out: Path) -> Path:
    """Write the CSV of a case: ours, then the published. Raises ValueError where there is nothing of ours."""
    found = table(number, used, records)
    out.mkdir(parents=True, exist_ok=True)
    path = Path(f"{stem(number, used, out)}.csv")
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["case", "profile", *COLUMNS])
        writer.writerows([number, used.name, *_texts(row)] for row in (*found, *load(number).PUBLISHED))
    return path


def draw(number: int, path: Path) -> list[Path]:
    """Draw a case from its CSV, beside it. Raises ValueError where that is missing, or of several profiles."""
    found, names = read_csv(path)
    machines = {row.machine for row in found if row.origin == "run"}
    if len(names) > 1 or len(machines) > 1:
        raise ValueError(f"{path} mixes {'; '.join(sorted(names if len(names) > 1 else machines))}: one a figure")
    made = load(number).figure(found, f"profile {names.pop()}")
    return plot.save(made, path.with_suffix(""))


def read_csv(path: Path) -> tuple[list[Row], set[str]]:
    """The rows of a CSV and the profiles named in it."""
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; the case's extract script writes it") from error
    return [_row(line) for line in lines], {line["profile"] for line in lines}


def _texts(row: Row) -> list[str]:
    values = [getattr(row, name) for name in COLUMNS]
    return ["" if value is None else " ".join(value) if isinstance(value, tuple) else str(value) for value in values]


def _row(line: dict[str, str]) -> Row:
    kinds = {"num_layers": int, "hidden_size": int, "window_size": int, "num_runs": int}
    kinds |= {"value": float, "low": float, "high": float, "scatter": float, "x": float}  # type: ignore[dict-item]
    values: dict[str, Any] = {name: line[name] for name in COLUMNS if name in line}
    for name, kind in kinds.items():
        values[name] = kind(line[name]) if line[name] else None
    return Row(
        **{
            **values,
            "valid": line["valid"] == "True",
            "is_final": line["is_final"] == "True",
            "is_judged": line.get("is_judged") != "False",  # tables from before this column hold no such row
            "keys": tuple(line["keys"].split()),
        }
    )
