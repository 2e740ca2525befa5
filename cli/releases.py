"""The verb `releases`: which releases of the engines train? It runs cells of case 10, and writes and draws the map."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cli import exit_codes, options
from cli.options import FILE, FOLDER, OptionValues, check_writable
from harness.base.checkout import ROOT
from harness.base.console import print_table
from harness.base.whole_file import check_replaceable
from harness.core import method
from harness.core.record import Record, records_of
from harness.gate.probe import NONE, Extent
from harness.jobs import verdict_table
from harness.jobs.progress import reporter
from harness.jobs.sweep import Sweep
from harness.plan import run_time
from harness.plan.fit import Planned, resolve
from papers.figures import case, case_files
from papers.figures.profile import CaseProfile

CASE_NUMBER = 10
TITLE = "Which releases train? The gate's verdicts, settings by releases"
CELL_SECONDS, INSTALL_SECONDS = 5.0, 20.0  # on 2 cores
# How runs end that have no result and would end so again.
ENDS_WITHOUT_RESULT = ("crash", "timeout", "unavailable")
UNREACHABLE_TEXT = "cannot be reached"  # part of a reason that may be gone at the next call


@click.command()
@click.option("--only", metavar="ENGINE", help="Only this engine, such as deepspeed.")
@click.option(
    "--setting", "names", metavar="NAME", multiple=True, help="Only this setting; several: repeat it."
)
@click.option("--since", metavar="RELEASE", default="", help="Only this release and later ones.")
@click.option("--until", metavar="RELEASE", default="", help="Only this release and earlier ones.")
@click.option(
    "--release",
    "versions",
    metavar="RELEASE",
    multiple=True,
    help="Only this release, which may be newer than the map; several: repeat it.",
)
@click.option(
    "--quick", is_flag=True, help="Only releases just before and after the changes that public reports name."
)
@click.option(
    "--script",
    metavar="SETTING@RELEASE",
    help="Print a script that shows this cell without this project; run nothing.",
)
@click.option(
    "--out",
    type=FILE,
    metavar="FILE",
    help="File to write the map to, in Markdown. Default: releases.md beside the records.",
)
@click.option(
    "--results", type=FOLDER, default=ROOT / "results" / "releases-runs", help="Folder of the map's records."
)
@click.option("--rerun", is_flag=True, help="Run the chosen cells again, also those with a record.")
@options.probe
@options.as_json
def releases(extent: Extent | None, **values: Any) -> None:
    """Tell which releases of the engines train like plain PyTorch, in which settings. A cell with a record is not run
    again.

    Each release is installed once into a folder of its own below .venv. A cell takes about 5 seconds, so a call
    without options takes two hours: try --quick, or --setting. Cells are judged without the gate's probe;
    --probe-layers adds it.
    """
    from cases._release_script import script

    if values["script"]:
        _check_alone("script")
        name, _, release = values["script"].partition("@")
        print(script(name, release), end="")
        return
    profile = case.profile_of(None, None)
    cells = _chosen_cells(values, has_gpu=profile.device == "cuda")
    results, as_json = values["results"], values["as_json"]
    out = values["out"] or results / "releases.md"
    check_replaceable(out, f"# {TITLE}".encode())
    check_writable(results)
    check_writable(out.resolve().parent, "--out")
    plans = _planned_cells(profile, cells)
    with reporter(as_json) as report:
        sweep = Sweep(results, (), report, values["rerun"], probe=extent or NONE, is_timed=False)
        records = _run_missing_cells(plans, sweep, as_json)
    _write_map(profile, results, out, as_json)
    sys.exit(exit_codes.of_records(records, is_sweep=True))


def _chosen_cells(values: OptionValues, has_gpu: bool) -> list[tuple[str, str]]:
    """Return the chosen cells, each a setting and a release."""
    from cases.case10 import CellChoice, cells_of

    choice = CellChoice(
        values["only"],
        values["names"],
        values["since"],
        values["until"],
        values["versions"],
        is_quick=values["quick"],
        has_gpu=has_gpu,
    )
    if not (cells := cells_of(choice)):
        raise ValueError(
            "expected at least one cell, got none by these options; try other releases, or another row"
        )
    return cells


def _planned_cells(profile: CaseProfile, cells: Sequence[tuple[str, str]]) -> list[Planned]:
    """Return a planned job for each cell that has a plan here; print why the others have none."""
    from cases.case10 import job_of

    plans: list[Planned] = []
    left_out: list[str] = []
    for name, release in cells:
        try:
            plans.append(resolve(job_of(profile, name, release)))
        except ValueError as error:  # several ranks, and too few GPUs
            left_out.append(f"{name}@{release}: {error}")
    if not plans:
        raise ValueError(left_out[0])
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    return plans


def _check_alone(name: str) -> None:
    """Raise ValueError if the call has another option than the one of this name."""
    context = click.get_current_context()
    for param in context.command.params:
        if (
            param.name != name
            and context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        ):
            raise ValueError(
                f"--{name}: expected no other option beside it, got {param.opts[0]}; leave it out"
            )


def _run_missing_cells(plans: Sequence[Planned], sweep: Sweep, as_json: bool) -> list[Record]:
    """Run the jobs without a record, judge all, and return a record of each job."""
    keys = [sweep.key(planned.job) for planned in plans]
    recorded = {} if sweep.rerun else {record.key: record for record in sweep.records.values()}
    result_keys = {record.key for record in recorded.values() if record.is_lasting}
    failed_records = {
        key: record for key, record in recorded.items() if key not in result_keys and _ends_again(record)
    }
    missing_jobs = [
        planned.job
        for planned, key in zip(plans, keys, strict=True)
        if key not in result_keys and key not in failed_records
    ]
    to_install = {method.create(job.method, job.options).to_build() for job in missing_jobs} - {None}
    seconds = len(missing_jobs) * CELL_SECONDS + len(to_install) * INSTALL_SECONDS
    if as_json:
        print(
            json.dumps(
                {"event": "plan", "cells": len(plans), "to_run": len(missing_jobs), "seconds": seconds}
            ),
            flush=True,
        )
    else:
        time = f", about {run_time.duration_text(seconds)}" if missing_jobs else ""
        print(f"{len(plans)} cells, {len(missing_jobs)} to run{time}", flush=True)
    to_judge = [planned for planned, key in zip(plans, keys, strict=True) if key not in failed_records]
    records = iter(sweep.run(to_judge))
    return [failed_records[key] if key in failed_records else next(records) for key in keys]


def _ends_again(record: Record) -> bool:
    """True if a second run would end like this one, which has no result."""
    return record.status in ENDS_WITHOUT_RESULT and UNREACHABLE_TEXT not in record.reason


def _write_map(profile: CaseProfile, results: Path, out: Path, as_json: bool) -> None:
    """Write the map of all recorded cells as a page in Markdown, a table and a figure, and print it."""
    from cases._release_words import PAGE_HEADINGS, cell_kind, page_notes, page_rows

    rows = case.figure_rows(CASE_NUMBER, profile, records_of(results))
    page = verdict_table.Table(TITLE, PAGE_HEADINGS, list(page_rows(rows)), list(page_notes(rows)))
    verdict_table.write_markdown(out, shlex.join(["./run.sh", *sys.argv[1:]]), page)
    table = case_files.write_rows(CASE_NUMBER, profile.name, rows, results / "figures")
    files = [out, table, *case_files.draw(CASE_NUMBER, table)]
    if as_json:
        for row in rows:
            print(
                json.dumps(
                    {
                        "setting": row.series,
                        "release": row.group,
                        "verdict": cell_kind(row),
                        "text": row.reason,
                    }
                )
            )
        return
    print_table(PAGE_HEADINGS[:3], [row[:3] for row in page.rows], has_lines=True)
    print(", ".join(map(str, files)))
