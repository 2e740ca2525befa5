"""A method's identity: a hash of its file, of the code that the file imports, directly or not, and of the SHARED files.

The closure, which is read from the source, holds every imported module of harness/, of methods/ or of the method's own
folder, also if a function or import_module() imports it, but not under TYPE_CHECKING. The closure also holds each
C++ or Python file that a module of the closure names and that lies beside this module. An installed package counts by
its version; a package elsewhere on Python's path counts by its code and by the packages that it imports. A run that
executes code outside the closure has no verdict.
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

# Files that every method trains on and is judged by, whether its own file imports them or not.
SHARED = tuple(
    ROOT / path for path in ("harness/core/data.py", "harness/core/gpt.py", "harness/gate/inspect_training.py")
)


OWN = {"harness", "methods", "bench"}  # packages of this project
INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that have versions
NAMED_FILE = re.compile(r"[\w./+-]{1,200}\.(?:cpp|h|cu|py)")
LOADERS = {"import_module", "__import__"}
CODE = {".py", ".so", ".cpp", ".h", ".cu"}
# Pattern for the imports of a package that is not installed: parsing takes 5 ms a file, and a package may have
# hundreds.
IMPORTS = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import\b|import[ \t]+(\w[^\n#;]*))", re.MULTILINE)
FIRST = re.compile(r"(?:^|,)[ \t]*(\w+)")


class Contents(NamedTuple):
    """A file's contents, and the modules and files that it names. The contents of Python that parses leave out comments
    and layout."""

    text: bytes
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def source_hash(path: Path) -> str:
    """Return the hash of the method in this file, 16 hexadecimal digits; comments and layout of Python do not change
    the hash."""
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
        """Return the executed files that the hash does not cover, except for the standard library, installed packages,
        the harness around the method, and compiled modules outside the method's folder."""
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
    """Return the method's file and every file on which it depends. Modules of `methods` are looked for beside the file,
    too."""
    found: dict[Path, Contents] = {}
    waiting = [path.resolve(), *SHARED]
    while waiting:
        source = waiting.pop()
        if source not in found:
            data = source.read_bytes()
            found[source] = contents = _parsed(data) if source.suffix == ".py" else Contents(data)
            waiting.extend(_needed(source, contents, path.resolve().parent))
    return found


@functools.cache  # a sweep asks once for each run, and parsing takes 0.1 s
def _parsed(data: bytes) -> Contents:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return Contents(data)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    files = tuple(text for text in texts if NAMED_FILE.fullmatch(text))
    return Contents(ast.dump(tree).encode(), tuple(_imported(tree)), files)


def _packages(found: Mapping[Path, Contents]) -> list[str]:
    """Return the packages outside this project that a closure imports, directly or through a package that is not
    installed."""
    modules = {name for contents in found.values() for name in contents.modules if not name.startswith(".")}
    names, waiting = set[str](), {name.partition(".")[0] for name in modules}
    while waiting := waiting - names - OWN - sys.stdlib_module_names:
        names |= waiting
        files = [file for name in waiting for file in _code(name) if file.suffix == ".py"]
        there = {name for file in files for name in _mentioned(file.read_text(errors="replace"))}
        waiting = {name for name in there - names if _places(name)}  # prose may look like an import
    return sorted(names)


def _mentioned(text: str) -> Iterator[str]:
    """Yield the names of the packages that a file's lines import."""
    for of_from, of_import in IMPORTS.findall(text):
        yield from [of_from] if of_from else FIRST.findall(of_import)


def _package(name: str) -> str:
    """Return a package's state as text: the version of an installed package, else the hash of the package's code."""
    if version := _installed(name):
        return version
    digest, places = hashlib.sha256(), _places(name)
    for file in _code(name):
        place = next(place for place in places if file.is_relative_to(place))
        data = sampled_hash(file).encode() if file.suffix == ".so" else file.read_bytes()  # a library may have GBs
        digest.update(f"{file.relative_to(place)} {len(data)} ".encode(errors="replace") + data)
    return digest.hexdigest() if places else "missing"


def _code(name: str) -> list[Path]:
    """Return the files of a package that is not installed; none of an installed one."""
    places = [] if _installed(name) else _places(name)
    files = (file for place in places for file in (place.rglob("*") if place.is_dir() else [place]))
    return sorted(file for file in files if file.suffix in CODE and file.is_file())


def _installed(name: str) -> str:
    """Return the version of a package in a folder of installed packages; empty for other packages."""
    return _version(name) if INSTALLED & {part for place in _places(name) for part in place.parts} else ""


def _places(name: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; none if there is no such package."""
    with contextlib.suppress(ImportError, ValueError):
        if found := importlib.util.find_spec(name):
            return list(map(Path, found.submodule_search_locations or filter(None, [found.origin])))
    return []


@functools.cache
def _version(name: str) -> str:
    """Return the version of the distributions that install this package; empty if there is none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return " ".join(metadata.version(each) for each in sorted(set(_distributions().get(name, ()))))


@functools.cache  # reads the metadata of every installed package
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
    """Return the folders in which a module may lie, and the module's path below them. A relative name begins with a dot
    for its own package, and has another dot for each package above. A method's file belongs to `methods`, wherever the
    file lies, and may have put its own folder on Python's path."""
    dots = len(name) - len(name.lstrip("."))
    rest = [part for part in name[dots:].split(".") if part]
    if not dots:
        own = {"harness": [ROOT / "harness"], "methods": [ROOT / "methods", beside]}
        return (own[rest[0]], rest[1:]) if rest[:1] and rest[0] in own else ([beside], rest)
    package = source.parents[dots - 1]
    return [package, ROOT / "methods"] if package == beside else [package], rest


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the names of imported modules, relative names with their dots. `from package import name` yields both
    `package` and `package.name`, because the latter may be a module."""
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
