"""run.sh from a folder of anybody's files: what runs is this project, from its own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from harness.base.child_process import ask

FOREIGN = "print('foreign')\nraise SystemExit(1)\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that is set up, whose harness says so and no more."""
    folder = tmp_path / "project"
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / "harness").mkdir()
    for name in ("run.sh", "venv.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    # else a harness elsewhere on PYTHONPATH, a package, would go first
    (folder / "harness/__init__.py").touch()
    (folder / "harness/__main__.py").write_text("import click\nprint('ours')\n")
    python = folder / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    locks = sorted((folder / "requirements").glob("*.txt"))
    pins = b"".join(path.read_bytes() for path in (folder / "pyproject.toml", *locks))
    stamp = subprocess.run(["cksum"], input=pins, capture_output=True, check=True).stdout.decode().strip()
    (folder / ".venv/.stamp").write_text(f"{stamp} \n")
    return folder


def call(program: str, folder: Path, **environment: str) -> str:
    environment = {**os.environ, **environment}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run([program], cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["harness.py", "click.py"])
def test_no_module_is_imported_from_the_folder_of_the_call(project: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FOREIGN)
    assert call(str(project / "run.sh"), tmp_path) == "ours\n"


def test_no_process_of_a_run_imports_from_the_folder_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/answer.py").write_text("import json, harness\nprint(json.dumps('ours'))\n")
    (tmp_path / "harness.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert ask("answer", None) == "ours"


def test_the_project_is_importable_from_any_folder(tmp_path: Path) -> None:
    """By the Python of .venv, into which set-up installs the project."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", "import harness, methods.hydra"]
    assert subprocess.run(words, cwd=tmp_path, env=environment).returncode == 0


def test_cdpath_does_not_lead_to_another_project(project: Path, tmp_path: Path) -> None:
    (tmp_path / "other/project").mkdir(parents=True)
    assert call("project/run.sh", tmp_path, CDPATH=str(tmp_path / "other"), PYTHON="/nowhere") == "ours\n"
    assert not list((tmp_path / "other/project").iterdir())
