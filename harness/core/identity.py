"""Computes a method's identity, and tells whether a run executed the code that the identity covers. The identity is a
hash of the method's file, of the code that this file imports, directly or not, and of SHARED_FILES.

The files that the hash covers are the closure, which is found by reading the source. The closure contains every
imported module of harness/, of methods/ and of the method's own folder. Imports inside functions and by import_module()
count; imports under TYPE_CHECKING do not. The closure also contains each C++ or Python file that a module of the
closure names in a string and that lies beside this module. Comments, layout and docstrings do not count.

The hash also covers imported packages. An installed package counts by its version. A package elsewhere on Python's path
counts by its code, which belongs to the closure: folders, archives, compiled files, and the packages that these import.
So do the modules that Python imports by itself when it starts (STARTUP_MODULES). A run that executes code that the hash
does not cover, or whose code changes while it runs, has no verdict from the gate.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

from harness.base.checkout import ROOT
from harness.base.executed_code import Executed, is_standard, site_folder
from harness.base.imported_file import present_name
from harness.base.json_object import JsonObject
from harness.core.corpus_files import sampled_hash

# Files that decide how every method is trained and judged, even if the method's file does not import them.
SHARED_FILES = (
    ROOT / "methods/__init__.py",
    ROOT / "harness/core/data.py",
    ROOT / "harness/models/gpt.py",
    ROOT / "harness/gate/inspect_training.py",
)
PROJECT_PACKAGES = {"harness", "places", "methods", "papers", "cli", "bench"}  # packages of this project
# folders whose code a run may execute although the hash does not cover it
COVERED_FOLDERS = [ROOT / house for house in ("harness", "places", "papers", "cli")]
STARTUP_MODULES = ("sitecustomize", "usercustomize")  # modules that Python imports by itself, if it has them
NAMED_FILE = re.compile(r"[\w./+-]{1,200}\.(?:cpp|h|cu|py|json|ya?ml|toml|ini|csv|txt)")
LOADING_FUNCTIONS = {"import_module", "__import__"}
CODE_ENDINGS = {".py", ".pyc", ".so", ".cpp", ".h", ".cu"}
SHORT_ENDINGS = {".py", ".cpp", ".h", ".cu"}  # endings of files that count by all of their bytes
MODULE_ENDINGS = (".py", *EXTENSION_SUFFIXES, ".pyc")
# Pattern of import lines, for the files of a package that is not installed. Such a package may have hundreds of files,
# and parsing takes 5 ms for each.
IMPORT_LINE = re.compile(
    r"^[ \t]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import\b|import[ \t]+(\w[^\n#;]*))", re.MULTILINE
)
READS_DOCSTRINGS = re.compile(rb"__doc__|getdoc")  # pattern of code to which docstrings may matter
IMPORTED_PACKAGE = re.compile(r"(?:^|,)[ \t]*(\w+)")


class Contents(NamedTuple):
    """A file's contents for the hash, and the modules and files that the file names. The contents of a Python file are
    its syntax tree, without docstrings, comments and layout; if the file cannot be parsed, its bytes. The contents of a
    file of a package that is not installed are its path within the package and its bytes."""

    text: bytes
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def source_hash(path: Path) -> str:
    """Return the hash of the method in the file `path`: 16 hexadecimal digits."""
    return _hash(closure(path))


def _hash(sources: Mapping[Path, Contents]) -> str:
    digest = hashlib.sha256()
    for _, contents in sorted(sources.items()):
        digest.update(contents.text)
    for name in sorted(_imported_packages(sources.values())):
        digest.update(f"{name} {_installed_version(name)}".encode())
    return digest.hexdigest()[:16]


class CodeIdentity(NamedTuple):
    """A method's identity at one time: the hash, the folder of the method's file, and the times at which the files of
    the closure were modified."""

    source: str
    beside: Path
    modified_ns: dict[Path, int]

    @classmethod
    def of(cls, path: Path) -> CodeIdentity:
        sources = closure(path)
        return cls(_hash(sources), path.resolve().parent, {file: file.stat().st_mtime_ns for file in sources})

    def lacks(self, notes: Iterable[Executed]) -> list[str]:
        """Return what was executed although the hash does not cover it, as texts. Files of the standard library, of
        COVERED_FOLDERS folders and of packages that have a version are covered."""
        uncovered = set[str]()
        for note in notes:
            file = Path(note.text)
            if note.modified_ns is None:
                uncovered.add(note.text.replace(f"{self.beside}{os.sep}", ""))
            elif not self._covers(file):
                folder = next((folder for folder in (self.beside, ROOT) if folder in file.parents), None)
                uncovered.add(str(file.relative_to(folder) if folder else file))
        return sorted(uncovered)

    def _covers(self, file: Path) -> bool:
        is_covered = file in self.modified_ns or any(folder in file.parents for folder in COVERED_FOLDERS)
        return is_covered or is_standard(str(file)) or _is_versioned(file)

    def changed_files(self, notes: Iterable[Executed], after: CodeIdentity) -> list[str]:
        """Return the names of the closure's files that were executed in another state than the one that this identity
        has. `after`: the identity after the run. A file that was only given other comments meanwhile is not changed,
        since then the hash is the same and the file is the one that was executed."""
        names = set[str]()
        for note in notes:
            file, modified_ns = Path(note.text), note.modified_ns
            if modified_ns is None or self.modified_ns.get(file, modified_ns) == modified_ns:
                continue
            if (self.source, modified_ns) != (after.source, after.modified_ns.get(file)):
                names.add(file.name)
        return sorted(names)


def code_facts(
    before: CodeIdentity, executed: Sequence[Executed], identify: Callable[[], CodeIdentity]
) -> JsonObject:
    """Return the facts of a record's `software` about the code that the run executed.

    `before`: the code's identity when the run began; `executed`: the notes of all its processes; `identify`: returns
    the present identity. A run always notes some code, so a run without notes has lost them.
    """
    facts: JsonObject = {"source": before.source}
    if unlisted := before.lacks(executed) if executed else ["code that it did not note"]:
        facts["unlisted"] = unlisted
    try:
        after = identify()
    except (OSError, ValueError) as error:  # the method's file is gone
        return facts | {"changed": [str(error)]}
    changed_files = before.changed_files(executed, after)
    if changed_files or after.source != before.source:
        facts["changed"] = changed_files or ["its code"]
    return facts


def closure(path: Path) -> dict[Path, Contents]:
    """Return the contents of the method's file, of SHARED_FILES, and of every file that one of these needs, by path. A
    module of `methods` is looked for in the folder of the method's file, too."""
    sources: dict[Path, Contents] = {}
    folders, seen = Folders(), set[Path]()
    beside = path.resolve().parent
    unread_files = [path.resolve(), *SHARED_FILES]
    while unread_files:
        source = unread_files.pop()
        if source not in sources:
            data = source.read_bytes()
            sources[source] = contents = _parse_python(data) if source.suffix == ".py" else Contents(data)
            needed = set(folders.needed(source, contents, beside)) - seen
            seen |= needed
            unread_files.extend(file.resolve() for file in needed)
    return {**_package_files(_imported_packages(sources.values())), **sources}


