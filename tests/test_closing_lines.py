"""What pytest says at the end: how a failed test runs alone, which tests had not ended, how many were left out."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from harness.base.checkout import ROOT

ENDLESS = """
import threading

def test_of_the_first_kind(tmp_path):
    pass

def test_without_an_end():
    threading.Event().wait()
"""


def start(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    """Run pytest on one file of tests, with the closing lines alone of what these tests' pytest has."""
    (folder / "test_it.py").write_text(text)
    plugins = ["-p", "tests.support.closing_lines", "-p", "no:cacheprovider", "-p", "no:kmock"]
    words = [sys.executable, "-m", "pytest", f"--rootdir={folder}", *plugins, *options, "test_it.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    # a shell's background ignores it
    default = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=default
    )


def test_a_failed_test_s_last_line_is_the_call_that_runs_it_alone(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.parametrize('x', ['a b'])\ndef test_it(x): assert x == 'a'\n"
    output, _ = start(tmp_path, text).communicate()
    assert "alone: ./test.sh -n 0 'test_it.py::test_it[a b]'" in output.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_a_run_that_is_cut_off_names_the_tests_that_had_not_ended(
    tmp_path: Path, number: signal.Signals, options: tuple[str, ...]
) -> None:
    run = start(tmp_path, ENDLESS, "-v", *options)
    assert run.stdout
    output = ""
    while "test_without_an_end" not in output:  # pytest's first process knows of it
        character = run.stdout.read(1)
        assert character, output
        output += character
    run.send_signal(number)
    output, _ = run.communicate()
    assert [line for line in output.splitlines() if "had not ended" in line] == [
        "had not ended: test_it.py::test_without_an_end"
    ]
