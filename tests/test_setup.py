"""run.sh's set-up on a copy of the project: fresh, again, interrupted, stale, without uv; large packages left out."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from tests.support.until import until
from tests.test_packages import HOUSES

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
    for name in (*HOUSES, "requirements"):
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


# pip's word, while it fetches uv; uv's, as it installs
@pytest.mark.parametrize("phase", ["Collecting", "Resolved"])
def test_an_interrupted_set_up_heals_itself_and_says_a_line_a_phase(copy: Path, phase: str) -> None:
    interrupt(copy, phase)
    while (copy / ".venv" / ".stamp").exists():  # it was done before the signal came
        interrupt(copy, phase)
    done = call(copy)
    assert done.returncode == 0 and "Methods" in done.stdout
    told = done.stderr.splitlines()
    # until those killed have let go of the lock
    told = told[told[0].startswith("Waiting for another set-up") :]
    assert len(told) == 3 and "with uv" in told[1] and told[2] == "Set-up is done.", done.stderr


def interrupt(copy: Path, phase: str) -> None:
    """Kill a set-up from nothing once its log has this word."""
    shutil.rmtree(copy / ".venv", ignore_errors=True)
    log = copy / ".venv.log"
    log.unlink(missing_ok=True)
    first = subprocess.Popen(
        [str(copy / "run.sh"), "--help"], stderr=subprocess.DEVNULL, start_new_session=True
    )
    until(lambda: (log.exists() and phase in log.read_text()) or first.poll() is not None)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert phase in log.read_text()


def test_a_second_call_sets_nothing_up(copy: Path) -> None:
    call(copy)
    files = [copy / ".venv.log", copy / ".venv" / ".stamp"]
    before = [file.stat().st_mtime_ns for file in files]
    done = call(copy)
    assert done.returncode == 0 and done.stderr == ""
    assert [file.stat().st_mtime_ns for file in files] == before


def test_packages_are_compiled_before_they_are_imported(copy: Path) -> None:
    call(copy)
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
    pins.write_text(
        re.sub(r"^notebook = .*", 'notebook = ["json5==0.17.3"]', pins.read_text(), flags=re.MULTILINE)
    )
    keep_lines(copy / "requirements/notebook.txt", r"(?!json5==).*==.*")
    assert (
        subprocess.run(["bash", "-c", '. "$0/venv.sh" notebook', str(copy)], capture_output=True).returncode
        == 0
    )
    assert subprocess.run([str(copy / ".venv/bin/python"), "-c", "import json5, click"]).returncode == 0
    assert call(copy).stderr == ""


def test_two_calls_at_once_set_up_once(copy: Path) -> None:
    call(copy)
    change_pins(copy)
    words = [str(copy / "run.sh"), "--help"]
    both = [
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = sorted(each.communicate()[1] for each in both)
    assert [each.returncode for each in both] == [0, 0]
    assert told[0].startswith("Installing ") and told[1] in ("", "Waiting for another set-up of .venv ...\n")


def test_the_project_is_importable_from_any_folder(copy: Path, tmp_path: Path) -> None:
    call(copy)
    words = [str(copy / ".venv/bin/python"), "-c", "import harness.core, methods; print(harness.__file__)"]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout.startswith(
        str(copy / "harness")
    )


def test_code_that_comes_after_the_set_up_is_importable(copy: Path, tmp_path: Path) -> None:
    """As in the image, where a change of the code does not install the packages again."""
    for name in HOUSES:
        shutil.move(copy / name, tmp_path)
    change_pins(copy)
    subprocess.run(["bash", "-c", '. "$0/venv.sh" ""', str(copy)], capture_output=True, check=True)
    for name in HOUSES:
        shutil.move(tmp_path / name, copy)
    words = [str(copy / ".venv/bin/python"), "-c", "import harness.core, methods.probe, cases"]
    assert subprocess.run(words, cwd=tmp_path).returncode == 0


def test_pip_installs_the_lock_where_uv_fails(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(copy / ".venv", ignore_errors=True)
    monkeypatch.setenv("UV_DEFAULT_INDEX", "file:///nowhere")
    done = call(copy)
    assert done.returncode == 0 and "Methods" in done.stdout
    told = done.stderr.splitlines()
    assert "uv failed" in told[-3] and "with pip" in told[-2], told


def test_a_file_of_another_hash_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = make_project(tmp_path, "beside")
    make_wheel(tmp_path, "beside")
    with (project / "requirements/run.txt").open("a") as pins:
        pins.write(f"beside==1 {NO_HASH}\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = call_python(project, "import beside")
    assert done.returncode == 2 and "beside" in done.stderr and "set-up failed" in done.stderr, done.stderr
    assert not list((project / ".venv").rglob("beside*"))


def test_the_lock_serves_every_python_and_platform_with_cuda(copy: Path, tmp_path: Path) -> None:
    """From PyPI alone, whose torch is the CUDA build on Linux; nothing that is not locked."""
    call(copy)
    lock = ROOT / "requirements"
    locked = "".join(path.read_text() for path in lock.glob("*.txt"))
    words = [
        str(copy / ".venv/bin/uv"),
        "pip",
        "install",
        "--no-config",
        "--dry-run",
        "--target",
        str(tmp_path),
    ]
    words += [
        "--verify-hashes",
        "--default-index",
        "https://pypi.org/simple",
        "-r",
        str(ROOT / "pyproject.toml"),
    ]
    words += ["--extra", "test", "--extra", "notebook", "--extra", "kubernetes"]
    lists = ("run", "test", "notebook", "kubernetes", "cuda")
    words += [word for name in lists for word in ("-c", str(lock / f"{name}.txt"))]
    for version, machine in itertools.product(("3.11", "3.12", "3.13"), ("x86_64", "aarch64")):
        platform = ["--python-version", version, "--python-platform", f"{machine}-manylinux_2_28"]
        done = subprocess.run([*words, *platform], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        chosen = re.findall(r"(?m)^ \+ (\S+==\S+)", done.stderr)
        assert "torch==2.13.0" in chosen and any(name.startswith("nvidia-cudnn") for name in chosen)
        assert not [name for name in chosen if f"{name} " not in locked]


@pytest.mark.parametrize("by", ["environment", "file"])
def test_uv_is_told_what_pips_configuration_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Of four packages one lies in the index and three in folders of find-links; pip takes a folder that is missing."""
    folders = {"one": tmp_path / "with spaces", "two": tmp_path / "wheels", "three": tmp_path / "home/wheels"}
    project = make_project(tmp_path, "beside", *folders)
    lock(project, in_index := make_wheel(tmp_path / "index/beside", "beside"))
    (in_index.parent / "index.html").write_text(f'<a href="{in_index.name}">{in_index.name}</a>')
    for name, folder in folders.items():
        lock(project, make_wheel(folder, name))
    says = {
        "index-url": (tmp_path / "index").as_uri(),
        "extra-index-url": f"https://pypi.org/simple {(tmp_path / 'nothing').as_uri()}",
        "find-links": f"{folders['one'].as_uri()} {folders['two']} ~/wheels {tmp_path / 'missing'}",
        "no-index": "false",
    }
    for name in list(os.environ):
        if name.startswith(("PIP_FIND", "PIP_INDEX", "PIP_EXTRA", "UV_")):
            monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(
        "[global]\n"
        + "".join(f"{name} = {text.replace(' ', chr(10) + '    ')}\n" for name, text in says.items())
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf") if by == "file" else os.devnull)
    if by == "environment":
        for name, text in says.items():
            monkeypatch.setenv(f"PIP_{name.replace('-', '_').upper()}", text)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    done = call_python(project, "import beside, one, two, three")
    assert done.returncode == 0 and "with pip" not in done.stderr, (
        done.stderr + (project / ".venv.log").read_text()
    )


def test_a_package_that_the_lock_does_not_list_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever pyproject.toml and the packages themselves say that they need."""
    project = make_project(tmp_path, "beside", "unlocked")
    lock(project, make_wheel(tmp_path, "beside", needs="further"))
    make_wheel(tmp_path, "further"), make_wheel(tmp_path, "unlocked")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert call_python(project, "import beside").returncode == 0
    for name in ("further", "unlocked"):
        assert "ModuleNotFoundError" in call_python(project, f"import {name}").stderr


@pytest.mark.parametrize(("needs", "by"), [("", "uv"), ("nvidia-stub", "uv"), ("nvidia-stub", "pip")])
def test_nvidias_packages_come_with_torchs_cuda_build_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needs: str, by: str
) -> None:
    project = make_project(tmp_path, "torch")
    lock(project, make_wheel(tmp_path, "torch", needs))
    lock(project, make_wheel(tmp_path, "nvidia_stub"), "cuda")
    if by == "pip":
        (project / "requirements/uv.txt").write_text(f"uv==0.0.1 {NO_HASH}\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = call_python(
        project, "import torch, importlib.util; print(importlib.util.find_spec('nvidia_stub') is not None)"
    )
    assert done.stdout == f"{bool(needs)}\n", done.stderr
    told = ["uv cannot be had" in done.stderr, "with pip" in done.stderr]
    assert told == [by == "pip"] * 2, done.stderr


def test_debians_pip_installs_a_source_whose_setup_imports_a_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSpeed's does, by pip 23.0.1 of Debian 12, with which the image is built, where uv cannot be had."""
    project, source = make_project(tmp_path, "beside"), tmp_path / "beside-1"
    source.mkdir()
    (source / "beside.py").touch()
    (source / "setup.py").write_text(
        "import beside\nfrom setuptools import setup\nsetup(name='beside', version='1', py_modules=['beside'])\n"
    )
    lock(project, Path(shutil.make_archive(str(tmp_path / "beside-1"), "gztar", tmp_path, "beside-1")))
    (project / "requirements/uv.txt").write_text(f"uv==0.0.1 {NO_HASH}\n")
    python = project / ".venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", project / ".venv"], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "pip==23.0.1"], check=True)
    (project / ".venv/.stamp").touch()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = call_python(project, "import beside")
    assert done.returncode == 0 and "with pip" in done.stderr, done.stderr


