"""Registries, each of which finds the entries of one kind, such as methods or machines, by name; and the entries of a
YAML file, such as machines.yaml. An error about an unknown name tells the nearest name.

A method, a case, a place, a file of machines or a file of claims is added by a new file; no list has to be changed. The
project's own entries of a kind lie in one folder or file. A call may add entries by --methods, --cases, --machines or
--claims; the added entries are known until the call ends.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from harness.base.checkout import ROOT
from harness.base.foreign_file import checked, read_yaml
from harness.base.imported_file import import_file
from harness.base.json_object import JsonObject

Name = TypeVar("Name", str, int)
T = TypeVar("T")
MOST_LISTED_NAMES = 20  # most names that a message lists


class Registry:
    """The folders or files that hold the entries of one kind. `kind`: the word for an entry, such as method;
    `project_path`: this project's folder or file."""

    def __init__(self, kind: str, project_path: Path) -> None:
        self.kind, self.project_path = kind, project_path
        self.added_paths: list[Path] = []

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.project_path, *self.added_paths)

    def add(self, paths: Iterable[Path]) -> None:
        """Search these folders or files, too, until forget() is called."""
        self.added_paths += (path.absolute() for path in paths)  # absolute() does not resolve symbolic links

    def forget(self) -> None:
        self.added_paths.clear()


class FileRegistry(Registry, Generic[Name]):
    """A registry whose entries are Python files in folders. `package`: the name of the package of the project's own
    entries, a folder of the root. `name_of`: function that maps a file's name without .py to the entry's name, or to
    None if the file is no entry."""

    def __init__(self, kind: str, package: str, name_of: Callable[[str], Name | None]) -> None:
        super().__init__(kind, ROOT / package)
        self.package = package
        self.name_of: Callable[[str], Name | None] = name_of

    def files(self, folders: Sequence[Path] = ()) -> dict[Name, Path]:
        """Return the file of each entry, by the entry's name. The files in `folders` are included. Raises ValueError if
        two entries have the same name, or if a folder is missing."""
        return _files(self, (*self.paths, *folders))

    def module(self, file: Path) -> Any:
        """Import the file of an entry as a module of the package, and return the module. From then on, other files in
        the same folder can be imported, too. Raises ValueError, one line, if the import fails."""
        folders = importlib.import_module(self.package).__path__
        if str(file.parent) not in folders:
            folders.append(str(file.parent))
        name = f"{self.package}.{file.stem}"
        if name not in sys.modules:
            importlib.invalidate_caches()
        return import_file(name, file)

    def class_in(self, file: Path, base: type) -> Any:
        """Return the subclass of `base` that the file defines; None if the file does not define exactly one, or if this
        subclass lacks a function that `base` requires. Raises ValueError, one line, if the import fails."""
        module = self.module(file)
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        classes = [cls for cls in classes if cls.__module__ == module.__name__ and issubclass(cls, base)]
        return classes[0] if len(classes) == 1 and not inspect.isabstract(classes[0]) else None


@functools.cache
def _files(registry: FileRegistry[Any], folders: tuple[Path, ...]) -> dict[Any, Path]:
    kind = registry.kind
    files: dict[Any, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"expected a folder of {kind}s, got {folder}; try --{kind}s FOLDER")
        for path in sorted(folder.resolve().glob("[!_]*.py")):
            name = registry.name_of(path.stem)
            if name is not None and files.setdefault(name, path) != path:
                # two files have the same entry's name
                raise ValueError(
                    f"expected one file of {kind} {name}, got {files[name]} and {path}; try another name"
                )
    return files


def did_you_mean(name: str, known_names: Iterable[str], most_hints: int = 1) -> str:
    """Return a hint such as `did you mean gpt2? `, which ends with a space. The hint lists at most `most_hints` known
    names that are similar to `name`. If no name is similar, the hint lists the known names that contain `name` as a
    part between hyphens. If there are no such names, the hint is empty. Capital and small letters count as equal."""
    known_by_lower = {known.lower(): known for known in known_names}
    near_names = difflib.get_close_matches(name.lower(), known_by_lower, n=most_hints, cutoff=0.4)
    if not near_names:
        near_names = [lower_name for lower_name in known_by_lower if name.lower() in lower_name.split("-")]
    if not near_names:
        return ""
    return f"did you mean {' or '.join(known_by_lower[lower_name] for lower_name in near_names)}? "


def read_entries(file: Path, example: str) -> JsonObject:
    """Return all entries of the file by name; the entries' fields are not checked. Raises ValueError, one line with the
    example, if the file cannot be read or does not hold entries by name."""
    try:
        return _parse_entries(file, file.stat().st_mtime_ns)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{file} does not load: {reason}; try {example}") from error


def files_by_entry(files: Iterable[Path], example: str) -> dict[str, Path]:
    """Return the file of each entry, by the entry's name. Raises ValueError if two files have an entry of the same
    name, or if a file cannot be read."""
    file_of: dict[str, Path] = {}
    for file in files:
        for name in read_entries(file, example):
            if (other := file_of.setdefault(name, file)) != file:
                raise ValueError(
                    f"expected one entry named {' '.join(name.split())}, got one in {other} and one in {file};"
                    " rename one"
                )
    return file_of


def read_entry(kind: type[T], entry_noun: str, name: str, files: Sequence[Path], example: str) -> T:
    """Return the entry `name` as the dataclass `kind`. Raises ValueError, whose text calls an entry `entry_noun`: if
    there is no such entry, the text names the nearest entries; if the entry has wrong fields, the text names the
    fields."""
    file_of = files_by_entry(files, example)
    if name not in file_of:
        if len(file_of) > MOST_LISTED_NAMES:
            hint = did_you_mean(name, file_of, 3)
            advice = f"{files[-1]} lists all {len(file_of)}: choose one, or add it"
        else:
            hint = did_you_mean(name, file_of)
            advice = f"choose one of {', '.join(sorted(file_of))}, or add it to {files[-1]}"
        raise ValueError(f"no {entry_noun} {name!r}: {hint}{advice}")
    file = file_of[name]
    try:
        return checked(kind, read_entries(file, example)[name])
    except ValueError as error:
        field_names = ", ".join(field.name for field in fields(kind))  # type: ignore[arg-type]
        raise ValueError(
            f"{file}: {' '.join(name.split())}: {error}; try the fields {field_names}"
        ) from error


@functools.lru_cache
def _parse_entries(file: Path, changed_ns: int) -> JsonObject:
    """Return the parsed file. The result is cached, because parsing takes longer than computing a plan. `changed_ns`
    is the file's time of change in nanoseconds: a changed file has another time, so it is parsed again."""
    return checked(JsonObject, read_yaml(file) or {})
