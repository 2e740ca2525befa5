"""A method's identity: a hash of the code that its file imports, directly or not, and of nothing else.

The closure is read from the source: every import of a module of harness/ or methods/, also within a function, but not
under TYPE_CHECKING. A C++ file that a module of the closure names, and that lies beside it, belongs to it. Of an
installed package the version counts, of one that lies elsewhere on Python's path its files.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from harness.base.checkout import ROOT

# What every method trains on and is judged by, whether its own file imports it or not.
SHARED = tuple(
    ROOT / path for path in ("harness/core/data.py", "harness/core/gpt.py", "harness/run/inspect_training.py")
)


OWN = {"harness", "methods", "bench"}  # packages of this project
INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that have versions


class Contents(NamedTuple):
    """What a file says, without its comments and layout where it is Python that parses, and whom it names."""

    text: bytes
    modules: tuple[str, ...] = ()
    cpp_files: tuple[str, ...] = ()


def source_hash(path: Path) -> str:
    """Of the method in this file; blind to comments and layout of Python. 16 hexadecimal digits."""
    digest, packages = hashlib.sha256(), set[str]()
    for _, contents in sorted(closure(path).items()):
        digest.update(contents.text)
        packages |= {name.partition(".")[0] for name in contents.modules if not name.startswith(".")}
    for name in sorted(packages - OWN - sys.stdlib_module_names):
        digest.update(f"{name} {_package(name)}".encode())
    return digest.hexdigest()[:16]


def closure(path: Path) -> dict[Path, Contents]:
    """The method's file and every file that it depends on. Modules of `methods` are looked for beside the file, too."""
    found: dict[Path, Contents] = {}
    waiting = [path.resolve(), *SHARED]
    while waiting:
        source = waiting.pop()
        if source not in found:
            data = source.read_bytes()
            found[source] = contents = _parsed(data) if source.suffix == ".py" else Contents(data)
            waiting.extend(_needed(source, contents, path.resolve().parent))
    return found


@functools.cache  # a sweep asks for each run: parsing takes 0.1 s of it
def _parsed(data: bytes) -> Contents:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return Contents(data)
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    cpp_files = tuple(text for text in texts if text.endswith((".cpp", ".h", ".cu")))
    return Contents(ast.dump(tree).encode(), tuple(_imported(tree)), cpp_files)


def _package(name: str) -> str:
    """What tells one state of a package from another: the version of what is installed, else the hash of its files."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return "broken"
    if found is None:
        return "missing"
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    places = folders or [Path(found.origin or "")]
    if INSTALLED & {part for place in places for part in place.parts} and (version := _version(name)):
        return version
    files = sorted(file for folder in folders for file in folder.rglob("*.py")) or places
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


@functools.cache
def _version(name: str) -> str:
    """Of the distributions that install this package; empty if there is none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return " ".join(metadata.version(each) for each in sorted(set(_distributions().get(name, ()))))


@functools.cache  # reads what is known of every installed package
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _needed(source: Path, contents: Contents, beside: Path) -> Iterator[Path]:
    for name in contents.modules:
        bases, rest = _looked_in(name, source, beside)
        for base in bases:
            module = base.joinpath(*rest)
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file():
                    yield file.resolve()
    for name in contents.cpp_files:
        if (named := source.parent / name).is_file():
            yield named


def _looked_in(name: str, source: Path, beside: Path) -> tuple[list[Path], list[str]]:
    """The folders in which a module may lie, and its name below them. A relative name begins with a dot for its own
    package, and another for each one above; a method's file belongs to `methods`, wherever it lies."""
    dots = len(name) - len(name.lstrip("."))
    rest = [part for part in name[dots:].split(".") if part]
    if not dots:
        return {"harness": [ROOT / "harness"], "methods": [ROOT / "methods", beside]}.get(rest.pop(0), []), rest
    package = source.parents[dots - 1]
    return [package, ROOT / "methods"] if package == beside else [package], rest


def _imported(node: ast.AST) -> Iterator[str]:
    """Names of modules, relative ones with their dots, and what may be one: `from package import name` names both."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (item.name for item in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = "." * child.level + (child.module or "")
            yield package
            yield from (f"{package}{'.' * bool(child.module)}{item.name}" for item in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _imported(other)
        else:
            yield from _imported(child)
