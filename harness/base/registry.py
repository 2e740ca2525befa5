"""Registries: what there is of a kind by name. To add a method, a case, a place, a machine or claims is to add a file.

This project's own lies in one folder or file; what a call names beside it (--methods, --cases, --machines, --claims) is
known until the call ends.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from harness.base.imported_file import imported

Name = TypeVar("Name", str, int)


class Registry:
    """Where entries of a kind, such as machines, lie: `own` is this project's file or folder."""

    def __init__(self, kind: str, own: Path) -> None:
        self.kind, self.own = kind, own
        self.added: list[Path] = []

    @property
    def places(self) -> tuple[Path, ...]:
        return (self.own, *self.added)

    def add(self, places: Iterable[Path]) -> None:
        """Find entries of these, too, until forget()."""
        self.added += (place.absolute() for place in places)  # a link stays one

    def forget(self) -> None:
        self.added.clear()


class FileRegistry(Registry, Generic[Name]):
    """One Python file for each entry, in folders. `name_of` gives an entry's name by the file's, None where the file is
    no entry."""

    def __init__(self, kind: str, package: ModuleType, name_of: Callable[[str], Name | None]) -> None:
        super().__init__(kind, Path(package.__path__[0]))
        self.package = package
        self.name_of: Callable[[str], Name | None] = name_of

    def files(self, folders: Sequence[Path] = ()) -> dict[Name, Path]:
        """By name; `folders`: more of them. Raises ValueError where two files have one name, or there is no such
        folder."""
        return _files(self, (*self.places, *folders))

    def module(self, file: Path) -> Any:
        """Files beside it are found in the package, too. Raises ValueError, one line, where it does not load."""
        if str(file.parent) not in self.package.__path__:
            self.package.__path__.append(str(file.parent))
        name = f"{self.package.__name__}.{file.stem}"
        if name not in sys.modules:
            importlib.invalidate_caches()
        return imported(name, file)

    def class_in(self, file: Path, base: type) -> Any:
        """The class of this base that the file defines; None where there is none, more than one, or functions of the
        base are missing. Raises ValueError, one line, where the file does not load."""
        module = self.module(file)
        own = [item for item in vars(module).values() if isinstance(item, type) and item.__module__ == module.__name__]
        found = [item for item in own if issubclass(item, base)]
        return found[0] if len(found) == 1 and not inspect.isabstract(found[0]) else None


@functools.cache
def _files(registry: FileRegistry[Any], folders: tuple[Path, ...]) -> dict[Any, Path]:
    kind = registry.kind
    found: dict[Any, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"expected a folder of {kind}s, got {folder}; try --{kind}s FOLDER")
        for path in sorted(folder.resolve().glob("[!_]*.py")):
            name = registry.name_of(path.stem)
            if name is not None and found.setdefault(name, path) != path:  # one would pass for the other
                raise ValueError(f"expected one file of {kind} {name}, got {found[name]} and {path}; try another name")
    return found
