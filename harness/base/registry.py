"""Registries, each of which finds the entries of one kind, such as methods or machines, by name.

A method, a case, a place, a file of machines or a file of claims is added by a new file; no list has to be changed. The
project's own entries of a kind lie in one folder or file. A call may add entries by --methods, --cases, --machines or
--claims; the added entries are known until the call ends.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from harness.base.checkout import ROOT
from harness.base.imported_file import imported

Name = TypeVar("Name", str, int)


class Registry:
    """The folders or files that hold the entries of one kind. `kind`: the word for an entry, such as method;
    `project`: this project's folder or file."""

    def __init__(self, kind: str, project: Path) -> None:
        self.kind, self.project = kind, project
        self.added: list[Path] = []

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.project, *self.added)

    def add(self, paths: Iterable[Path]) -> None:
        """Search these folders or files, too, until forget() is called."""
        self.added += (path.absolute() for path in paths)  # absolute() does not resolve symbolic links

    def forget(self) -> None:
        self.added.clear()


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
        return imported(name, file)

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
