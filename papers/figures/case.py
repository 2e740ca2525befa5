"""The base class of a case, the registry that finds cases, and the rows of their figures.

A case is a figure that is made from records. It is a class in a file named by the case's number. This project's cases
are in cases/, and are figures of the papers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from harness.base.checkout import ROOT
from harness.base.imported_file import errors_in_one_line, guard
from harness.base.json_object import JsonObject
from harness.base.registry import FileRegistry
from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from harness.devices import machine
from papers.figures import plot, points, profile
from papers.figures.point import METRICS, FigureRow, machine_of, row_of
from papers.figures.profile import PUBLISHED_WINDOW, CaseProfile

PUBLISHED_RUNS_FILE = ROOT / "claims" / "published.csv"  # a line for each published run that a figure draws
PUBLISHED_MACHINE = {"gpu": "V100-32GB, virtual machine"}


class Case(ABC):
    """The base class of every case. A case must define metric, methods and jobs(); everything else has a default."""

    title: ClassVar[str]  # default: the first line of the file's docstring
    metric: ClassVar[str] = ""  # a name in METRICS
    methods: ClassVar[Sequence[str]] = ()  # names of the methods, in the figure's order
    # names of the methods whose largest depth is searched before the case's jobs run
    searches: ClassVar[Sequence[str]] = ()
    axis: ClassVar[str] = ""  # name of the column whose values the figure's rows compare
    look: ClassVar[Mapping[str, Any]] = {}  # options of plot.figure()
    mixes_metrics: ClassVar[bool] = False  # True: some rows have another metric than the case's
    picks: ClassVar[bool] = False  # True: the figure can be drawn from any runs; pick() chooses the rows
    quick: ClassVar[Sequence[str]] = ()  # names of the methods that the quick demo runs in this case
    # False: `case all`, demo and notebook leave the case out, and no claim is about it
    in_all: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Set the class's title. Wrap its functions: an error in one is then reported in one line that names the
        file."""
        if "title" not in vars(cls):
            cls.title = str(sys.modules[cls.__module__].__doc__).partition("\n")[0]
        guard(cls, (OSError,))

    @abstractmethod
    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> Sequence[Job]:
        """Return the case's jobs in a profile. `depth_by_method`: by name of a method in
        `searches`, the largest depth that trained; a method whose largest depth is not known is left out."""

    def profiles(self, case_profile: CaseProfile) -> Sequence[CaseProfile]:
        """Return the profiles that the case's jobs belong to, when the call asks for the profile `case_profile`."""
        return (case_profile,)

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return the case's measured rows, in the order of the figure."""
        return points.rows_of_jobs(self.metric, records, self.jobs(case_profile, {}))

    def measure(  # noqa: B027  most cases measure nothing besides runs
        self, case_profile: CaseProfile, results: Path, report: Callable[[JsonObject], None]
    ) -> None:
        """Measure what the figure shows besides training runs, and write it to a file in the folder of results; do
        nothing if that file is there."""

    def beside(
        self, rows: Sequence[FigureRow], case_profile: CaseProfile, results: Path
    ) -> Sequence[FigureRow]:
        """Return rows made from the files that measure() has written."""
        return ()

    def kept(self, case_profile: CaseProfile, results: Path) -> Sequence[Path]:
        """Return the paths of the text files that beside() reads. The archive that `bundle` makes includes these
        files."""
        return ()

    def simulated(self, rows: Sequence[FigureRow]) -> Sequence[FigureRow]:
        """Return rows that are computed, not measured, to be shown beside the measured rows."""
        return ()

    def pick(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        """Return the rows that the figure shows. `rows`: rows of any runs, see table_of_any_runs()."""
        return list(rows)

    def draw(self, axes: plot.Axes, rows: list[FigureRow]) -> None:
        """Draw these rows into one panel of the figure."""
        plot.by_method(axes, rows, self.methods)

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        """Return the figure: these rows of ours beside the published rows. `note`: text for the caption."""
        return plot.figure(rows, self.metric, self.draw, note, **self.look)


class Cases(FileRegistry[int]):
    def add(self, places: Iterable[Path]) -> None:
        """Add the files of cases in these places, and load all cases, because a profile needs the searches of every
        case. Raises ValueError if a file does not load."""
        super().add(places)
        for number in numbers():
            load_case(number)


def _number_of_file(stem: str) -> int | None:
    match = re.fullmatch(r"case(\d{1,6})", stem)
    return int(match[1]) if match else None


REGISTRY = Cases("case", "cases", _number_of_file)


def numbers() -> list[int]:
    return sorted(REGISTRY.files())


def numbers_of_all() -> list[int]:
    """Return the numbers of the cases that `case all` includes."""
    return [number for number in numbers() if load_case(number).in_all]


def case_command(number: int, profile_name: str = "") -> str:
    """Return the command that runs a case; with --cases, if the case's file is not in cases/."""
    command = profile.profile_command(number, profile_name) if profile_name else f"./run.sh case {number}"
    folder = REGISTRY.files()[number].parent
    return command if folder == REGISTRY.project_path else f"{command} --cases {shlex.quote(str(folder))}"


def load_case(number: int) -> Case:
    """Return the case with this number. Raises ValueError if its file does not load, or if metric, methods or jobs() is
    missing."""
    path = REGISTRY.files()[number]
    case_class: type[Case] | None = REGISTRY.class_in(path, Case)
    if case_class is None:
        raise ValueError(
            f"{path} must hold one class of papers.figures.case.Case with jobs(); see CONTRIBUTING.md"
        )
    if case_class.metric not in [*METRICS]:
        raise ValueError(f"{path}: metric: expected one of {', '.join(METRICS)}, got {case_class.metric!r}")
    if not case_class.methods:
        raise ValueError(f"{path}: methods: expected names of methods, got none")
    with errors_in_one_line(path, "__init__()"):
        return case_class()


def profile_of(name: str | None, machine_name: str | None, facts: JsonObject | None = None) -> CaseProfile:
    """Return the profile with this name; None: this machine's default profile.

    The profile's memory sizes are those of the machine `machine_name`. If it is None, they are those in `facts`, which
    come from a record; if `facts` is None, too, they are those of this machine.
    """
    if facts is None:
        unusable = () if machine.devices()[0] == "cuda" else ("gpu", "gpu_bytes")
        facts = {key: value for key, value in machine.facts().items() if key not in unusable}
    methods = {name for number in numbers() for name in load_case(number).searches}
    return profile.make_profile(name or ("quick" if "gpu" in facts else "demo"), machine_name, methods, facts)


def possible_profiles(wanted: Iterable[tuple[str, str | None]], facts: JsonObject) -> Iterator[CaseProfile]:
    """Yield a profile for each pair of a profile's name and a machine's name. A profile that cannot be made from these
    facts is left out: sizes for a GPU need a GPU, for example."""
    for name, machine_name in wanted:
        with contextlib.suppress(ValueError, KeyError):
            yield profile_of(name, machine_name, facts)


def has_run_of(number: int, case_profile: CaseProfile, records: Sequence[Record]) -> bool:
    """True if one of the records is a run of this case in this profile."""
    profiles = load_case(number).profiles(case_profile)
    return any(_is_run_of(profiles, record) for record in records)


def _is_run_of(profiles: Sequence[CaseProfile], record: Record) -> bool:
    return record.origin == "run" and any(profile.is_of(record.job) for profile in profiles)


def has_job(case_profile: CaseProfile, job: Job) -> bool:
    """True if a case has this job in this profile; the job's depth and method do not matter."""
    profiles = (profile for number in numbers() for profile in load_case(number).profiles(case_profile))
    return any(profile.is_of(job) for profile in profiles)


def select_runs(number: int, case_profile: CaseProfile, records: Sequence[Record]) -> list[Record]:
    """Return the runs that a case may read in this profile, oldest first.

    If a method, by one release of its engine, has runs by its present code, its other runs are left out; if not, those
    by other code than its newest run. Raises ValueError if the runs are of several machines.
    """
    profiles = load_case(number).profiles(case_profile)
    runs = [record for record in records if _is_run_of(profiles, record)]
    current_trainers = {points.trainer_of(record) for record in runs if points.is_current(record)}
    runs = [
        record
        for record in runs
        if points.is_current(record) or points.trainer_of(record) not in current_trainers
    ]
    runs = points.of_newest_code(runs)
    machines = {machine_of(record) for record in runs}
    if len(machines) > 1:
        raise ValueError(
            f"expected records of one machine, got {'; '.join(sorted(machines))}: try --results with a folder for each"
            " machine"
        )
    return runs


def measured_rows(number: int, case_profile: CaseProfile, records: Sequence[Record]) -> list[FigureRow]:
    """Return a case's measured rows, from those records that the case may read."""
    return load_case(number).table(select_runs(number, case_profile, records), case_profile)


@functools.cache
def published_rows(number: int) -> list[FigureRow]:
    """Return the published rows of a case.

    A row's value is the median of iterations 11 to 50 in the log of one process. One run was killed: its value is that
    of the only interval in its log.
    """
    import pandas

    frame = pandas.read_csv(PUBLISHED_RUNS_FILE, dtype=str, keep_default_na=False)
    is_of_case = frame["cases"].str.split().map(lambda cases: str(number) in cases)
    rows = []
    for run in frame[is_of_case].itertuples():
        options = {"window_size": int(run.window_size)} if run.window_size else {}
        job = Job(
            run.method, Workload(num_layers=int(run.num_layers)), options, device="cuda", steps=1, warmup=0
        )
        gate = Gate("failed" if run.reason else "tolerance", "", run.reason)
        record = Record(
            job,
            "",
            run.status,
            reason=run.reason,
            origin="published",
            clock="cuda",
            machine=PUBLISHED_MACHINE,
            step_seconds=[float(run.step_ms) / 1000],
            gate=gate,
        )
        rows.append(dataclasses.replace(row_of(load_case(number).metric, [record]), keys=()))
    return rows


def figure_rows(
    number: int, case_profile: CaseProfile, records: Sequence[Record], results: Path | None = None
) -> list[FigureRow]:
    """Return our rows of a case, measured and simulated. `results`: the folder of the records, which may hold files
    from which a case makes further rows; None: no such rows. Raises ValueError if there is no measured row, or if the
    rows have several machines or windows."""
    this_case, rows = load_case(number), measured_rows(number, case_profile, records)
    if not rows:
        raise ValueError(
            f"no record of profile {case_profile.name} here; try {case_command(number, case_profile.name)} first"
        )
    windows = {row.window_size for row in rows if row.status == "ok" and row.window_size}
    if len(windows) > 1 and this_case.axis != "window_size":
        raise ValueError(
            f"case {number}: expected runs of one window size, got {', '.join(map(str, sorted(windows)))}"
        )
    if results:
        rows = [*rows, *this_case.beside(rows, case_profile, results)]
    return [*rows, *this_case.simulated(rows)]


def rows_of_any_runs(number: int, records: Sequence[Record], where: Sequence[str] = ()) -> list[FigureRow]:
    """Return our rows of a case, made from any runs: runs by hand, of any sizes, and imported logs. `where` selects
    records by texts NAME=VALUE.

    Runs by other code than their method's newest run are left out. All runs of a figure must have the same machine,
    device, dtype, sizes of a step and budget (points.FACTS_OF_FIGURE). Raises ValueError if they differ, or if there is
    no row. The case's pick() chooses the rows that its figure shows. If runs of a method differ in their window, cases
    about windows or largest sizes use all runs, and other cases use those with the published window.
    """
    this_case, values = load_case(number), points.selected_values(where)
    if not this_case.picks:
        raise ValueError(
            f"case {number}: expected --profile, because this case draws only its own runs; try"
            f" {case_command(number)} first"
        )
    results = [record for record in records if record.job.method in this_case.methods and record.is_result]
    selected = [record for record in results if points.has_selected_values(record, values)]
    runs = points.of_newest_code(selected)
    if num_others := len(selected) - len(runs):
        text = f"{num_others} of {len(selected)} runs left out: made by other code than their method's newest run"
        print(f"case {number}: {text}", file=sys.stderr)
    if not runs:
        selection = f" with {' and '.join(where)}" if where else ""
        names = ", ".join(this_case.methods)
        raise ValueError(
            f"no record of {names}{selection} in these results; try {case_command(number)}, or a run with -m"
        )
    facts = [points.record_facts(record) for record in runs]
    points.check_alike(number, {name: [fact[name] for fact in facts] for name in points.FACTS_OF_FIGURE})
    rows = points.rows_of_jobs(this_case.metric, runs)
    is_of_one_window = this_case.axis != "window_size" and this_case.metric != "params"
    if is_of_one_window and any(row.window_size == PUBLISHED_WINDOW for row in rows):
        rows = [row for row in rows if row.window_size in (None, PUBLISHED_WINDOW)]
    picked = this_case.pick(rows)
    if is_of_one_window:
        windows = [str(row.window_size) for row in picked if row.status == "ok" and row.window_size]
        points.check_alike(number, {"window_size": windows})
    return picked
