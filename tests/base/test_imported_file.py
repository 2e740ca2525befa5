"""Files of methods and cases that do anything while they load."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from harness.base.imported_file import PRESENT_NAMES, import_file
from harness.core import identity, method

FORKS = """import os
child = os.fork()
if not child:
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


# A method whose functions, and whose making, do what its option says.
ENDS = """from dataclasses import dataclass
from harness.core.method import Method

@dataclass(frozen=True)
class Ends(Method):
    ending: str = ""
    at_once: bool = False
    label = "Ends"

    def __post_init__(self):
        exec(self.ending if self.at_once else "")

    def plan(self, *words):
        exec(self.ending)

    def train(self, workload, batches, device): ...

    missing = to_build = build = describe = plan
    twin_options = classmethod(lambda cls, ending, at_once: exec(ending))
    build_seconds = property(plan)
"""
CALLS = """import sys
from pathlib import Path
from harness.core import method

endings = ["raise SystemExit(0)", "import os; os._exit(0)", "import posix; posix._exit(0)", "import sys; sys.exit()"]
names = ["plan", "missing", "to_build", "build", "describe", "twin_options", "build_seconds", "__init__"]
for ending in endings:
    for name in names:
        try:
            ends = method.create("ends", {"ending": ending, "at_once": name == "__init__"}, (Path(sys.argv[1]),))
            getattr(ends, name)(ending, False)
        except ValueError as error:
            print(name, error)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "import os; os._exit(0)",
        "from os import _exit; _exit(0)",
        "import posix; posix._exit(0)",
        "raise SystemExit(0)",
    ],
)
@pytest.mark.parametrize("kind", ["--methods", "--cases"])
def test_a_file_that_would_end_the_call_is_named(kind: str, ending: str, tmp_path: Path) -> None:
    """It ended with exit code 0 and no word."""
    (tmp_path / "case88.py").write_text(ending)
    verb = ["verify"] if kind == "--cases" else ["-m", "case88"]
    command = [sys.executable, "-m", "harness", *verb, kind, str(tmp_path), "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    assert done.stderr.startswith(f"error: {tmp_path}/case88.py does not load: SystemExit: ")


def test_a_fork_of_a_file_may_end(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    with pytest.raises(ValueError, match=r"forks.py must hold one frozen dataclass"):
        method.load("forks", (tmp_path,))


def test_no_function_of_a_method_ends_the_call(tmp_path: Path) -> None:
    """./run.sh ended with exit code 0 and no word."""
    (tmp_path / "ends.py").write_text(ENDS)
    done = subprocess.run([sys.executable, "-c", CALLS, tmp_path], cwd=ROOT, capture_output=True, text=True)
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr, len(lines)) == (0, "", 4 * 8)
    for name, file, text in lines:
        assert file == f"{tmp_path}/ends.py's" and text.startswith(f"{name}() ended the process: SystemExit")
        assert ", ends.py line " in text and text.endswith("; try raise ValueError")


SOURCE = """
from harness.core import gpt as by_package
from harness.core.gpt import GPT
from harness.core.model import build
from harness.figures.case import Case
"""


def test_a_file_that_imports_former_names_gets_the_present_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "of_another_year.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = import_file("of_another_year", file)
    assert module.by_package is sys.modules["harness.models.gpt"]
    assert module.GPT is sys.modules["harness.models.gpt"].GPT
    assert module.build is sys.modules["harness.models.model"].build
    assert module.Case is sys.modules["papers.figures.case"].Case


@pytest.mark.parametrize("present", PRESENT_NAMES.values())
def test_a_former_name_leaves_the_present_modules_spec(present: str) -> None:
    assert importlib.import_module(present).__spec__.name == present  # type: ignore[union-attr]


def test_the_identity_of_a_method_covers_what_it_imports_by_a_former_name(tmp_path: Path) -> None:
    file = tmp_path / "of_another_year.py"
    file.write_text("from harness.core.model import build\n")
    assert "model.py" in {path.name for path in identity.closure(file)}
