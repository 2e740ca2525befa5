"""A call that trains, as a value: what it asks for, made of the values of its options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.job_options import make_jobs, method_folders
from cli.place_choice import PlaceChoice
from harness.core.job import Job
from harness.gate.probe import Extent


@dataclass(frozen=True)
class Output:
    """What a call prints and writes beside records. A path of None: the call does not ask for that file."""

    as_json: bool
    shows_verdicts: bool  # True: print a table of verdicts, methods by models
    table: Path | None = None  # file for that table, in Markdown
    trace: Path | None = None  # file for a timeline of the run
    save: Path | None = None  # folder for the trained weights


@dataclass(frozen=True)
class Call:
    jobs: list[Job]
    folders: tuple[Path, ...]  # folders of methods
    place: PlaceChoice
    extent: Extent | None  # extent of the gate's probe; None: the usual one
    results: Path  # folder of records
    rerun: bool  # True: run jobs again that have a record
    output: Output

    @classmethod
    def of(cls, values: dict[str, Any], extent: Extent | None) -> Call:
        """Return the call with these values of a verb's options, by name. Raises ValueError for values that make no
        job."""
        folders, table = method_folders(values), values.get("out")
        shows_verdicts = len(values["model"]) > 1 or table is not None
        return cls(
            make_jobs(values, folders),
            folders,
            PlaceChoice.of(values),
            extent,
            values["results"],
            values["rerun"],
            Output(values["as_json"], shows_verdicts, table, values.get("trace"), values.get("save")),
        )
