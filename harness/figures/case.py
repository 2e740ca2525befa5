"""Cases: one file in cases/ is one figure of the papers, made of records and nothing else.

A case has the METRIC of its figure, its METHODS, those of them whose largest size is searched first (SEARCHES), the
depths or windows to run by kind of profile (RUNS), and jobs(used, sizes): the runs of a profile, where `sizes` are the
largest trained depths of the searched methods, as far as known. It may have
    table(records, used)    its rows in the figure's order, else one for each job that has a record
    draw(axes, rows)        one panel, else a bar for each method
    LOOK                    options of plot.figure
    figure(rows, note)      the whole figure, instead of draw
    AXIS                    the column in which its rows differ
    pick(rows)              of the rows of any runs those that its figure shows (harness/figures/any_runs.py)
    profiles(used)          the profiles of its jobs, where they are of others than `used` alone
    measure(used, results, report)  what its figure shows beside runs, measured where it is not there yet
    beside(rows, used, results)     rows of that
    kept(used, results)     the files that beside() reads: texts, which an archive takes along
    simulated(rows)         rows beside the measured ones, made of them by arithmetic
Cases without a number are no figures of the papers and no part of `all`: main() does everything, and reports call
profiles(), shown(), table(), extract() and draw().
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, GeneratorType
from typing import TYPE_CHECKING, Any

import cases
from harness.base.checked_data import checked
from harness.base.checkout import ROOT
from harness.base.foreign_file import read_text
from harness.base.imported_file import told
from harness.base.registry import FileRegistry
from harness.base.whole_file import write_whole
from harness.core import method
from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from harness.devices import machine
from harness.figures import plot, profile
from harness.figures.point import METRICS, FigureRow, machine_of, row_of
from harness.figures.profile import PROBE, Profile
from harness.jobs.depth_search import Answer, Outcome, Trial
from harness.jobs.sweep import context

if TYPE_CHECKING:
    from pandas import DataFrame

# The start of a text that a spreadsheet would compute; numbers are none.
FORMULA = re.compile(r"^(?=[=+\-@\t\r])(?![-+]?[\d.]+(?:e[-+]?\d+)?$)")
PUBLISHED = ROOT / "claims" / "published.csv"  # a line for each of the artifact's runs that a figure draws
PUBLISHED_MACHINE = {"gpu": "V100-32GB, virtual machine"}
EDITED = "its line of the table is not as it was extracted"
COLUMNS = [field.name for field in dataclasses.fields(FigureRow) if field.name != "values"]


class Cases(FileRegistry[int]):
    def add(self, places: Iterable[Path]) -> None:
        """Raises ValueError where one does not load: whatever makes profiles asks every case."""
        super().add(places)
        for number in numbers():
            load(number)


def _number(stem: str) -> int | None:
    found = re.fullmatch(r"case(\d{1,6})", stem)
    return int(found[1]) if found else None


REGISTRY = Cases("case", cases, _number)


def numbers() -> list[int]:
    return sorted(REGISTRY.files())


def call(number: int, profile_name: str = "") -> str:
    """The command that runs a case, wherever its file is."""
    words = profile.call(number, profile_name) if profile_name else f"./run.sh case {number}"
    folder = REGISTRY.files()[number].parent
    return words if folder == REGISTRY.own else f"{words} --cases {shlex.quote(str(folder))}"


def others() -> list[str]:
    return sorted(path.stem for path in REGISTRY.own.glob("[!_]*.py") if not path.stem.startswith("case"))


def load(number: int | str) -> Any:
    """The case of a number or a name, as a module. Raises ValueError that names the file which does not load."""
    if isinstance(number, str):
        return importlib.import_module(f"cases.{number}")
    path = REGISTRY.files()[number]
    module = REGISTRY.module(path)
    if lacking := [name for name in ("METRIC", "METHODS", "SEARCHES", "RUNS", "jobs") if not hasattr(module, name)]:
        raise ValueError(f"{path} is no case: expected {', '.join(lacking)}; see CONTRIBUTING.md")
    if module.METRIC not in METRICS:
        raise ValueError(f"{path}: METRIC: expected one of {', '.join(METRICS)}, got {module.METRIC!r}")
    for name, item in vars(module).items():
        if isinstance(item, FunctionType) and item.__module__ == module.__name__ and not hasattr(item, "__wrapped__"):
            setattr(module, name, _told_in_a_line(item, path))
    return module


def _told_in_a_line(function: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """The function of a case; where it fails or would end the process, it raises ValueError, one line."""
    guarded = functools.partial(told, f"{function.__name__}()", path, (OSError,))

    def each(found: Iterator[Any]) -> Iterator[Any]:
        with guarded():
            yield from found

    @functools.wraps(function)
    def call(*words: Any, **options: Any) -> Any:
        with guarded():
            found = function(*words, **options)
        return each(found) if isinstance(found, GeneratorType) else found

    return call


def profile_of(name: str | None, on: str | None, facts: dict[str, Any] | None = None) -> Profile:
    """The named profile, else the default of this machine. Memories are those of the named machine `on`, else those in
    `facts` (of a record), else this machine's."""
    if facts is None:
        drop = () if machine.devices()[0] == "cuda" else ("gpu", "gpu_bytes")
        facts = {key: value for key, value in machine.facts().items() if key not in drop}
    methods = {name for number in numbers() for name in load(number).SEARCHES}
    return profile.make(name or ("quick" if "gpu" in facts else "demo"), on, methods, facts)


