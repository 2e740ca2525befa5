"""Runs a job at another place, in a container or on a cluster's node: makes the order here, performs it there, and
records the job's end.

The places are the files of harness/places; each holds one class of Place.

At the place, launch.py runs as on this machine and writes the record into the same folder. An order is plain data. The
caller chooses the file names of record and log (their stem), so that the caller can write a record itself if the order
left none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import harness.places
from harness.base.child_process import interrupt_here, when_closed
from harness.base.registry import FileRegistry
from harness.core import failures, log_lines
from harness.core.job import Job
from harness.core.record import Record
from harness.devices import machine
from harness.run.launch import Report, launch
from harness.run.prepare import prepare

# Environment variables that change a job's speed or the order of its sums; the place gets the caller's values.
FORWARDED = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", *machine.KERNEL_VARIABLES)
KeyedJobs = list[tuple[Job, str]]  # resolved jobs, each with its key
ORDERED = "ordered"  # phase of a job whose worker has not reported yet


class Place(ABC):
    """A place that runs jobs, other than this process's machine."""

    is_parallel: ClassVar[bool] = False  # True: launch() should get several jobs at once
    # The options that the place adds to the command line, beside --on: decorators of click.option() by the option's
    # name.
    cli_options: ClassVar[dict[str, Callable[[Any], Any]]] = {}

    @classmethod
    @abstractmethod
    def of(cls, words: dict[str, Any], device: str) -> Place:
        """Return the place for jobs on this device; `words`: the values of the call's options. Raises Unavailable if
        the place cannot be reached."""

    @abstractmethod
    def context(self) -> dict[str, str]:
        """Return the facts of the place on which results depend. These facts are part of a job's key, and override
        those of machine.checked()."""

    @abstractmethod
    def launch(self, jobs: KeyedJobs, results: Path, folders: tuple[Path, ...], report: Report) -> list[Path]:
        """Run the jobs; return the paths of their records, in order."""

    def draft(self, jobs: KeyedJobs, folders: tuple[Path, ...]) -> str:
        """Return, as text, the data that launch() would submit. Raises ValueError if the place has no such text."""
        raise ValueError(no_draft())


REGISTRY = FileRegistry("place", harness.places, str)


def load(name: str) -> type[Place]:
    """Return the class of a place. Raises ValueError with one line of text if its file does not load or holds no class
    of Place."""
    file = REGISTRY.files()[name]
    found: type[Place] | None = REGISTRY.class_in(file, Place)
    if found is None:
        raise ValueError(f"{file} must hold one class of harness.places.shared.place.Place; see CONTRIBUTING.md")
    return found


def loadable() -> dict[str, type[Place]]:
    """Return the classes of all places whose files load, by name."""
    found = {}
    for name in REGISTRY.files():
        with contextlib.suppress(ValueError):
            found[name] = load(name)
    return found


def drafting() -> str:
    """Return the names of the places that have a draft(), joined by "or"."""
    return " or ".join(name for name, found in loadable().items() if found.draft is not Place.draft)


def no_draft() -> str:
    return f"--dry-run: expected --on {drafting()}, whose manifest is printed; try ./run.sh plan for sizes that fit"


def order(job: Job, key: str, stem: Path, folders: tuple[Path, ...]) -> dict[str, Any]:
    """Return an order for perform()."""
    # LD_PRELOAD names a library of this machine, which the other machine may lack.
    environment = {name: os.environ[name] for name in FORWARDED if name in os.environ and name != "LD_PRELOAD"}
    where = {"stem": str(stem), "folders": list(map(str, folders))}
    return {"job": job.to_dict(), "key": key, **where, "environment": environment}


def perform(order: dict[str, Any], report: Report = lambda event: None) -> None:
    """Run an order at the place: compile what is missing, run the job, write its record."""
    job, stem, folders = Job.from_dict(order["job"]), Path(order["stem"]), tuple(map(Path, order["folders"]))
    os.environ.update(order["environment"])
    if job.device not in machine.devices():
        reason = f"expected a {job.device} device there, got {' and '.join(machine.devices())}"
        write_end(job, order["key"], stem, failures.ended("unavailable", "device", reason))
        return
    prepare(job, stem.parent, folders, report)
    launch(job, order["key"], stem.parent, folders, report, stem=stem)


def write_end(job: Job, key: str, stem: Path, end: failures.Failure, seen: dict[str, Any] | None = None) -> Path:
    """Write the record, and the log's closing line, of an order that left no record. `seen`: the known fields of the
    record."""
    path = Path(f"{stem}.json")
    fields = {"phase": ORDERED, "started": time.time(), "clock": job.device, **(seen or {})}
    record = Record(job, key, **end.changes({}), **fields)
    record.write(path)
    with open(f"{stem}.txt", "a") as log:
        log.write(log_lines.end_line(job, end.status, record.phase, len(record.losses), end.reason) + "\n")
    return path


def place_record(path: Path, place: dict[str, Any], evidence: dict[str, Any], end: failures.Failure | None) -> Path:
    """Add to a record the place, the place's evidence of the job's end and, unless `end` is None, the end as the place
    names it."""
    record = Record.read(path)
    software = {**record.software, "commit": machine.software()["commit"]}  # the place runs this checkout's source code
    changes: dict[str, Any] = end.changes(record.evidence) if end else {"evidence": record.evidence}
    changes |= {"machine": {**record.machine, **place}, "evidence": {**changes["evidence"], **evidence}}
    dataclasses.replace(record, software=software, **changes).write(path)
    return path


def main() -> None:
    """Entry point at the place.

    The order comes on standard input, which stays open. If standard input closes, the calling process is gone, and the
    run ends as interrupted. Events go to standard output, one JSON object a line.
    """
    order = json.loads(sys.stdin.readline())
    when_closed(0, interrupt_here)
    try:
        perform(order, lambda event: print(json.dumps(event), flush=True))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
