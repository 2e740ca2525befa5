"""run.sh's set-up on a copy of the project: fresh, again, interrupted, stale, with uv. Large packages are left out."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.core.method import ROOT

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
# Stands in for uv: keeps what it was asked for, then does what FAKE_UV says.
UV = """#!/bin/sh
echo "$@" >> {called}
test "$FAKE_UV" = works || {{ echo "No solution found"; exit 1; }}
shift 2; shift 2  # pip install --python PYTHON
exec {python} -m pip install "$@"
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "project"
    folder.mkdir()
    for name in ("run.sh", "venv.sh", "pyproject.toml", "hashes.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("harness", "methods", "cases"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    pins = folder / "pyproject.toml"
    left_out = "torch|numpy|megatron-core|deepspeed|scipy|pandas|matplotlib|jupytext|ortools|docker|submitit"
    pins.write_text(re.sub(rf'^ +"({left_out})==.*\n', "", pins.read_text(), flags=re.MULTILINE))
    return folder


@pytest.fixture(autouse=True)
def no_uv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PATH without this machine's uv."""
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / "uv").exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def uv(no_uv: None, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that names each call of uv."""
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(UV.format(called=tmp_path / "called", python=copy / ".venv/bin/python"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))
    return tmp_path / "called"


def call(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([str(folder / "run.sh"), "--help"], capture_output=True, text=True)


def change_pins(folder: Path, text: str = "# changed") -> None:
    with (folder / "pyproject.toml").open("a") as pins:
        pins.write(f"\n{text}\n")


def test_an_interrupted_set_up_heals_itself_and_says_a_line_a_phase(copy: Path) -> None:
    first = subprocess.Popen([str(copy / "run.sh"), "--help"], stderr=subprocess.DEVNULL, start_new_session=True)
    log = copy / ".venv.log"
    deadline = time.time() + 300
    while not (log.exists() and "Collecting" in log.read_text()) and time.time() < deadline:
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (copy / ".venv" / ".stamp").exists()
    done = call(copy)
    assert done.returncode == 0 and "Methods" in done.stdout
    told = done.stderr.splitlines()
    assert len(told) <= 4 and "with pip" in told[-2] and told[-1] == "Set-up is done.", done.stderr
    assert "Successfully installed" in log.read_text()


def test_a_second_call_starts_at_once(copy: Path) -> None:
    call(copy)
    began = time.time()
    done = call(copy)
    assert done.returncode == 0 and done.stderr == ""
    assert time.time() - began < 5


def test_changed_pins_are_installed(copy: Path) -> None:
    call(copy)
    change_pins(copy)
    done = call(copy)
    assert done.returncode == 0 and done.stderr.startswith("Resolving ")


def test_an_extra_is_added_and_stays(copy: Path) -> None:
    """As ./run.sh notebook adds Jupyter, here a small package: the next call lacks nothing."""
    pins = copy / "pyproject.toml"
    pins.write_text(re.sub(r"^notebook = .*", 'notebook = ["json5==0.17.3"]', pins.read_text(), flags=re.MULTILINE))
    assert subprocess.run(["bash", "-c", '. "$0/venv.sh" notebook', str(copy)], capture_output=True).returncode == 0
    assert subprocess.run([str(copy / ".venv/bin/python"), "-c", "import json5, click"]).returncode == 0
    assert call(copy).stderr == ""


def test_two_calls_at_once_set_up_once(copy: Path) -> None:
    change_pins(copy)
    words = [str(copy / "run.sh"), "--help"]
    both = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = sorted(each.communicate()[1] for each in both)
    assert [each.returncode for each in both] == [0, 0]
    assert told[0].startswith("Resolving ") and told[1] in ("", "Waiting for another set-up of .venv ...\n")


def test_uv_installs_the_same_pins_where_it_is_there(copy: Path, uv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_UV", "works")
    change_pins(copy)
    done = call(copy)
    assert done.returncode == 0 and "with uv" in done.stderr and "with pip" not in done.stderr
    asked = uv.read_text()
    assert asked.startswith(f"pip install --python {copy}/.venv/bin/python --no-deps --require-hashes -r ")


def test_pip_installs_what_uv_cannot(copy: Path, uv: Path) -> None:
    change_pins(copy)
    done = call(copy)
    assert done.returncode == 0 and "uv failed" in done.stderr and "with pip" in done.stderr
    assert uv.exists() and "No solution found" in (copy / ".venv.log").read_text()


def test_a_file_of_another_hash_is_refused_by_name_unless_it_is_let_in(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = (copy / "hashes.txt").read_text()
    (copy / "hashes.txt").write_text(re.sub(r"(?m)^(click==\S+) .*", rf"\1 --hash=sha256:{'0' * 64}", listed))
    done = call(copy)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("error: expected a file of click ")
    monkeypatch.setenv("HARNESS_UNHASHED", "click")
    assert call(copy).returncode == 0
    (copy / "hashes.txt").write_text(listed)


def test_debians_pip_installs_a_source_whose_setup_imports_a_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSpeed's does, by pip 23.0.1 of Debian 12, with which the image is built."""
    source, project = tmp_path / "beside-1", tmp_path / "project"
    source.mkdir()
    (source / "beside.py").touch()
    (source / "setup.py").write_text(
        "import beside\nfrom setuptools import setup\nsetup(name='beside', version='1', py_modules=['beside'])\n"
    )
    archive = Path(shutil.make_archive(str(source), "gztar", tmp_path, source.name))
    project.mkdir()
    shutil.copy(ROOT / "venv.sh", project)
    (project / "pyproject.toml").write_text('[project]\ndependencies = ["beside==1"]\noptional-dependencies = {}\n')
    (project / "hashes.txt").write_text(f"beside==1 --hash=sha256:{hashlib.sha256(archive.read_bytes()).hexdigest()}\n")
    python = project / ".venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", project / ".venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "pip==23.0.1"], check=True)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    words = ["bash", "-c", '. "$0/venv.sh" "" && cd / && "$python" -c "import beside"', str(project)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_failed_set_up_names_the_file_of_its_output_and_is_done_again(copy: Path) -> None:
    pins = (copy / "pyproject.toml").read_text()
    (copy / "pyproject.toml").write_text(pins.replace('"click==', '"no-such-package==1.0",\n    "click=='))
    for _ in range(2):
        done = call(copy)
        assert done.returncode == 2 and f"the whole output is in {copy}/.venv.log" in done.stderr
        assert "no-such-package" in done.stderr and len(done.stderr.splitlines()) < 12
    (copy / "pyproject.toml").write_text(pins)
    assert call(copy).returncode == 0


def test_without_a_python_it_says_what_to_install(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / ".venv")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "flock", "rm"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    command = [str(tools / "bash"), str(copy / "run.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools)})
    assert done.returncode == 2 and "install python3.11 and python3.11-venv" in done.stderr
