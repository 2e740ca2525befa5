"""The verb `case`: makes the missing runs of one figure or of all, writes tables, draws figures."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cases import overlap
from harness.base.console import print_table
from harness.core.record import Record, added_folders, records_of
from harness.gate.probe import Extent
from harness.jobs.progress import reporter
from papers.claims.campaign import Campaign, RunChoice, closing_line
from papers.figures import case, case_files
from papers.figures.point import machine_of
from papers.figures.profile import CaseProfile


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


def collect(call: CaseCall) -> list[Record]:
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
            return overlap.collect(case_profile, call.results, out, call.only, report)
    numbers = case.numbers_of_all() if call.number == "all" else [int(call.number)]
    case_profile = dataclasses.replace(case_profile, repeats=call.repeats or case_profile.repeats)
    output = CaseOutput(call.results, out, call.only, is_one=len(numbers) == 1)
    if not call.only:
        seconds = math.inf if call.seconds is None else call.seconds
        return make(numbers, case_profile, output, RunChoice(None, seconds, call.probe), call.as_json)
    for number in numbers:
        if call.profile or call.machine or (not call.where and case.any_of(number, case_profile, records)):
            _write(number, case_profile, records, output)
            _write_added(number, case_profile, output)
        else:
            _write(number, None, records, output, call.where)
    return []


def make(
    numbers: Sequence[int], case_profile: CaseProfile, output: CaseOutput, choice: RunChoice, as_json: bool
) -> list[Record]:
    """Make the missing runs of the cases; then write tables and draw figures. Return the records of the runs that were
    made."""
    with reporter(as_json) as report:
        finished = _measure(Campaign(numbers, case_profile, output.results, choice, report), as_json)
        for number in numbers:
            case.load(number).measure(case_profile, output.results, report)
    records = records_of(output.results)
    for number in numbers:
        _write(number, case_profile, records, output)
        _write_added(number, case_profile, output)
    return finished


def _measure(campaign: Campaign, as_json: bool) -> list[Record]:
    seconds = campaign.choice.seconds
    runs = campaign.planned(seconds)
    rows = [run.to_dict() for run in runs]
    if as_json:
        print(json.dumps({"event": "plan", "points": rows}), flush=True)
    else:
        if len(campaign.numbers) > 1 or seconds < math.inf:
            print_table(list(rows[0]), [row.values() for row in rows], has_lines=True)
        print(closing_line(runs, campaign.case_profile), flush=True)
    campaign.run()
    return campaign.finished


def _write(
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
                rows = case.table(number, case_profile, records, output.results)
            else:
                rows = case.table_of_any_runs(number, records, where)
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


def _write_added(number: int, case_profile: CaseProfile, output: CaseOutput) -> None:
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
