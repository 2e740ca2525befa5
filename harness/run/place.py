"""Runs a job at another place, such as a container or a cluster's node: makes an order here, performs the order at the
place, and records the job's end.

The places are the files of places; each file holds one class of Place.

At the place, launch.py runs as on this machine and writes the record into the same folder. An order is plain data. The
caller chooses the common stem of the file names of record and log. So the caller itself can write a record if the place
has left none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from harness.base.child_process import interrupt_here, when_closed
from harness.base.json_object import JsonObject
from harness.base.registry import FileRegistry
from harness.core import failures, log_lines, method
from harness.core.job import Job
from harness.core.method import Unavailable
from harness.core.record import Record
from harness.devices import machine
from harness.run.launch import Report, launch, unless_changed
from harness.run.prepare import prepare

# Environment variables that change a job's speed or the order of its sums. An order carries their values to the place.
FORWARDED = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", *machine.KERNEL_VARIABLES)
KeyedJobs = list[tuple[Job, str]]  # pairs of a resolved job and its key
ORDERED = "ordered"  # phase of a job whose worker has not yet reported


@dataclass(frozen=True)
class NoOptions:
    """The options of a place that adds none to the command line."""


class PlaceCall(NamedTuple):
    """What a place may know of the call that makes it. `device`: the device of the call's jobs. `folders`: folders of
    methods. `is_dry_run`: True if the place will only draft what it would submit."""

    device: str
    folders: tuple[Path, ...] = ()
    is_dry_run: bool = False


class Place(ABC):
    """A place that runs jobs outside this process, such as a container engine or a cluster."""

    # True: the place can run several jobs at once, so callers should give launch() all jobs together
    is_parallel: ClassVar[bool] = False
    uses_this_venv: bool = True  # False: the place has packages of its own
    # The options that the place adds to the command line: a frozen dataclass whose fields declare flags (opt()).
    cli_options: ClassVar[type] = NoOptions

    @classmethod
    @abstractmethod
    def of(cls, options: Any, call: PlaceCall) -> Place:
        """Return the place for the jobs of a call. `options`: the values of the place's own options, a `cli_options`.
        Raises Unavailable if the place cannot be reached."""

    @classmethod
    def asks_for_gpus(cls, options: Any) -> bool:
        """Return True if the place's own options ask for GPUs. `options`: as in of()."""
        return False

    @abstractmethod
    def context(self) -> dict[str, str]:
        """Return the facts of the place on which results depend. They become part of a job's key, where they replace
        the facts of the same names from machine.compared_facts()."""

    def check(self, job: Job, folders: tuple[Path, ...]) -> None:
        """Raise ValueError if the job needs a release of an engine that the place cannot have, and Unavailable if the
        release is not yet installed: a job's key contains its archive's hash, so it must be known before the order."""
        trained = method.create(job.method, job.options, folders)
        if not trained.release_option or not (release := job.options.get(trained.release_option)):
            return
        option = f"--option {trained.release_option}"
        if not self.uses_this_venv:
            raise ValueError(
                f"--on: expected a place that uses this .venv for {option}, got one with an image's"
                f" packages; leave out --on, or {option}"
            )
        if not trained.identity():
            raise Unavailable(f"{option}={release} is not installed: run once without --on")

    @abstractmethod
    def launch(self, jobs: KeyedJobs, results: Path, folders: tuple[Path, ...], report: Report) -> list[Path]:
        """Run the jobs; return the paths of their records, in the order of the jobs."""

    def draft(self, jobs: KeyedJobs, folders: tuple[Path, ...]) -> str:
        """Return, as text, what launch() would submit. Raises ValueError if the place submits no text."""
        raise ValueError(no_draft())


REGISTRY = FileRegistry("place", "places", str)


def load_place(name: str) -> type[Place]:
    """Return the class of the place with this name. Raises ValueError with one line of text if the place's file does
    not load, or does not hold a class of Place."""
    file = REGISTRY.files()[name]
    place: type[Place] | None = REGISTRY.class_in(file, Place)
    if place is None:
        raise ValueError(f"{file} must hold one class of harness.run.place.Place; see CONTRIBUTING.md")
    return place


def loadable_places() -> dict[str, type[Place]]:
    """Return the classes of the places whose files load, by the places' names."""
    places = {}
    for name in REGISTRY.files():
        with contextlib.suppress(ValueError):
            places[name] = load_place(name)
    return places


