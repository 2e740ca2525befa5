"""Reads named entries of a YAML file, such as machines.yaml. The error about an unknown name tells the nearest name."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from harness.base.checked_data import checked
from harness.base.foreign_file import read_yaml

T = TypeVar("T")


FEW = 20  # most names that a message lists


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return a hint such as `did you mean gpt2? `, which ends with a space. The hint lists at most `most` known names
    that are similar to `name`. If no name is similar, the hint lists the known names that contain `name` as a part
    between hyphens. If there are no such names, the hint is empty. Capital and small letters count as equal."""
    by_small = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), by_small, n=most, cutoff=0.4)
    near = near or [small for small in by_small if name.lower() in small.split("-")]
    return f"did you mean {' or '.join(by_small[small] for small in near)}? " if near else ""


def entries(file: Path, example: str) -> dict[str, Any]:
    """Return all entries of the file by name; the entries' fields are not checked. Raises ValueError, one line with the
    example, if the file cannot be read or does not hold entries by name."""
    try:
        return _parsed(file, file.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} does not load: {reason}; try {example}") from error


def entry_files(files: Iterable[Path], example: str) -> dict[str, Path]:
    """Return the file of each entry, by the entry's name. Raises ValueError if two files have an entry of the same
    name, or if a file cannot be read."""
    file_of: dict[str, Path] = {}
    for file in files:
        for name in entries(file, example):
            if (other := file_of.setdefault(name, file)) != file:
                raise ValueError(
                    f"expected one entry named {' '.join(name.split())}, got one in {other} and one in {file};"
                    " rename one"
                )
    return file_of


def entry(kind: type[T], what: str, name: str, files: Sequence[Path], example: str) -> T:
    """Return the entry `name` as the dataclass `kind`. Raises ValueError, whose text calls an entry `what`: if there is
    no such entry, the text names the nearest entries; if the entry has wrong fields, the text names the fields."""
    file_of = entry_files(files, example)
    if name not in file_of:
        if len(file_of) > FEW:
            near = did_you_mean(name, file_of, 3)
            advice = f"{files[-1]} lists all {len(file_of)}: choose one, or add it"
        else:
            near = did_you_mean(name, file_of)
            advice = f"choose one of {', '.join(sorted(file_of))}, or add it to {files[-1]}"
        raise ValueError(f"no {what} {name!r}: {near}{advice}")
    file = file_of[name]
    try:
        return checked(kind, entries(file, example)[name])
    except ValueError as error:
        known = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
        raise ValueError(f"{file}: {' '.join(name.split())}: {error}; try the fields {known}") from error


@functools.lru_cache
def _parsed(file: Path, written: int) -> dict[str, Any]:
    """Return the parsed file. The result is cached, because parsing takes longer than computing a plan. `written` is
    the file's time of change in nanoseconds: a changed file has another time, so it is parsed again."""
    return checked(dict[str, Any], read_yaml(file) or {})
