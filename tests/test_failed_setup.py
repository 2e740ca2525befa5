"""What a failed set-up says: the cause and the way out in one line. Its pip is a script that fails with a text."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.base.checkout import ROOT

DROP_FROM_BOUNDING_SET, DAC_OVERRIDE = 24, 1  # linux/prctl.h, linux/capability.h


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose .venv is of another lock."""
    folder = tmp_path / "project"
    (folder / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "venv.sh", folder)
    (folder / "pyproject.toml").touch()
    (folder / "requirements").mkdir()
    (folder / "requirements/run.txt").touch()
    (folder / ".venv/.stamp").touch()
    return folder


def set_up(project: Path, says: str) -> subprocess.CompletedProcess:
    python = project / ".venv/bin/python"
    python.write_text(f"#!/bin/sh\ncase $* in *--version) exit 0 ;; esac\ncat <<'END'\n{says}\nEND\nexit 1\n")
    python.chmod(0o755)
    words = ["bash", "-c", '. "$0/venv.sh" ""', str(project)]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(words, capture_output=True, text=True, env=environment, preexec_fn=obey_rights)


def obey_rights() -> None:
    """Root, too, may write only where a folder's rights say so."""
    ctypes.CDLL(None).prctl(DROP_FROM_BOUNDING_SET, DAC_OVERRIDE)


@pytest.mark.parametrize(
    "says, cause",
    [
        (
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            "no room on a disk",
        ),
        ("error: failed to write\n  cause: No space left on device (os error 28)", "no room on a disk"),
        (
            "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken\n"
            "ERROR: No matching distribution found",
            "an index cannot be reached",
        ),
    ],
)
def test_a_known_cause_is_told_in_one_line(project: Path, says: str, cause: str) -> None:
    done = set_up(project, says)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and line.startswith(
        f"error: set-up failed while installing packages: {cause}"
    )
    assert "try again" in line and line.endswith(f"the whole output is in {project}/.venv.log")
    assert done.stderr.count("error") == 1 and says.splitlines()[0] not in done.stderr


def test_of_an_unknown_cause_the_end_of_the_output_is_told(project: Path) -> None:
    done = set_up(project, "\n".join(f"line {number}" for number in range(9)))
    assert done.returncode == 2 and "line 8" in done.stderr and "line 3" not in done.stderr


def test_another_hash_is_no_fault_of_the_network(project: Path) -> None:
    done = set_up(
        project, "Retry(total=0)\nERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
    )
    assert "DO NOT MATCH THE HASHES" in done.stderr and "network" not in done.stderr


def test_a_checkout_that_cannot_be_written_to_is_told_in_one_line(project: Path) -> None:
    project.chmod(0o555)
    done = set_up(project, "")
    project.chmod(0o755)
    assert done.returncode == 2
    assert (
        done.stderr
        == f"error: set-up cannot write to {project}: Permission denied; try a copy of the checkout\n"
    )
