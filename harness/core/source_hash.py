"""A method's identity: a hash of its file, of the code that the file imports, directly or not, and of the SHARED files.

The files that the hash covers are the closure, which is found by reading the source. The closure contains every
imported module of harness/, of methods/ and of the method's own folder. Imports inside functions and by import_module()
count; imports under TYPE_CHECKING do not. The closure also contains each C++ or Python file that a module of the
closure names in a string and that lies beside this module.

The hash also covers imported packages. An installed package counts by its version; a package elsewhere on Python's path
counts by its code and by the packages that it imports. A run that executes code that the hash does not cover has no
verdict from the gate.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

from harness.base.checkout import ROOT
from harness.core.corpus_files import sampled_hash

# Files that decide how every method is trained and judged, even if the method's file does not import them.
SHARED = tuple(
    ROOT / path for path in ("harness/core/data.py", "harness/core/gpt.py", "harness/gate/inspect_training.py")
)


OWN = {"harness", "methods", "bench"}  # packages of this project
INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that have versions
NAMED_FILE = re.compile(r"[\w./+-]{1,200}\.(?:cpp|h|cu|py)")
LOADERS = {"import_module", "__import__"}
CODE = {".py", ".so", ".cpp", ".h", ".cu"}
# Pattern of import lines, for the files of a package that is not installed. Such a package may have hundreds of files,
# and parsing takes 5 ms for each.
IMPORTS = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import\b|import[ \t]+(\w[^\n#;]*))", re.MULTILINE)
FIRST = re.compile(r"(?:^|,)[ \t]*(\w+)")


class Contents(NamedTuple):
    """A file's contents for the hash, and the modules and files that the file names. The contents of a Python file are
    its syntax tree, without comments and layout; if the file cannot be parsed, its bytes."""

    text: bytes
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def source_hash(path: Path) -> str:
    """Return the hash of the method in the file `path`: 16 hexadecimal digits. Comments and layout of Python files do
    not change the hash."""
    digest, found = hashlib.sha256(), closure(path)
    for _, contents in sorted(found.items()):
        digest.update(contents.text)
    for name in _packages(found):
        digest.update(f"{name} {_package(name)}".encode())
    return digest.hexdigest()[:16]


class Listed(NamedTuple):
    """The inputs of a method's hash: the folder of the method's file, and the files and folders that the hash
    covers."""

    beside: Path
    places: frozenset[Path]

    @classmethod
    def of(cls, path: Path) -> Listed:
        found = closure(path)
        packages = (place.resolve() for name in _packages(found) for place in _places(name))
        return cls(path.resolve().parent, frozenset((*found, *packages)))

    def lacks(self, executed: Iterable[str]) -> list[str]:
        """Return the executed files that the hash should cover but does not. Files of the standard library, of
        installed packages and of harness/, and compiled modules outside the method's folder, are never returned."""
        around = {*(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")), ROOT / "harness"}
        told = set[str]()
        for file in {Path(each).resolve() for each in executed}:
            above = {file, *file.parents}
            is_foreign = bool(INSTALLED & set(file.parts) or above & around)
            is_compiled_elsewhere = file.suffix == ".so" and self.beside not in above
            if not (is_foreign or is_compiled_elsewhere or above & self.places):
                base = next((base for base in (self.beside, ROOT) if base in above), None)
                told.add(str(file.relative_to(base) if base else file))
        return sorted(told)


def closure(path: Path) -> dict[Path, Contents]:
    """Return the contents of the method's file, of the SHARED files, and of every file that one of these needs, by
    path. A module of `methods` is looked for in the folder of the method's file, too."""
    found: dict[Path, Contents] = {}
    waiting = [path.resolve(), *SHARED]
    while waiting:
        source = waiting.pop()
        if source not in found:
            data = source.read_bytes()
            found[source] = contents = _parsed(data) if source.suffix == ".py" else Contents(data)
            waiting.extend(_needed(source, contents, path.resolve().parent))
    return found


@functools.cache  # a sweep parses these files for each of its runs, which takes 0.1 s
def _parsed(data: bytes) -> Contents:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return Contents(data)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    files = tuple(text for text in texts if NAMED_FILE.fullmatch(text))
    return Contents(ast.dump(tree).encode(), tuple(_imported(tree)), files)


def _packages(found: Mapping[Path, Contents]) -> list[str]:
    """Return the sorted names of the packages outside this project that a closure imports, itself or through packages
    that are not installed. What an installed package imports does not count."""
    modules = {name for contents in found.values() for name in contents.modules if not name.startswith(".")}
    names, waiting = set[str](), {name.partition(".")[0] for name in modules}
    while waiting := waiting - names - OWN - sys.stdlib_module_names:
        names |= waiting
        files = [file for name in waiting for file in _code(name) if file.suffix == ".py"]
        there = {name for file in files for name in _mentioned(file.read_text(errors="replace"))}
        waiting = {name for name in there - names if _places(name)}  # a line of prose may look like an import
    return sorted(names)


def _mentioned(text: str) -> Iterator[str]:
    """Yield the names of the packages that import lines of this text name."""
    for of_from, of_import in IMPORTS.findall(text):
        yield from [of_from] if of_from else FIRST.findall(of_import)


def _package(name: str) -> str:
    """Return a package's state as text: the version of an installed package, the hash of another package's code, or
    "missing"."""
    if version := _installed(name):
        return version
    digest, places = hashlib.sha256(), _places(name)
    for file in _code(name):
        place = next(place for place in places if file.is_relative_to(place))
        data = sampled_hash(file).encode() if file.suffix == ".so" else file.read_bytes()  # a library may have GBs
        digest.update(f"{file.relative_to(place)} {len(data)} ".encode(errors="replace") + data)
    return digest.hexdigest() if places else "missing"


def _code(name: str) -> list[Path]:
    """Return the code files of a package that is not installed; an empty list for an installed package."""
    places = [] if _installed(name) else _places(name)
    files = (file for place in places for file in (place.rglob("*") if place.is_dir() else [place]))
    return sorted(file for file in files if file.suffix in CODE and file.is_file())


def _installed(name: str) -> str:
    """Return the version of a package that lies in a folder of INSTALLED; empty for any other package."""
    return _version(name) if INSTALLED & {part for place in _places(name) for part in place.parts} else ""


def _places(name: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; an empty list if `name` names neither."""
    with contextlib.suppress(ImportError, ValueError):
        if found := importlib.util.find_spec(name):
            return list(map(Path, found.submodule_search_locations or filter(None, [found.origin])))
    return []


@functools.cache
def _version(name: str) -> str:
    """Return the version of the distribution of this name or, if there is none, the versions of the distributions that
    install the package `name`; empty if there is no distribution."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return " ".join(metadata.version(each) for each in sorted(set(_distributions().get(name, ()))))


@functools.cache  # because this call reads the metadata of every installed package
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _needed(source: Path, contents: Contents, beside: Path) -> Iterator[Path]:
    for name in contents.modules:
        bases, rest = _looked_in(name, source, beside)
        for base in bases:
            module = base.joinpath(*rest)
            above = [base.joinpath(*rest[:depth]) for depth in range(1, len(rest))]
            files = [module.with_name(f"{module.name}{ending}") for ending in (".py", *EXTENSION_SUFFIXES)]
            for file in (*files, *(folder / "__init__.py" for folder in (module, *above))):
                if file.is_file():
                    yield file.resolve()
    for name in contents.files:
        if (named := source.parent / name).is_file():
            yield named.resolve()


def _looked_in(name: str, source: Path, beside: Path) -> tuple[list[Path], list[str]]:
    """Return the folders in which the imported module `name` may lie, and the parts of the module's path below them. In
    a relative name, one dot stands for the package of the importing file `source`, and each further dot for the package
    above. A method's file counts as part of `methods` wherever the file lies. `beside`: the folder of the method's
    file, which may be on Python's path."""
    dots = len(name) - len(name.lstrip("."))
    rest = [part for part in name[dots:].split(".") if part]
    if not dots:
        own = {"harness": [ROOT / "harness"], "methods": [ROOT / "methods", beside]}
        return (own[rest[0]], rest[1:]) if rest[:1] and rest[0] in own else ([beside], rest)
    package = source.parents[dots - 1]
    return [package, ROOT / "methods"] if package == beside else [package], rest


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the names of the modules that this syntax tree imports; relative names keep their dots. `from package
    import name` yields both `package` and `package.name`, because `name` may be a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (item.name for item in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = "." * child.level + (child.module or "")
            yield package
            yield from (f"{package}{'.' * bool(child.module)}{item.name}" for item in child.names)
        elif isinstance(child, ast.If) and _name(child.test) == "TYPE_CHECKING":
            yield from _imported(ast.Module(child.orelse, []))
        else:
            if isinstance(child, ast.Call) and _name(child.func) in LOADERS:
                words = (word.value for word in child.args[:1] if isinstance(word, ast.Constant))
                yield from (word for word in words if isinstance(word, str))
            yield from _imported(child)


def _name(of: ast.expr) -> str:
    return of.id if isinstance(of, ast.Name) else getattr(of, "attr", "")
