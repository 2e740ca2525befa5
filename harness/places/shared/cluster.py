"""Functions that the places on clusters share: they read a place's options, compute a job's number of nodes, name a
job's end, and write its record."""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path
from typing import Any

from harness.base.checked_data import checked
from harness.base.foreign_file import read_yaml
from harness.core.failures import End, Failure, ended, of_process
from harness.core.job import Job
from harness.core.record import Record
from harness.places.shared.place import place_record, write_end
from harness.run.ranks import followed

# For each status of a record, the cluster's statuses that replace it.
BETTER_KNOWN = {"interrupted": ("timeout", "killed"), "killed": ("oom-host",), "crash": ("oom-host",)}
PLAIN = re.compile(r"[\w./:,@%+=\-\[\]]+")  # the characters that an option's text may have


def options_of(place: str, texts: tuple[str, ...], kind: type[Any]) -> dict[str, Any]:
    """Read the options of a place, which are the fields of the dataclass `kind`; options that are not given are left
    out. Raises ValueError if an option is wrong."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals:
            found[name] = int(value) if value.isdigit() else value
            continue
        try:
            found |= checked(dict[str, Any], read_yaml(Path(text)))
        except (OSError, ValueError) as error:
            told = " ".join(str(error).split())
            raise ValueError(f"--{place} {text}: expected NAME=VALUE or a YAML file of NAME: VALUE; {told}") from error
    try:
        options = dataclasses.asdict(checked(kind, found))
        for name, value in options.items():
            if isinstance(value, str) and not PLAIN.fullmatch(value):  # the text becomes part of a script or manifest
                raise ValueError(f"{name}: expected a name, number or path without blanks or quotes, got {value!r:.80}")
    except ValueError as error:
        names = ", ".join(item.name for item in dataclasses.fields(kind))
        raise ValueError(f"--{place} {error}; try the names {names}") from error
    return {name: value for name, value in options.items() if value is not None}


def num_nodes(world_size: int, asked: int, option: str) -> int:
    """Return the number of nodes for a job's ranks, at most one for each rank. Raises ValueError if the ranks cannot be
    divided evenly."""
    found = min(asked, world_size)
    if world_size % found:
        raise ValueError(f"{world_size} ranks do not spread evenly over {found} nodes: try other --ranks or {option}")
    return found


def better_known(record: Record, end: Failure) -> Failure | None:
    """Return the cluster's end of a job if it tells more than the record's own end; otherwise None."""
    better = BETTER_KNOWN.get(record.status, ())
    if record.status == "crash" and followed(record):
        better = ("interrupted", "timeout", "killed", "oom-host")
    return end if end.status in better else None


def out_of_memory(phase: str, limit_bytes: int) -> Failure:
    """Return the end of a job that the cluster killed for want of memory; `limit_bytes`: 0 if the job had no limit."""
    return of_process(End(phase, -signal.SIGKILL, oom_kills=1, owns_group=True, host_limit_bytes=limit_bytes))


def late(phase: str, text: str) -> Failure:
    return ended("timeout", "deadline", text, "time", last_phase=phase)


def killed(phase: str, text: str) -> Failure:
    return ended("killed", "signal", f"killed at {phase}: {text}")


def unavailable(text: str, name: str) -> Failure:
    """Return the end of a job that the cluster cannot run. `name`: the thing that the cluster lacks, as the class of
    the evidence."""
    return ended("unavailable", name, text)


def complete(
    job: Job, key: str, stem: Path, record: Record | None, end: Failure, said: str, place: dict[str, Any],
    evidence: dict[str, Any], seen: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write a job's record, and return its path. The record is `record`, merged from the nodes' records; if that is
    None, it is a record of the job's end.

    `place` tells where the job ran. The cluster's evidence is added unless the job ended well. The cluster's name of
    the end replaces the record's if better_known() returns it. Without a nodes' record, the log gets the output `said`
    of the job's programs, and the record gets the fields `seen`.
    """
    path = Path(f"{stem}.json")
    if record:
        record.write(path)
    else:
        with open(f"{stem}.txt", "a") as log:
            log.write(said)
        write_end(job, key, stem, end, seen)
    told = {} if record and record.status == "ok" else evidence
    if job.budget.host_bytes is None and "oom-host" in (record and record.status, end.status):
        told = {**told, "limit_of": "the cluster"}
    return place_record(path, place, told, better_known(record, end) if record else None)
