"""Registries: the entries of a kind, such as methods or machines, by name.

A new file adds a method, a case, a place, machines or claims. The project's own entries lie in one folder or file;
entries that a call adds (--methods, --cases, --machines, --claims) are known until the call ends.
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
    """The folders or files that hold entries of one kind; `own`: this project's folder or file."""

    def __init__(self, kind: str, own: Path) -> None:
        self.kind, self.own = kind, own
        self.added: list[Path] = []

    @property
    def places(self) -> tuple[Path, ...]:
        return (self.own, *self.added)

    def add(self, places: Iterable[Path]) -> None:
        """Search these folders or files, too, until forget()."""
        self.added += (place.absolute() for place in places)  # keep links as links

    def forget(self) -> None:
        self.added.clear()


class FileRegistry(Registry, Generic[Name]):
    """A registry whose entries are Python files in folders. `name_of` maps a file's name to the entry's name, or to
    None if the file is no entry."""

    def __init__(self, kind: str, package: ModuleType, name_of: Callable[[str], Name | None]) -> None:
        super().__init__(kind, Path(package.__path__[0]))
        self.package = package
        self.name_of: Callable[[str], Name | None] = name_of

    def files(self, folders: Sequence[Path] = ()) -> dict[Name, Path]:
        """Return the files by entry name, those in `folders` included. Raises ValueError if two files have one name, or
        a folder is missing."""
        return _files(self, (*self.places, *folders))

    def module(self, file: Path) -> Any:
        """Import an entry's file as a module of the package; other files in its folder can then be imported, too.
        Raises ValueError, one line, if the file does not load."""
        if str(file.parent) not in self.package.__path__:
            self.package.__path__.append(str(file.parent))
        name = f"{self.package.__name__}.{file.stem}"
        if name not in sys.modules:
            importlib.invalidate_caches()
        return imported(name, file)

    def class_in(self, file: Path, base: type) -> Any:
        """Return the subclass of `base` that the file defines; None if there is not exactly one, or if it lacks
        functions that `base` requires. Raises ValueError, one line, if the file does not load."""
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
            if name is not None and found.setdefault(name, path) != path:  # two entries of one name
                raise ValueError(f"expected one file of {kind} {name}, got {found[name]} and {path}; try another name")
    return found