def make_project(folder: Path, *needs: str) -> Path:
    """A project that needs these packages, each of version 1; none is locked yet."""
    project = folder / "project"
    (project / "requirements").mkdir(parents=True)
    shutil.copy(ROOT / "venv.sh", project)
    shutil.copy(ROOT / "requirements/uv.txt", project / "requirements")
    setuptools = re.findall(r"(?m)^setuptools==.*", (ROOT / "requirements/run.txt").read_text())[0]
    (project / "requirements/run.txt").write_text(f"{setuptools}\n")
    for name in ("test", "notebook", "cuda"):
        (project / f"requirements/{name}.txt").touch()
    pin = setuptools.split()[0]
    pins = ", ".join(f'"{each}"' for each in (pin, *(f"{name}==1" for name in needs)))
    (project / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["{pin}"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "project"\n'
        f'version = "1"\ndependencies = [{pins}]\n[tool.setuptools]\npy-modules = []\n'
    )
    return project


def make_wheel(folder: Path, name: str, needs: str = "") -> Path:
    """A wheel of one empty module."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel, info = folder / f"{name}-1-py3-none-any.whl", f"{name}-1.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n" + (
        f"Requires-Dist: {needs}\n" if needs else ""
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{info}/RECORD", "".join(f"{each},,\n" for each in (*archive.namelist(), f"{info}/RECORD"))
        )
    return wheel


def lock(project: Path, file: Path, name: str = "run") -> None:
    with (project / f"requirements/{name}.txt").open("a") as pins:
        package = file.name.split("-")[0].replace("_", "-")
        pins.write(f"{package}==1 --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n")


def call_python(project: Path, program: str) -> subprocess.CompletedProcess:
    words = ["bash", "-c", '. "$0/venv.sh" "" && cd / && exec "$python" -c "$1"', str(project), program]
    return subprocess.run(words, capture_output=True, text=True)


def test_a_failed_set_up_names_the_file_of_its_output_and_is_done_again(copy: Path) -> None:
    files = {copy / "pyproject.toml": '    "click==', copy / "requirements/run.txt": "click=="}
    before = {path: path.read_text() for path in files}
    for path, pin in files.items():
        path.write_text(
            before[path].replace(
                pin,
                f'    "no-such-package==1.0",\n{pin}'
                if '"' in pin
                else f"no-such-package==1.0 {NO_HASH}\n{pin}",
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
