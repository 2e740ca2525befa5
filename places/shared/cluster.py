"""Functions that all places on clusters use: they read a place's options, compute a job's number of nodes, describe a
job's end, and write the job's record."""

from __future__ import annotations

import dataclasses
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.foreign_file import checked, read_yaml
from harness.base.json_object import JsonObject
from harness.core.failures import End, Failure, ended, of_process
from harness.core.record import Record
from harness.run.place import OrderedJob, place_record
from harness.run.ranks import ended_after_another

# For each status in a job's own record: the statuses that replace this status if the cluster reports them.
REPLACING_STATUSES = {"interrupted": ("timeout", "killed"), "killed": ("oom-host",), "crash": ("oom-host",)}
PLAIN_TEXT = re.compile(r"[\w./:,@%+=\-\[\]]+")  # the characters that may occur in an option's text


def place_options(place: str, texts: tuple[str, ...], kind: type[Any]) -> dict[str, Any]:
    """Return the options of a place that the caller has given, by name. `texts`: each is NAME=VALUE or the name of a
    YAML file. `kind`: the dataclass whose fields are the place's options.

    Raises ValueError if an option is unknown or has a wrong value.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if equals:
            values[name] = int(value) if value.isdigit() else value
            continue
        try:
            values |= checked(JsonObject, read_yaml(Path(text)))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"--{place} {text}: expected NAME=VALUE or a YAML file of NAME: VALUE; {reason}"
            ) from error
    try:
        options = dataclasses.asdict(checked(kind, values))
        for name, value in options.items():
            # forbid all other characters, because the text becomes part of a script or manifest
            if isinstance(value, str) and not PLAIN_TEXT.fullmatch(value):
                raise ValueError(
                    f"{name}: expected a name, number or path without blanks or quotes, got {value!r:.80}"
                )
    except ValueError as error:
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        raise ValueError(f"--{place} {error}; try the names {names}") from error
    return {name: value for name, value in options.items() if value is not None}


def num_nodes(world_size: int, most_nodes: int, option: str) -> int:
    """Return a job's number of nodes: `most_nodes`, but at most one for each rank. Raises ValueError if the ranks
    cannot be divided evenly among the nodes."""
    number = min(most_nodes, world_size)
    if world_size % number:
        raise ValueError(
            f"{world_size} ranks do not spread evenly over {number} nodes: try other --ranks or {option}"
        )
    return number


def replacing_end(record: Record, end: Failure) -> Failure | None:
    """Return `end`, the job's end as the cluster reports it, if it must replace the end in the job's record; else
    None."""
    statuses = REPLACING_STATUSES.get(record.status, ())
    if record.status == "crash" and ended_after_another(record):
        statuses = ("interrupted", "timeout", "killed", "oom-host")
    return end if end.status in statuses else None


def out_of_memory(phase: str, limit_bytes: int) -> Failure:
    """Return the end of a job that the cluster killed because the job had used up its memory. `limit_bytes`: the job's
    limit of host memory in bytes; 0: no limit."""
    return of_process(End(phase, -signal.SIGKILL, oom_kills=1, owns_group=True, host_limit_bytes=limit_bytes))


def late(phase: str, text: str) -> Failure:
    return ended("timeout", "deadline", text, "time", last_phase=phase)


def killed(phase: str, text: str) -> Failure:
    return ended("killed", "signal", f"killed at {phase}: {text}")


def unavailable(text: str, name: str) -> Failure:
    """Return the end of a job that the cluster cannot run. `name`: a word for what the cluster lacks, such as node; the
    record's evidence keeps this word."""
    return ended("unavailable", name, text)


@dataclass(frozen=True)
class ClusterReport:
    """What a cluster tells of a job, for the job's record. `place`: facts of where the job ran. `evidence`: facts of
    the job's end. `output`: what the job's programs printed. `seen`: those fields of the record that the job's events
    tell, by name; None: no event came."""

    place: JsonObject
    evidence: JsonObject
    output: str = ""
    seen: JsonObject | None = None


def complete(ordered: OrderedJob, record: Record | None, end: Failure, report: ClusterReport) -> Path:
    """Write a job's record, and return the record's path.

    `record`: the record merged from the nodes' records; None: no node wrote a record, so a new record states `end`, and
    the report's output is appended to the job's log. `end`: the job's end as the cluster reports it; it replaces the
    record's end if replacing_end() returns it. The report's evidence is added unless the job ended with status ok.
    """
    if record:
        record.write(ordered.record)
    else:
        with open(f"{ordered.stem}.txt", "a") as log:
            log.write(report.output)
        ordered.write_end(end, report.seen)
    evidence = {} if record and record.status == "ok" else report.evidence
    if ordered.job.budget.host_bytes is None and "oom-host" in (record and record.status, end.status):
        evidence = {**evidence, "limit_of": "the cluster"}
    replacement = replacing_end(record, end) if record else None
    return place_record(ordered.record, report.place, evidence, replacement)
