"""Files of methods and cases that do anything while they load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.core import method
from harness.core.method import ROOT

FORKS = """import os
child = os.fork()
if not child:
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


@pytest.mark.parametrize("ending", ["import os; os._exit(0)", "from os import _exit; _exit(0)", "raise SystemExit(0)"])
@pytest.mark.parametrize("kind", ["--methods", "--cases"])
def test_a_file_that_would_end_the_call_is_named(kind: str, ending: str, tmp_path: Path) -> None:
    """It ended with exit code 0 and no word."""
    (tmp_path / "case88.py").write_text(ending)
    verb = ["verify"] if kind == "--cases" else ["-m", "case88"]
    words = [sys.executable, "-m", "harness", *verb, kind, str(tmp_path), "--results", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    assert done.stderr.startswith(f"error: {tmp_path}/case88.py does not load: SystemExit: ")


def test_a_fork_of_a_file_may_end(tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(FORKS)
    with pytest.raises(ValueError, match=r"forks.py must hold one frozen dataclass"):
        method.load("forks", (tmp_path,))
