"""Folders that may not be read, or that go away while a job runs: one line and a documented exit code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.options import check_writable
from harness.base.checkout import ROOT
from tests.support import cli, tiny

LOST = "-dac_override,-dac_read_search"  # what lets root read everything


def as_anybody() -> list[str]:
    """The words before a call that make rights count for it."""
    if os.geteuid():
        return []
    arguments = ["setpriv", f"--bounding-set={LOST}", f"--inh-caps={LOST}"]
    if not shutil.which("setpriv") or subprocess.run([*arguments, "true"], capture_output=True).returncode:
        pytest.skip("root reads every folder here: no setpriv that takes its capabilities away")
    return arguments


@contextlib.contextmanager
def as_anybody_here() -> Iterator[None]:
    """Let rights count for this thread; access() goes by what it is permitted, which it keeps."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3; this thread
    assert libc.capget(header, held) == 0
    lost = (ctypes.c_uint32 * 6)(*held)
    lost[0] &= ~(1 << 1 | 1 << 2)  # of the effective ones CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, lost) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder with a log in it that may be neither listed nor entered."""
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "log_a.txt").touch()
    folder.chmod(0)
    yield folder
    folder.chmod(0o700)


@pytest.mark.parametrize(
    "verb",
    [
        "verify",
        "report",
        "doctor",
        "compare l2l resident",
        "fairness",
        "bundle",
        "case 3 --profile demo --extract",
        "advise -l 2 -h 64",
        "import .",
        " ".join(tiny.WORDS),
    ],
)
def test_results_below_a_folder_that_may_not_be_read_are_one_line(verb: str, closed: Path) -> None:
    with as_anybody_here():
        done = cli.run(*verb.split(), "--results", closed / "results")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    assert (
        done.stderr.startswith("error: cannot ")
        and f"{closed}" in done.stderr
        and "Permission denied" in done.stderr
    )


def test_results_in_a_folder_that_may_not_be_read_are_one_line(closed: Path) -> None:
    # asks by access()
    arguments = [*as_anybody(), sys.executable, "-m", "harness", "verify", "--results", str(closed)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    message = f"error: Invalid value for '--results': Directory '{closed}' is not readable; see --help\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize("option", ["--methods", "--cases", "--claims", "--machines"])
def test_what_is_added_from_a_folder_that_may_not_be_read_is_one_line(
    option: str, closed: Path, tmp_path: Path
) -> None:
    place = closed / "some.yaml" if option in ("--claims", "--machines") else closed / "some"
    with as_anybody_here():
        done = cli.run("verify", "--results", tmp_path, option, place)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done
    assert done.stderr.startswith("error: ") and "Permission denied" in done.stderr


@pytest.mark.parametrize("how", ["removed", "closed"])
def test_a_results_folder_that_goes_away_during_a_run_is_one_line(how: str, tmp_path: Path) -> None:
    results = tmp_path / "results"
    lines = {
        "removed": f"import shutil; shutil.rmtree({str(results)!r})",
        "closed": f"os.chmod({str(results)!r}, 0)",
    }
    methods = tiny.write_ending(tmp_path, lines[how])
    arguments = [
        *tiny.WORDS,
        "-m",
        "ending",
        "--methods",
        str(methods),
        "--steps",
        "2",
        "--results",
        str(results),
    ]
    if how == "closed":  # for the worker, too
        call = [*as_anybody(), sys.executable, "-m", "harness", *arguments]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    else:
        done = cli.run(*arguments)
    results.exists() and results.chmod(0o700)
    message = (
        f"expected a folder of results to write to, got {results} removed or closed while a job ran, and its"
    )
    expected = f"error: {message} record is lost; try again with another --results\n"
    assert (done.returncode, done.stderr) == (3, expected)


def test_a_folder_that_is_a_link_to_nothing_is_said_to_be_one(tmp_path: Path) -> None:
    (link := tmp_path / "results").symlink_to("nowhere")
    with pytest.raises(
        ValueError, match="results: it is a link to nothing; try another folder with --results"
    ):
        check_writable(link)
