"""run.sh's set-up on a copy of the project: fresh, again, interrupted, stale, without uv; large packages left out."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.base.checkout import ROOT

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]
KEPT = "click|nvidia-ml-py|psutil|pydantic|PyYAML|Jinja2|rich|setuptools"  # small; enough for --help
THEIRS = "annotated-types|markdown-it-py|markupsafe|mdurl|pydantic-core|pygments|typing-extensions|typing-inspection"
NO_HASH = f"--hash=sha256:{'0' * 64}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "project"
    folder.mkdir()
    for name in ("run.sh", "venv.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("harness", "methods", "cases", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    keep_lines(folder / "pyproject.toml", rf'    "(?!({KEPT})==).*==.*",.*')
    keep_lines(folder / "requirements/run.txt", rf"(?!(?i:{KEPT}|{THEIRS})==).*==.*")
    return folder


def keep_lines(path: Path, left_out: str) -> None:
    lines = path.read_text().split("optional-dependencies")
    path.write_text("optional-dependencies".join([re.sub(rf"(?m)^{left_out}\n", "", lines[0]), *lines[1:]]))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


def call(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([str(folder / "run.sh"), "--help"], capture_output=True, text=True)


def change_pins(folder: Path, text: str = "# changed") -> None:
    with (folder / "pyproject.toml").open("a") as pins:
        pins.write(f"\n{text}\n")


@pytest.mark.parametrize("phase", ["Collecting", "Resolved"])  # pip's word, while it fetches uv; uv's, as it installs
def test_an_interrupted_set_up_heals_itself_and_says_a_line_a_phase(copy: Path, phase: str) -> None:
    shutil.rmtree(copy / ".venv", ignore_errors=True)
    log = copy / ".venv.log"
    log.unlink(missing_ok=True)
    first = subprocess.Popen([str(copy / "run.sh"), "--help"], stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.time() + 300
    while not (log.exists() and phase in log.read_text()) and time.time() < deadline:
        time.sleep(0.005)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert not (copy / ".venv" / ".stamp").exists()
    done = call(copy)
    assert done.returncode == 0 and "Methods" in done.stdout
    told = done.stderr.splitlines()
    assert len(told) == 3 and "with uv" in told[1] and told[2] == "Set-up is done.", done.stderr


def test_a_second_call_starts_at_once(copy: Path) -> None:
    call(copy)
    began = time.time()
    done = call(copy)
    assert done.returncode == 0 and done.stderr == ""
    assert time.time() - began < 5


def test_packages_are_compiled_before_they_are_imported(copy: Path) -> None:
    """Where Python may write no bytecode, each import would compile them again."""
    assert any((copy / ".venv").rglob("click/__pycache__/shell_completion*.pyc"))


def test_changed_pins_are_installed(copy: Path) -> None:
    call(copy)
    change_pins(copy)
    done = call(copy)
    assert done.returncode == 0 and done.stderr.startswith("Installing packages with uv")


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
    assert told[0].startswith("Installing ") and told[1] in ("", "Waiting for another set-up of .venv ...\n")


def test_the_project_is_importable_from_any_folder(copy: Path, tmp_path: Path) -> None:
    call(copy)
    words = [str(copy / ".venv/bin/python"), "-c", "import harness.core, methods; print(harness.__file__)"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout.startswith(str(copy / "harness"))


@pytest.mark.parametrize("why", ["no uv", "uv fails"])
def test_pip_installs_the_lock_where_uv_cannot(copy: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    shutil.rmtree(copy / ".venv", ignore_errors=True)
    lock = copy / "requirements/uv.txt"
    listed = lock.read_text()
    if why == "no uv":
        lock.write_text(re.sub(r"(?m)^(uv==\S+) .*", rf"\1 {NO_HASH}", listed))
    else:
        monkeypatch.setenv("UV_DEFAULT_INDEX", "file:///nowhere")
    done = call(copy)
    lock.write_text(listed)
    assert done.returncode == 0 and "Methods" in done.stdout
    told = done.stderr.splitlines()
    assert ("uv failed" if why == "uv fails" else "uv cannot be had") in told[-3] and "with pip" in told[-2], told


def test_a_file_of_another_hash_is_refused_by_name(copy: Path) -> None:
    shutil.rmtree(copy / ".venv", ignore_errors=True)
    lock = copy / "requirements/run.txt"
    listed = lock.read_text()
    lock.write_text(re.sub(r"(?m)^(click==\S+) .*", rf"\1 {NO_HASH}", listed))
    done = call(copy)
    lock.write_text(listed)
    assert done.returncode == 2 and "click" in done.stderr and "set-up failed" in done.stderr, done.stderr
    assert not (copy / ".venv/lib/python3.11/site-packages/click").exists()
    assert call(copy).returncode == 0


def test_the_lock_serves_every_python_and_platform_with_cuda(copy: Path, tmp_path: Path) -> None:
    """From PyPI alone, whose torch is the CUDA build on Linux; nothing that is not locked."""
    call(copy)
    lock = ROOT / "requirements"
    locked = "".join(path.read_text() for path in lock.glob("*.txt"))
    words = [str(copy / ".venv/bin/uv"), "pip", "install", "--no-config", "--dry-run", "--target", str(tmp_path)]
    words += ["--verify-hashes", "--default-index", "https://pypi.org/simple", "-r", str(ROOT / "pyproject.toml")]
    words += ["--extra", "test", "--extra", "notebook"]
    words += [word for name in ("run", "extras", "cuda") for word in ("-c", str(lock / f"{name}.txt"))]
    for version, machine in itertools.product(("3.11", "3.12", "3.13"), ("x86_64", "aarch64")):
        platform = ["--python-version", version, "--python-platform", f"{machine}-manylinux_2_28"]
        done = subprocess.run([*words, *platform], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        chosen = re.findall(r"(?m)^ \+ (\S+==\S+)", done.stderr)
        assert "torch==2.13.0" in chosen and any(name.startswith("nvidia-cudnn") for name in chosen)
        assert not [name for name in chosen if f"{name} " not in locked]


@pytest.mark.parametrize("by", ["environment", "file"])
def test_uv_is_told_what_pips_configuration_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """A package that only a folder of pip's find-links has."""
    project = make_project(tmp_path)
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--use-pep517", "-w", str(tmp_path / "wheels")]
    subprocess.run([*words, str(tmp_path / "beside-1")], check=True, env=os.environ | {"PYTHONSAFEPATH": ""})
    (wheel,) = (tmp_path / "wheels").iterdir()
    lock(project, wheel)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    if by == "environment":
        monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} {wheel.parent}")
    else:
        (tmp_path / "pip.conf").write_text(f"[global]\nfind-links =\n    {tmp_path}\n    {wheel.parent}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    done = import_beside(project)
    assert done.returncode == 0 and "with pip" not in done.stderr, done.stderr


def test_debians_pip_installs_a_source_whose_setup_imports_a_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSpeed's does, by pip 23.0.1 of Debian 12, with which the image is built, where uv cannot be had."""
    project = make_project(tmp_path)
    lock(project, Path(shutil.make_archive(str(tmp_path / "beside-1"), "gztar", tmp_path, "beside-1")))
    (project / "requirements/uv.txt").write_text(f"uv==0.0.1 {NO_HASH}\n")
    python = project / ".venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", project / ".venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "pip==23.0.1"], check=True)
    (project / ".venv/.stamp").touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = import_beside(project)
    assert done.returncode == 0 and "with pip" in done.stderr, done.stderr


def make_project(folder: Path) -> Path:
    """A project that needs one package, `beside`, whose source lies beside it."""
    source, project = folder / "beside-1", folder / "project"
    source.mkdir()
    (source / "beside.py").touch()
    (source / "setup.py").write_text(
        "import beside\nfrom setuptools import setup\nsetup(name='beside', version='1', py_modules=['beside'])\n"
    )
    (project / "requirements").mkdir(parents=True)
    shutil.copy(ROOT / "venv.sh", project)
    shutil.copy(ROOT / "requirements/uv.txt", project / "requirements")
    setuptools = re.findall(r"(?m)^setuptools==.*", (ROOT / "requirements/run.txt").read_text())[0]
    (project / "requirements/run.txt").write_text(f"{setuptools}\n")
    for name in ("extras", "cuda"):
        (project / f"requirements/{name}.txt").touch()
    pin = setuptools.split()[0]
    (project / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["{pin}"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "project"\n'
        f'version = "1"\ndependencies = ["{pin}", "beside==1"]\n[tool.setuptools]\npy-modules = []\n'
    )
    return project


def lock(project: Path, file: Path) -> None:
    with (project / "requirements/run.txt").open("a") as pins:
        pins.write(f"beside==1 --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n")


def import_beside(project: Path) -> subprocess.CompletedProcess:
    words = ["bash", "-c", '. "$0/venv.sh" "" && cd / && "$python" -c "import beside"', str(project)]
    return subprocess.run(words, capture_output=True, text=True)


def test_a_failed_set_up_names_the_file_of_its_output_and_is_done_again(copy: Path) -> None:
    files = {copy / "pyproject.toml": '    "click==', copy / "requirements/run.txt": "click=="}
    before = {path: path.read_text() for path in files}
    for path, pin in files.items():
        path.write_text(
            before[path].replace(
                pin, f'    "no-such-package==1.0",\n{pin}' if '"' in pin else f"no-such-package==1.0 {NO_HASH}\n{pin}"
            )
        )
    for _ in range(2):
        done = call(copy)
        assert done.returncode == 2 and f"the whole output is in {copy}/.venv.log" in done.stderr
        assert "no-such-package" in done.stderr and len(done.stderr.splitlines()) < 12
    for path, text in before.items():
        path.write_text(text)
    assert call(copy).returncode == 0


def test_without_a_python_it_says_what_to_install(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / ".venv", ignore_errors=True)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "flock", "rm"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    command = [str(tools / "bash"), str(copy / "run.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools)})
    assert done.returncode == 2 and "install python3.11 and python3.11-venv" in done.stderr
