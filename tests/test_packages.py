"""The shape of the tree: who may import whom, and what the harness may not know."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from harness.base.checkout import ROOT
from harness.core import method
from harness.core.log_lines import DIALECTS

# A package imports from those before it, and from itself: harness < places < methods < papers < cli.
ORDER = (
    "harness/base",
    "harness/core",
    "harness/models",
    "harness/gate",
    "harness/devices",
    "harness/plan",
    "harness/run",
    "harness/jobs",
    "harness/simulation",
    "places",
    "methods/shared",
    "methods/offload",
    "methods/streaming",
    "methods/sharding",
    "methods/pipeline",
    "methods/engines",
    "methods",
    "methods/probe",
    "papers",
    "papers/logs",
    "papers/figures",
    "cases",
    "papers/claims",
    "papers/report",
    "cli",
    "methods/verbs",  # a verb of a method has options and a figure, as the other verbs have
    "harness",  # its two doors: python -m harness, harness.load
    "bench",
    "tests",
)
SEEN_BY_METHODS = {
    "harness/base",
    "harness/core",
    "harness/models",
    "harness/devices",
    "harness/plan",
    "harness/simulation",
    "methods/shared",
    "methods/offload",
}
LIBRARIES = {"methods/streaming", "methods/sharding", "methods/pipeline", "methods/engines"}
HOUSES = ("harness", "places", "methods", "papers", "cases", "cli")
FOLDERS = (*HOUSES, "tests", "bench")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name != "__init__.py"
}


def package_of(module: str) -> str:
    folder = module.split(".")[:-1]
    return "/".join(folder[:2]) if folder[0] in ("harness", "methods", "papers") else folder[0]


def imports_of(module: str) -> set[str]:
    """Files of the project that a file imports, also within functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{item.name}" for item in node.names)}
    return found & FILES.keys()


@pytest.mark.parametrize("module", FILES)
def test_a_package_imports_only_from_those_before_it(module: str) -> None:
    own = package_of(module)
    for package in {package_of(name) for name in imports_of(module)} - {own}:
        assert ORDER.index(package) < ORDER.index(own), f"{module} must not import {package}"
        assert not (own in LIBRARIES and package in LIBRARIES), f"{module} must not import {package}"
        if own.startswith("methods") and own != "methods/verbs":
            seen = SEEN_BY_METHODS | LIBRARIES | ({"methods"} if own == "methods/probe" else set())
            assert package in seen, f"{module} must not import {package}"


def test_no_file_imports_itself_round_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module not in done:
            for name in imports_of(module):
                visit(name, (*above, module))
            done.add(module)

    for module in FILES:
        if not module.startswith(("tests.", "bench.")):
            visit(module, ())


def test_a_class_name_is_defined_once() -> None:
    """Each word has one meaning (docs/glossary.md); tests take no product's name either."""
    found: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    of_product = {
        name: [each for each in modules if not each.startswith("tests.")] for name, modules in found.items()
    }
    assert {name: found[name] for name, own in of_product.items() if own and len(found[name]) > 1} == {}


def test_a_method_sees_no_other() -> None:
    for module in FILES:
        if package_of(module) == "methods":
            assert not {name for name in imports_of(module) if package_of(name) == "methods"}, module


def test_the_harness_names_no_method() -> None:
    """But for the words of dialects: a log's form is named after the engine that prints it, and so may a method be."""
    names = set(method.names()) - set(DIALECTS)
    for module, path in FILES.items():
        if not module.startswith("harness."):
            continue
        tree = ast.parse(path.read_text())
        texts = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not texts & names, f"{path.name} names {texts & names}"


def test_the_parent_process_imports_no_torch() -> None:
    code = (
        "import sys, cli.main; from harness.core import method; from harness.core.job import *;"
        "[method.create(name, {}).plan(Workload(), Room()) for name in method.names()];"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pandas')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "command", ["ruff check", "ruff format --check", pytest.param("mypy", marks=pytest.mark.heavy)]
)
def test_linters_have_nothing_to_say(command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