class Folders:
    """The names in folders, each of which is listed once: most imported names lie in none of the folders."""

    def __init__(self) -> None:
        self.names: dict[Path, frozenset[str]] = {}

    def needed(self, source: Path, contents: Contents, beside: Path) -> Iterator[Path]:
        """Yield the files that a module imports or names."""
        for name in contents.modules:
            bases, parts = _search_folders(name, source, beside)
            for base in bases:
                yield from self._module(base, parts)
        for name in contents.files:
            if (named := source.parent / name).is_file():
                yield named

    def _module(self, folder: Path, parts: list[str]) -> Iterator[Path]:
        """Yield the files of a module below a folder, and of the packages above the module."""
        if not parts and "__init__.py" in self._names_in(folder):
            yield folder / "__init__.py"
        for number, part in enumerate(parts, start=1):
            if number == len(parts):
                names = [f"{part}{ending}" for ending in MODULE_ENDINGS]
                yield from (folder / name for name in names if name in self._names_in(folder))
            if part not in self._names_in(folder):
                return
            folder = folder / part
            if "__init__.py" in self._names_in(folder):
                yield folder / "__init__.py"

    def _names_in(self, folder: Path) -> frozenset[str]:
        if folder not in self.names:
            try:
                self.names[folder] = frozenset(os.listdir(folder))
            except (FileNotFoundError, NotADirectoryError):
                self.names[folder] = frozenset()
        return self.names[folder]


@functools.cache  # by the contents, so that an edited file is parsed again
def _parse_python(data: bytes) -> Contents:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return Contents(data)
    nodes = list(ast.walk(tree))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    files = tuple(text for text in texts if NAMED_FILE.fullmatch(text))
    modules = tuple(dict.fromkeys(map(present_name, _imported_names(tree))))
    if not READS_DOCSTRINGS.search(data):
        _drop_docstrings(nodes)
    return Contents(ast.dump(tree).encode(), modules, files)


def _drop_docstrings(nodes: Iterable[ast.AST]) -> None:
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            statement = node.body[0]
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and type(statement.value.value) is str
            ):
                node.body = node.body[1:]


def _imported_packages(sources: Iterable[Contents]) -> set[str]:
    """Return the names of the packages outside this project that files with these contents import, and of those that
    Python imports by itself. What an installed package imports does not count."""
    modules = {name for contents in sources for name in contents.modules if not name.startswith(".")}
    names = {name.partition(".")[0] for name in modules} | {*filter(_module_paths, STARTUP_MODULES)}
    return names - PROJECT_PACKAGES - sys.stdlib_module_names


