"""The shape of the tree: who may import whom, how long a file may be, what the harness may not know."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from harness import method
from harness.method import ROOT

# A file imports only from floors below its own. Methods see rates to twin, and the underscore modules.
FLOORS = (
    {"harness.rates"},
    {"harness.spec", "harness.search", "harness.timeline"},
    {"harness.method", "harness.model", "harness.data", "harness.cgroup", "harness.tracker"},
    {"harness.compiler", "harness.twin"},
    {"harness.record", "harness.machine", "harness.published", "harness.rawlog", "methods._*",
     "harness.laws", "harness.profiles"},
    {"methods.*", "harness.gate", "harness.curves", "harness.logrecord", "harness.inspection", "harness.failures",
     "harness.sim", "harness.published_megatron", "harness.redact", "harness.trace"},
    {"harness.limits", "harness.turns"},
    {"harness.worker", "harness.build", "harness.calibrate", "harness.fairness", "harness.importer", "harness.rows",
     "harness.scaled"},
    {"harness.ranks"},
    {"harness.launch", "harness.plot", "cases._*"},
    {"harness.prepare", "cases._models"},
    {"harness.remote"},
    {"harness.sweep", "harness.container", "harness.node"},
    {"harness.cluster"},
    {"harness.image", "harness.progress", "harness.words", "harness.doctor", "harness.largest", "harness.plan",
     "harness.case"},
    {"harness.fields", "harness.noise", "cases.*"},
    {"harness.claims", "harness.compare"},
    {"harness.verdicts", "harness.campaign"},
    {"harness.verify"},
    {"harness.pages"},
    {"harness.report", "harness.notebook"},
    {"harness.bundle"},
    {"harness.reading", "harness.demo"},
    {"harness.cli"},
    {"harness.__main__", "tests.*", "bench.*"},
)  # fmt: skip
SEEN_BY_METHODS = {f"harness.{name}" for name in ("rates", "spec", "model", "data", "method", "compiler", "twin")}
FOLDERS = ("harness", "methods", "cases", "tests", "bench")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def floor_of(module: str) -> int:
    package, _, name = module.rpartition(".")
    for wanted in (module, f"{package}._*" if name.startswith("_") else f"{package}.*", f"{package}.*"):
        for number, floor in enumerate(FLOORS):
            if wanted in floor:
                return number
    raise AssertionError(f"{module} stands on no floor: give it one in FLOORS")


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {item.name for item in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in FOLDERS:
            found |= {f"{node.module}.{item.name}" for item in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    files = {module_of(source) for source in SOURCES}
    return {name for name in found if name in files}


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_a_file_imports_only_from_floors_below(path: Path) -> None:
    own = module_of(path)
    if path.name == "__init__.py" or own.startswith(("tests.", "bench.")):
        return
    for name in imports_of(path):
        # Underscore modules and their kind share a floor: they may build on each other.
        shared = own.startswith("methods._") and name.startswith("methods._")
        assert shared or floor_of(name) < floor_of(own), f"{own} must not import {name}"
        hidden = name.startswith("harness.") and name not in SEEN_BY_METHODS
        assert not (own.startswith("methods.") and hidden), f"{own} must not import {name}"


@pytest.mark.parametrize("path", SOURCES, ids=module_of)
def test_no_file_is_longer_than_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


def test_the_harness_names_no_method() -> None:
    names = set(method.names())
    for path in (ROOT / "harness").glob("*.py"):
        tree = ast.parse(path.read_text())
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not texts & names, f"{path.name} names {texts & names}"


def test_the_parent_process_imports_no_torch() -> None:
    code = (
        "import sys, harness.cli; from harness import method; from harness.spec import *;"
        "[method.create(name, {}).plan(Workload(), Budget()) for name in method.names()];"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_ruff_and_mypy_have_nothing_to_say() -> None:
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
