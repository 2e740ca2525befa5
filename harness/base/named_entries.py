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
    small = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), small, n=most, cutoff=0.4)
    near = [small[each] for each in near] or [
        small[each] for each in small if name.lower() in each.split("-")
    ]
    return f"did you mean {' or '.join(near)}? " if near else ""


def entries(file: Path, example: str) -> dict[str, Any]:
    """Return all entries of the file by name; the entries' fields are not checked. Raises ValueError, one line with the
    example, if the file cannot be read or does not hold entries by name."""
    try:
        return _parsed(file, file.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"{file} does not load: {told}; try {example}") from error


def places(files: Iterable[Path], example: str) -> dict[str, Path]:
    """Return the file of each entry, by the entry's name. Raises ValueError if two files have an entry of the same
    name, or if a file cannot be read."""
    found: dict[str, Path] = {}
    for file in files:
        for name in entries(file, example):
            if found.setdefault(name, file) != file:
                told = " ".join(name.split())
                raise ValueError(
                    f"expected one entry named {told}, got one in {found[name]} and one in {file}; rename one"
                )
    return found


def entry(kind: type[T], what: str, name: str, files: Sequence[Path], example: str) -> T:
    """Return the entry `name` as the dataclass `kind`. Raises ValueError, whose text calls an entry `what`: if there is
    no such entry, the text names the nearest entries; if the entry has wrong fields, the text names the fields."""
    found = places(files, example)
    if name not in found:
        if len(found) > FEW:
            near, told = (
                did_you_mean(name, found, 3),
                f"{files[-1]} lists all {len(found)}: choose one, or add it",
            )
        else:
            told = f"choose one of {', '.join(sorted(found))}, or add it to {files[-1]}"
            near = did_you_mean(name, found)
        raise ValueError(f"no {what} {name!r}: {near}{told}")
    file = found[name]
    try:
        return checked(kind, entries(file, example)[name])
    except ValueError as error:
        known = ", ".join(item.name for item in fields(kind))  # type: ignore[arg-type]
        raise ValueError(f"{file}: {' '.join(name.split())}: {error}; try the fields {known}") from error


@functools.lru_cache
def _parsed(file: Path, written: int) -> dict[str, Any]:
    """Return the parsed file. The result is cached, because parsing takes longer than computing a plan. `written` is
    the file's time of change in nanoseconds: a changed file has another time, so it is parsed again."""
    return checked(dict[str, Any], read_yaml(file) or {})