def _package_files(names: set[str]) -> dict[Path, Contents]:
    """Return the code files of those of these packages that are not installed, and of the packages that they import."""
    sources: dict[Path, Contents] = {}
    new_names, seen_names = set(names), set[str]()
    while new_names:
        seen_names |= new_names
        files: dict[Path, Contents] = {}
        for name in new_names:
            files |= _code_files(name)
        sources |= files
        new_names = _imported_packages(files.values()) - seen_names
    return sources


def _code_files(name: str) -> dict[Path, Contents]:
    """Return the code files of a package that is not installed, or the archive that contains it; an empty dict for an
    installed package."""
    sources: dict[Path, Contents] = {}
    for path in [] if _installed_version(name) else map(_existing_path, _module_paths(name)):
        if path.is_file():
            sources[path.resolve()] = _skim(path, path.name)
        for file in path.rglob("*") if path.is_dir() else ():
            if file.suffix in CODE_ENDINGS and file.parent.name != "__pycache__" and file.is_file():
                sources[file.resolve()] = _skim(file, str(file.relative_to(path)))
    return sources


def _skim(file: Path, label: str) -> Contents:
    """Return the contents of a file of a package that is not installed: of its imports, the packages' names."""
    # a library may have GBs
    data = file.read_bytes() if file.suffix in SHORT_ENDINGS else sampled_hash(file).encode()
    modules = set[str]()
    if file.suffix == ".py":
        for from_name, import_names in IMPORT_LINE.findall(data.decode(errors="replace")):
            modules.update([from_name] if from_name else IMPORTED_PACKAGE.findall(import_names))
    return Contents(f"{label} {len(data)} ".encode(errors="replace") + data, tuple(modules))


def _existing_path(path: Path) -> Path:
    """Return the path itself or, for a path within an archive, the archive."""
    return next((candidate for candidate in (path, *path.parents) if candidate.exists()), path)


def _installed_version(name: str) -> str:
    """Return the version of a package that lies in a folder of installed packages; empty for any other package."""
    is_installed = any(site_folder(str(path)) for path in _module_paths(name))
    return _distribution_version(name) if is_installed else ""


def _is_versioned(file: Path) -> bool:
    """True if the file is of an installed package that has a version."""
    folder = site_folder(str(file))
    return bool(folder and _distribution_version(file.relative_to(folder).parts[0].partition(".")[0]))


def _module_paths(name: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; an empty list if `name` names neither."""
    with contextlib.suppress(ImportError, ValueError):
        if spec := importlib.util.find_spec(name):
            return list(map(Path, spec.submodule_search_locations or filter(None, [spec.origin])))
    return []


@functools.cache
def _distribution_version(name: str) -> str:
    """Return the version of the distribution of this name or, if there is none, the versions of the distributions that
    install the package `name`; empty if there is no distribution."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return " ".join(metadata.version(owner) for owner in sorted(set(_distributions().get(name, ()))))


@functools.cache  # because this call reads the metadata of every installed package
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _search_folders(name: str, source: Path, beside: Path) -> tuple[list[Path], list[str]]:
    """Return the folders in which the imported module `name` may lie, and the parts of the module's path below them. In
    a relative name, one dot stands for the package of the importing file `source`, and each further dot for the package
    above. A method's file counts as part of `methods` wherever the file lies. `beside`: the folder of the method's
    file, which may be on Python's path."""
    dots = len(name) - len(name.lstrip("."))
    parts = [part for part in name[dots:].split(".") if part]
    if not dots:
        folders = {"harness": [ROOT / "harness"], "methods": [ROOT / "methods", beside]}
        if parts[:1] and parts[0] in folders:
            return folders[parts[0]], parts[1:]
        is_covered = bool(parts) and ROOT / parts[0] in COVERED_FOLDERS
        return [ROOT, beside] if is_covered else [beside], parts
    package = source.parents[dots - 1]
    return [package, ROOT / "methods"] if package == beside else [package], parts


def _imported_names(node: ast.AST) -> Iterator[str]:
    """Yield the names of the modules that this syntax tree imports; relative names keep their dots. `from package
    import name` yields both `package` and `package.name`, because `name` may be a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = "." * child.level + (child.module or "")
            yield package
            yield from (f"{package}{'.' * bool(child.module)}{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and _last_name(child.test) == "TYPE_CHECKING":
            yield from _imported_names(ast.Module(child.orelse, []))
        else:
            if isinstance(child, ast.Call) and _last_name(child.func) in LOADING_FUNCTIONS:
                names = (argument.value for argument in child.args[:1] if isinstance(argument, ast.Constant))
                yield from (name for name in names if isinstance(name, str))
            yield from _imported_names(child)


def _last_name(expression: ast.expr) -> str:
    return expression.id if isinstance(expression, ast.Name) else getattr(expression, "attr", "")
