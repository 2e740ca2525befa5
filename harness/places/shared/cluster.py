"""What the places on clusters share: reading their options, the number of a job's nodes, and which end of a job
counts."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from harness.base.checked_data import checked
from harness.base.foreign_file import read_yaml
from harness.core.failures import Failure
from harness.core.record import Record
from harness.run.ranks import followed

# For each status of a record, the ends of which the cluster's word counts more than the record's.
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
            if isinstance(value, str) and not PLAIN.fullmatch(value):  # the text becomes a part of a script or manifest
                raise ValueError(f"{name}: expected a name, number or path without blanks or quotes, got {value!r:.80}")
    except ValueError as error:
        names = ", ".join(item.name for item in dataclasses.fields(kind))
        raise ValueError(f"--{place} {error}; try {names}") from error
    return {name: value for name, value in options.items() if value is not None}


def num_nodes(world_size: int, asked: int, option: str) -> int:
    """Return the number of nodes for a job's ranks, at most one for each rank. Raises ValueError if the ranks cannot be
    divided evenly."""
    found = min(asked, world_size)
    if world_size % found:
        raise ValueError(f"{world_size} ranks do not spread evenly over {found} nodes: --ranks, {option}")
    return found


def better_known(record: Record, end: Failure) -> Failure | None:
    """Return the end that the cluster tells of a job, if it says more than the record's own; otherwise None."""
    better = BETTER_KNOWN.get(record.status, ())
    if record.status == "crash" and followed(record):
        better = ("interrupted", "timeout", "killed", "oom-host")
    return end if end.status in better else None