def drafting() -> str:
    """Return the names of the places that define draft(), joined by "or"."""
    return " or ".join(name for name, place in loadable_places().items() if place.draft is not Place.draft)


def no_draft() -> str:
    return f"--dry-run: expected --on {drafting()}, whose manifest is printed; try ./run.sh plan for sizes that fit"


@dataclass(frozen=True)
class OrderedJob:
    """A job that is ordered at a place, its key, and the common stem of the file names of its record and log."""

    job: Job
    key: str
    stem: Path

    @property
    def record(self) -> Path:
        """The path of the job's record."""
        return Path(f"{self.stem}.json")

    def order(self, folders: tuple[Path, ...]) -> JsonObject:
        """Return the order, as plain data that perform() takes. `folders`: folders of methods."""
        # Leave out LD_PRELOAD: it names a library of this machine that the place may lack.
        names = [name for name in FORWARDED if name in os.environ and name != "LD_PRELOAD"]
        return {
            "job": self.job.to_dict(),
            "key": self.key,
            "stem": str(self.stem.absolute()),  # the place may start in another folder
            "folders": [str(folder.absolute()) for folder in folders],
            "environment": {name: os.environ[name] for name in names},
        }

    def write_end(self, end: failures.Failure, known_fields: JsonObject | None = None) -> Path:
        """Write a record for the job, which left none, and the closing line of the job's log. Return the record's path.
        `known_fields`: fields of the record that are known."""
        fields = {"phase": ORDERED, "started": time.time(), "clock": self.job.device, **(known_fields or {})}
        record = Record(self.job, self.key, **end.changes({}), **fields)
        record.write(self.record)
        with open(f"{self.stem}.txt", "a") as log:
            last_line = log_lines.end_line(self.job, end.status, record.phase, len(record.losses), end.reason)
            log.write(last_line + "\n")
        return self.record


def perform(order: JsonObject, report: Report = lambda event: None) -> None:
    """Perform an order at the place: compile what the job still needs, run the job, write its record."""
    job, folders = Job.from_dict(order["job"]), tuple(map(Path, order["folders"]))
    ordered = OrderedJob(job, str(order["key"]), Path(order["stem"]))
    results = ordered.stem.parent
    os.environ.update(order["environment"])
    if job.device not in machine.devices():
        reason = f"expected a {job.device} device there, got {' and '.join(machine.devices())}"
        reason += f": {machine.cuda_refused()}" if machine.gpu() and job.device == "cuda" else ""
        ordered.write_end(failures.ended("unavailable", "device", reason))
        return
    prepare(job, results, folders, report)
    launch(job, lambda: ordered.key, results, folders, report, stem=ordered.stem)


def place_record(path: Path, place: JsonObject, evidence: JsonObject, end: failures.Failure | None) -> Path:
    """Add the facts of the place and its evidence of the job's end to the record in the file `path`; return `path`.
    `end`: the end that replaces the record's end; None: the record's end stays."""
    record = Record.read(path)
    # the place runs the source code of this checkout
    software = {**record.software, "commit": machine.software()["commit"]}
    changes: JsonObject = end.changes(record.evidence) if end else {"evidence": record.evidence}
    changes |= {"machine": {**record.machine, **place}, "evidence": {**changes["evidence"], **evidence}}
    dataclasses.replace(record, software=software, **changes).write(path)
    return path


def mark_changed_keys(paths: Sequence[Path], jobs: KeyedJobs, key: Callable[[Job], str]) -> Sequence[Path]:
    """Let the records of jobs that ran at another place say so if a job's key has changed meanwhile: the place ran the
    code of this checkout. `jobs`: the jobs with the keys that they had before."""
    for path, (job, _) in zip(paths, jobs, strict=True):
        unless_changed(Record.read(path), partial(key, job)).write(path)
    return paths


def main() -> None:
    """Perform an order. This function is the program that runs at the place.

    The order comes on standard input, which stays open. If standard input closes, the calling process is gone, and the
    run ends as interrupted. Events go to standard output, each as one line of JSON.
    """
    order = json.loads(sys.stdin.readline())
    when_closed(0, interrupt_here)
    try:
        perform(order, lambda event: print(json.dumps(event), flush=True))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
