"""run.sh's set-up on a copy of the project: fresh, again, interrupted, stale. Torch is left out to keep it short."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from harness.core.method import ROOT

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "project"
    folder.mkdir()
    for name in ("run.sh", "venv.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("harness", "methods"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    pins = folder / "pyproject.toml"
    pins.write_text(
        re.sub(r'^ +"(torch|numpy|megatron-core|deepspeed)==.*\n', "", pins.read_text(), flags=re.MULTILINE)
    )
    return folder


def call(folder: Path) -> tuple[subprocess.CompletedProcess, float]:
    began = time.time()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(folder / "run.sh"), "--help"], capture_output=True, text=True, env=environment)
    return done, time.time() - began


def test_an_interrupted_set_up_heals_itself(copy: Path) -> None:
    first = subprocess.Popen(
        [str(copy / "run.sh"), "--help"], stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    assert first.stderr
    for line in first.stderr:
        if "Collecting" in line:
            break
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (copy / ".venv" / ".stamp").exists()
    done, _ = call(copy)
    assert done.returncode == 0 and "Setting up .venv" in done.stderr
    assert "Methods" in done.stdout


def test_a_second_call_starts_at_once(copy: Path) -> None:
    call(copy)
    done, seconds = call(copy)
    assert done.returncode == 0 and done.stderr == ""
    assert seconds < 5


def test_changed_pins_are_installed(copy: Path) -> None:
    call(copy)
    (copy / "pyproject.toml").write_text((copy / "pyproject.toml").read_text() + "\n# changed\n")
    done, _ = call(copy)
    assert done.returncode == 0 and "Setting up .venv" in done.stderr


def test_without_a_python_it_says_what_to_install(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / ".venv")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "flock", "rm"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    command = [str(tools / "bash"), str(copy / "run.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools)})
    assert done.returncode == 2 and "install python3.11 and python3.11-venv" in done.stderr