def possible(wanted: Iterable[tuple[str, str | None]], facts: dict[str, Any]) -> Iterator[Profile]:
    """Of these names and machines the profiles that there are with these facts: no sizes of a GPU without one."""
    for name, on in wanted:
        with contextlib.suppress(ValueError, KeyError):
            yield profile_of(name, on, facts)


def profiles(number: int, used: Profile) -> Sequence[Profile]:
    """The profiles of a case's jobs."""
    module = load(number)
    return module.profiles(used) if hasattr(module, "profiles") else (used,)


def any_of(number: int, used: Profile, records: Sequence[Record]) -> bool:
    """True if some run is of this case in this profile."""
    its = profiles(number, used)
    return any(record.origin == "run" and each.is_of(record.job) for record in records for each in its)


def is_of(used: Profile, job: Job) -> bool:
    """True if some case has this job in this profile, at any depth and of any method."""
    return any(each.is_of(job) for number in numbers() for each in profiles(number, used))


def label(name: str) -> str:
    return method.load(name).label


# ---- Records to rows


def select(number: int, used: Profile, records: Sequence[Record]) -> list[Record]:
    """The runs of a profile that a case may read, oldest first; of a method only those by its present code, if any.
    Raises ValueError where they are of several machines."""
    its = profiles(number, used)
    own = [record for record in records if record.origin == "run" and any(each.is_of(record.job) for each in its)]
    fresh = {record.job.method for record in own if is_current(record)}
    own = [record for record in own if record.job.method not in fresh or is_current(record)]
    machines = {machine_of(record) for record in own}
    if len(machines) > 1:
        raise ValueError(
            f"expected records of one machine, got {'; '.join(sorted(machines))}: keep each machine's in its own folder"
            " and name one with --results"
        )
    return own


_context = functools.cache(context)


def key(job: Job) -> str:
    """The identity that a run of this resolved job would have here and now."""
    return job.key(**_context(job.method, job.workload.corpus))


def is_current(record: Record) -> bool:
    """True if a run here and now would measure the same."""
    return record.job.method in method.names() and record.key == key(record.job)


def repeats(job: Job, records: Sequence[Record]) -> list[Record]:
    """The measurements of a job (its options and any others), by the newest code that measured it. Results come before
    interrupted attempts, measurements before refusals by plan."""
    same = [
        record
        for record in records
        if dataclasses.replace(record.job, options={}) == dataclasses.replace(job, options={})
        and job.options.items() <= record.job.options.items()
    ]
    same = [record for record in same if record.is_result] or same
    same = [record for record in same if record.phase != "plan"] or same
    return [record for record in same if record.key == same[-1].key]


def rows(metric: str, jobs: Sequence[Job], records: Sequence[Record]) -> list[FigureRow]:
    """A row for each job that has a record."""
    return [row_of(metric, found) for job in jobs if (found := repeats(job, records))]


def measured(number: int, used: Profile, records: Sequence[Record]) -> list[FigureRow]:
    """The rows of a case, of the records that it may read."""
    module, own = load(number), select(number, used, records)
    return module.table(own, used) if hasattr(module, "table") else rows(module.METRIC, module.jobs(used, {}), own)


