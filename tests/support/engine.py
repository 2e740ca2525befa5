"""A container engine of the tests' own, from Debian's packages: started for those who ask, stopped after the last one.

It has its own socket and folders, no network and no rules for packets. The base image is made once and kept in .venv,
as the wheels are, of which the tests' image takes as few as a small job needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from harness.base.checkout import ROOT
from tests.support.packages import SHARED, locked, missing, need
from tests.support.until import until

PACKAGES = ("docker.io", "mmdebstrap")
BASE, IMAGE = "tests/base:bookworm", "tests/harness:small"
LEFT_OUT = (
    "scipy",
    "matplotlib",
    "Jinja2",
    "megatron-core",
    "deepspeed",
    "docker",
    "submitit",
    "jupytext",
    "ortools",
    "transformers",
    "accelerate",
)
MEMORY = Path("/dev/shm")
# any engine makes them
FIXED_FOLDERS = ("/run/docker/plugins", "/run/docker", "/run/containerd/s", "/run/containerd")
ROOM_BYTES = 12 * 2**30


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """The address of a running engine with the tests' image, shared by all test processes of this checkout."""
    if os.geteuid() != 0:
        missing("an engine of the tests' own takes root")
    need(PACKAGES, "dockerd")
    folder = SHARED / f"tests-docker-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]}"
    with open(f"{folder}.users.lock", "w") as users:
        try:
            with locked(Path(f"{folder}.lock")):
                if is_alone(users):
                    stop(folder)  # a run that was killed left it
                    start(folder)
                    make_image(folder)
                fcntl.flock(users, fcntl.LOCK_SH)
            yield address_of(folder)
        finally:
            with locked(Path(f"{folder}.lock")):
                if is_alone(users):
                    stop(folder)


def is_alone(users: IO[str]) -> bool:
    """Whether no other process holds this lock, which is this one's then."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def address_of(folder: Path) -> str:
    return f"unix://{folder}/socket"


def docker(address: str, *words: str) -> list[str]:
    return ["/usr/bin/docker", "-H", address, *words]


def data_folder(folder: Path) -> Path:
    """Of the engine: in memory where there is plenty, for an image is written once and read by a few."""
    room = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) if MEMORY.is_dir() else 0
    return in_memory(folder) if room > ROOM_BYTES else folder / "data"


def in_memory(folder: Path) -> Path:
    return MEMORY / f"tests-docker-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def start(folder: Path) -> None:
    folder.mkdir()
    with open(folder / "log", "w") as log:
        engine = subprocess.Popen(
            [
                "dockerd",
                "--data-root",
                data_folder(folder),
                "--exec-root",
                folder / "exec",
                "--pidfile",
                folder / "pid",
                "--host",
                address_of(folder),
                "--bridge",
                "none",
                "--iptables=false",
                "--storage-driver",
                "overlay2",
                "--containerd-namespace",
                "tests",
                "--containerd-plugins-namespace",
                "tests-plugins",
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def answers() -> bool:
        return subprocess.run(docker(address_of(folder), "version"), capture_output=True).returncode == 0

    until(lambda: answers() or engine.poll() is not None, poll_seconds=0.1)
    if engine.poll() is not None:
        missing(
            f"docker's engine does not start here: {(folder / 'log').read_text().strip().splitlines()[-1]}"
        )


def stop(folder: Path) -> None:
    """End the engine, if it runs, and remove all that it made."""
    with contextlib.suppress(OSError, psutil.Error):
        engine = psutil.Process(int((folder / "pid").read_text()))
        engine.terminate()
        engine.wait()
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        if line.split()[1].startswith((f"{folder}/", f"{in_memory(folder)}/")):
            subprocess.run(["umount", "--lazy", line.split()[1]])
    for path in (folder, in_memory(folder)):
        shutil.rmtree(path, ignore_errors=True)
    compiled = (ROOT / ".venv").glob("image-*")  # there, nothing by the tests' image
    for path in (*Path("/sys/fs/cgroup").glob("*/docker"), *compiled, *map(Path, FIXED_FOLDERS)):
        with contextlib.suppress(OSError):  # it is not there, or another engine has something in it
            path.rmdir()


def make_image(folder: Path) -> None:
    """The project's own Dockerfile on a base made here, from a wheelhouse, without the engines' packages."""
    address, kept = address_of(folder), ROOT / ".venv" / "tests-image"
    kept.mkdir(exist_ok=True)
    base, wheels = kept / "base.tar", kept / "wheels"
    if not base.exists():
        unfinished = folder / "base.tar"
        words = [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            "--dpkgopt=force-unsafe-io",
            "--include=python3-venv",
        ]
        fetch(*words, "bookworm", str(unfinished))
        shutil.move(unfinished, base)
    subprocess.run(docker(address, "import", str(base), BASE), check=True, stdout=subprocess.DEVNULL)
    project = folder / "project"
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".[!d]*", "__pycache__", "results", "tests"))
    pins = project / "pyproject.toml"
    needed = re.sub(rf'^ +"({"|".join(LEFT_OUT)})==.*\n', "", pins.read_text(), flags=re.MULTILINE)
    pins.write_text(needed)
    lock = project / "requirements/run.txt"
    direct = re.findall(
        r'^    "([^"]*==[^"]*)",', needed.split("optional-dependencies")[0], flags=re.MULTILINE
    )
    pins = folder / "pins.txt"
    pins.write_text(re.sub(r" --hash=\S+", "", lock.read_text()))
    fetch(sys.executable, "-m", "pip", "wheel", "-q", "-w", str(wheels), "-c", str(pins), *direct)
    fetched = {path.name.split("-")[0].lower().replace("_", "-") for path in wheels.iterdir()}
    lock.write_text(
        "".join(line for line in lock.read_text().splitlines(keepends=True) if line.split("==")[0] in fetched)
    )
    words = [sys.executable, "-m", "pip", "download", "-q", "-d", str(wheels), "--require-hashes"]
    fetch(*words, "-r", str(ROOT / "requirements/uv.txt"))
    words = [sys.executable, "-m", "harness", "image", "build", "--image", IMAGE, "--base", BASE]
    words += ["--wheelhouse", str(wheels), "--build-arg", "PACKAGES=python3-venv", "--build-arg", "EXTRA="]
    environment = {
        **os.environ,
        "DOCKER_HOST": address,
        "PYTHONPATH": os.pathsep.join([str(project), *sys.path]),
    }
    subprocess.run(words, check=True, cwd=project, env=environment, stdout=subprocess.DEVNULL)


def fetch(*words: str) -> None:
    """A command that takes something from the network; where it cannot, what needs the image is skipped."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        missing(f"{' '.join(words[:4])}: {(done.stderr.splitlines() or [''])[-1]}")