def largest(name: str, records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Of a search: the records of the largest depth that trained below every failure, and one of the smallest depth
    that failed above every success. Either may be empty."""
    probes = _probes(name, records)
    depths, answer = _search(probes)
    best = [record for record in depths.get(answer.largest, []) if record.status == "ok"]
    failed = depths[answer.failed_above] if answer.failed_above else []
    if not depths:
        failed = probes  # why there is no answer
    return repeats(best[-1].job, best) if best else [], failed[-1:]


def is_searched(name: str, records: Sequence[Record]) -> bool:
    """True if a search is over: all up to the largest depth trained, and the next one failed, or was not run because
    by plan it takes more host memory than the machine has."""
    depths, answer = _search(_probes(name, records))
    if answer.failed_above is None:
        best = depths.get(answer.largest)
        return best is not None and _is_refused_beyond(best[-1])
    return answer.first_failing == answer.largest + 1 and answer.failed_above == answer.last_passing + 1


def _probes(name: str, records: Sequence[Record]) -> list[Record]:
    wanted = (name, PROBE["steps"], PROBE["warmup"])
    return [each for each in records if (each.job.method, each.job.steps, each.job.warmup) == wanted]


def _search(probes: Sequence[Record]) -> tuple[dict[int, list[Record]], Answer]:
    """The runs with a result by number of layers, and what follows from them."""
    depths: dict[int, list[Record]] = {}
    for record in probes:
        if record.is_result and record.phase != "plan":
            depths.setdefault(record.job.workload.num_layers, []).append(record)
    passed = {depth: any(record.status == "ok" for record in found) for depth, found in depths.items()}
    return depths, Answer(trials=[Trial(depth, Outcome(each)) for depth, each in passed.items()])


def _is_refused_beyond(record: Record) -> bool:
    """True if one more layer would by plan take more host memory than the machine of the record has."""
    job, have = record.job, record.machine.get("host_bytes")
    if have is None or job.method not in method.names():
        return False
    try:
        deeper = job.workload.at_depth(job.workload.num_layers + 1)
        plan = method.create(job.method, job.options).plan(deeper, job.budget.room)
    except ValueError:  # options of another state of the code
        return False
    return plan.host_bytes + (0 if job.device == "cuda" else plan.device_bytes) > have


def sizes(names: Sequence[str], records: Sequence[Record]) -> dict[str, int]:
    """The largest depth that each method trained, where the gate passed."""
    found = {name: largest(name, records)[0] for name in names}
    return {name: best[-1].job.workload.num_layers for name, best in found.items() if best and best[-1].gate.passed}


@functools.cache
def published(number: int) -> list[FigureRow]:
    """The published rows of a case: the median of iterations 11 to 50 of one process, by its log; of the killed run its
    only interval."""
    import pandas

    frame, found = pandas.read_csv(PUBLISHED, dtype=str, keep_default_na=False), []
    for run in frame[frame["cases"].str.split().map(lambda cases: str(number) in cases)].itertuples():
        options = {"window_size": int(run.window_size)} if run.window_size else {}
        job = Job(run.method, Workload(num_layers=int(run.num_layers)), options, device="cuda", steps=1, warmup=0)
        gate = Gate("failed" if run.reason else "tolerance", "", run.reason)
        record = Record(
            job, "", run.status, reason=run.reason, origin="published", clock="cuda", machine=PUBLISHED_MACHINE,
            step_seconds=[float(run.step_ms) / 1000], gate=gate,
        )  # fmt: skip
        found.append(dataclasses.replace(row_of(load(number).METRIC, [record]), keys=()))
    return found


# ---- Rows to files


def stem(number: int, name: str, out: Path) -> Path:
    return out / f"case{number}_{name}"


def table(number: int, used: Profile, records: Sequence[Record], results: Path | None = None) -> list[FigureRow]:
    """Our rows of a case; `results`: the folder that the records are in. Raises ValueError where there are none, or
    where they would mix machines or windows."""
    module, found = load(number), measured(number, used, records)
    if not found:
        raise ValueError(f"no record of profile {used.name} here; try {call(number, used.name)} first")
    windows = {row.window_size for row in found if row.status == "ok" and row.window_size}
    if len(windows) > 1 and getattr(module, "AXIS", "") != "window_size":
        raise ValueError(f"expected one window in case {number}, got {', '.join(map(str, sorted(windows)))}")
    if results and hasattr(module, "beside"):
        found = [*found, *module.beside(found, used, results)]
    return [*found, *getattr(module, "simulated", lambda rows: [])(found)]


def extract(number: int, used: Profile, records: Sequence[Record], out: Path, results: Path | None = None) -> Path:
    """Write the CSV of a case: ours, then the published. Raises ValueError where there is nothing of ours."""
    return write_rows(number, used.name, table(number, used, records, results), out)


def write_rows(number: int, name: str, rows: Sequence[FigureRow], out: Path) -> Path:
    """The CSV of these rows, then the published, of a profile or what else has a name."""
    import pandas

    found = [*rows, *published(number)]
    frame = pandas.DataFrame([vars(row) for row in found], columns=COLUMNS, dtype=object)
    frame["keys"] = frame["keys"].map(" ".join)
    frame.insert(0, "case", number)
    frame.insert(1, "profile", name)
    out.mkdir(parents=True, exist_ok=True)
    path = Path(f"{stem(number, name, out)}.csv")
    cells = pandas.read_csv(io.StringIO(_csv(frame)), dtype=str, keep_default_na=False)
    cells["check"] = [_check(line) for line in cells.to_dict("records")]
    write_whole(path, cells.to_csv(index=False, lineterminator="\n"))
    return path


def _check(line: Mapping[str, str]) -> str:
    """What tells that a line of a CSV is as it was written: a hash of its cells."""
    cells = [f"{name}={text}" for name, text in line.items() if name != "check"]
    return hashlib.sha256("\n".join(cells).encode(errors="replace")).hexdigest()[:12]


def write_table(frame: DataFrame, path: Path) -> None:
    write_whole(path, _csv(frame))


def _csv(frame: DataFrame) -> str:
    """Without cells that a spreadsheet would compute: an apostrophe goes before their text."""
    safe = frame.map(lambda cell: FORMULA.sub("'", cell) if isinstance(cell, str) else cell)
    return safe.to_csv(index=False, lineterminator="\n")


def figure(number: int, rows: Sequence[FigureRow], note: str) -> plot.Figure:
    module = load(number)
    if hasattr(module, "figure"):
        return module.figure(rows, note)
    draw = getattr(module, "draw", functools.partial(plot.by_method, names=module.METHODS))
    return plot.figure(rows, module.METRIC, draw, note, **getattr(module, "LOOK", {}))


def draw(number: int, path: Path) -> list[Path]:
    """Draw a case from its CSV, beside it. Raises ValueError where that is missing, or of several profiles."""
    found, names = read_csv(path)
    module, metrics = load(number), {row.metric for row in found}
    if not found or not (hasattr(module, "figure") or metrics == {module.METRIC}):
        kinds = ", ".join(sorted(metrics)) or "no row"
        raise ValueError(f"{path} is no table of case {number}: expected rows of {module.METRIC}, got {kinds:.80}")
    machines = {row.machine for row in found if row.origin == "run"}
    if len(names) > 1 or len(machines) > 1:
        raise ValueError(f"{path} mixes {'; '.join(sorted(names if len(names) > 1 else machines))}: draw each alone")
    return plot.save(figure(number, found, f"profile {names.pop()}"), path.with_suffix(""))


def read_csv(path: Path) -> tuple[list[FigureRow], set[str]]:
    """The rows of a CSV, and the profiles named in it. A row that was changed since it was written is not valid."""
    import pandas

    try:
        frame = pandas.read_csv(io.StringIO(read_text(path)), dtype=str, keep_default_na=False)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; the case's extract script writes it") from error
    except ValueError as error:  # pandas' own for what is no table
        raise ValueError(f"{path} is no table of a case: {' '.join(str(error).split())}") from error
    is_edited = [line.get("check") != _check(line) for line in frame.to_dict("records")]
    if missing := {"profile", "keys"} - set(frame):
        raise ValueError(f"{path} is no table of a case: expected a column {', '.join(sorted(missing))}")
    frame = frame.replace(r"^'(?=[=+\-@\t\r])", "", regex=True)
    frame["keys"] = frame["keys"].str.split()
    lines = [{name: line[name] for name in COLUMNS if line.get(name, "")} for line in frame.to_dict("records")]
    needed = {"window_size": None, "value": None}  # fields without a default
    try:
        rows = checked(list[FigureRow], [needed | line for line in lines])
        unknown = [row.method for row in rows if row.method not in method.names()]
        numbers = (each for row in rows for each in vars(row).values() if isinstance(each, float))
        odd = [each for each in numbers if not math.isfinite(each)]
        odd += [row.value for row in rows if row.value is not None and row.value < 0]
        if unknown or odd:
            raise ValueError(f"expected methods and finite numbers from 0, got {(unknown or odd)[0]!r:.80}")
    except ValueError as error:
        raise ValueError(f"{path} is no table of a case: {error}") from error
    rows = [
        dataclasses.replace(row, valid=False, reason=EDITED) if edited else row
        for row, edited in zip(rows, is_edited, strict=True)
    ]
    return rows, set(frame["profile"])
