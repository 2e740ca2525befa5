"""A container engine of the tests' own, from Debian's packages: started for those who ask, stopped after the last one.

It has its own socket and folder, no network and no rules for packets. The base image is made once and kept in the
temporary folder, as the wheels are, of which the tests' image takes as few as a small job needs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from harness.method import ROOT

PACKAGES = ("docker.io", "mmdebstrap")
BASE, IMAGE = "tests/base:bookworm", "tests/harness:small"
LEFT_OUT = ("scipy", "matplotlib", "Jinja2", "megatron-core", "deepspeed", "docker", "submitit")
MEMORY = Path("/dev/shm")
STOP_SECONDS = 30.0
ROOM_BYTES = 12 * 2**30


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cannot_run() -> str | None:
    """Why no engine can be started here; None where it can."""
    if os.geteuid() != 0:
        return "an engine of its own takes root"
    return None if shutil.which("apt-get") else "not Debian: its packages are what the engine comes from"


def install(shared: Path, packages: tuple[str, ...], command: str) -> None:
    """Debian's packages, where the command that they bring is not there; nothing of them is started."""
    with locked(shared / "tests-apt.lock"):
        if shutil.which(command):
            return
        policy = Path("/usr/sbin/policy-rc.d")
        made = not policy.exists()
        if made:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        try:
            for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
                environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
                subprocess.run(["apt-get", "-q", *words], check=True, stdout=subprocess.DEVNULL, env=environment)
        finally:
            if made:
                policy.unlink()


@contextlib.contextmanager
def engine(shared: Path) -> Iterator[str]:
    """The address of a running engine with the tests' image, shared by all test processes of this machine."""
    install(shared, PACKAGES, "dockerd")
    folder = shared / "tests-docker"
    folder.mkdir(exist_ok=True)
    address = f"unix://{folder}/socket"
    with open(folder / "users.lock", "w") as users:
        with locked(folder / "start.lock"):
            if not answers(address):
                start(folder, address)
            fcntl.flock(users, fcntl.LOCK_SH)
            make_image(folder, address)
        try:
            yield address
        finally:
            with locked(folder / "start.lock"):
                fcntl.flock(users, fcntl.LOCK_UN)
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    stop(folder)


def answers(address: str) -> bool:
    return subprocess.run(docker(address, "version"), capture_output=True).returncode == 0


def docker(address: str, *words: str) -> list[str]:
    return ["/usr/bin/docker", "-H", address, *words]


def data_folder(folder: Path) -> Path:
    """Of the engine: in memory where there is plenty, for an image is written once and read by a few."""
    room = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) if MEMORY.is_dir() else 0
    return in_memory(folder) if room > ROOM_BYTES else folder / "data"


def in_memory(folder: Path) -> Path:
    return MEMORY / f"tests-docker-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def start(folder: Path, address: str) -> None:
    with open(folder / "log", "w") as log:
        subprocess.Popen(
            ["dockerd", "--data-root", data_folder(folder), "--exec-root", folder / "exec", "--pidfile", folder / "pid",
             "--host", address, "--bridge", "none", "--iptables=false", "--storage-driver", "overlay2"],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    deadline = time.time() + STOP_SECONDS
    while not answers(address):
        assert time.time() < deadline, (folder / "log").read_text()[-2000:]
        time.sleep(0.1)


def stop(folder: Path) -> None:
    """End the engine and remove what it holds; the base and the wheels stay."""
    pid = int((folder / "pid").read_text())
    os.kill(pid, signal.SIGTERM)
    deadline = time.time() + STOP_SECONDS
    while (folder / "pid").exists() and time.time() < deadline:
        time.sleep(0.1)
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        if line.split()[1].startswith((f"{folder}/", f"{in_memory(folder)}/")):
            subprocess.run(["umount", "--lazy", line.split()[1]])
    for group in Path("/sys/fs/cgroup").glob("*/docker"):
        with contextlib.suppress(OSError):  # another engine's containers are in it
            group.rmdir()
    for path in (folder / "data", folder / "exec", in_memory(folder)):
        shutil.rmtree(path, ignore_errors=True)


def make_image(folder: Path, address: str) -> None:
    """The project's own Dockerfile on a base made here, from a wheelhouse, without the engines' packages."""
    if subprocess.run(docker(address, "image", "inspect", IMAGE), capture_output=True).returncode == 0:
        return
    base, wheels = folder / "base.tar", folder / "wheels"
    if not base.exists():
        words = ["mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io", "--include=python3-venv"]
        subprocess.run([*words, "bookworm", folder / "unfinished.tar"], check=True)
        (folder / "unfinished.tar").rename(base)
    subprocess.run(docker(address, "import", str(base), BASE), check=True, stdout=subprocess.DEVNULL)
    project = folder / "project"
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(ROOT, project, ignore=shutil.ignore_patterns(".*", "__pycache__", "results", "tests"))
    pins = project / "pyproject.toml"
    needed = re.sub(rf'^ +"({"|".join(LEFT_OUT)})==.*\n', "", pins.read_text(), flags=re.MULTILINE)
    pins.write_text(needed)
    direct = re.findall(r'^    "(.*==.*)",$', needed.split("optional-dependencies")[0], flags=re.MULTILINE)
    words = [sys.executable, "-m", "pip", "wheel", "-q", "-w", str(wheels), "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*words, *direct], check=True)
    words = [sys.executable, "-m", "harness", "image", "build", "--image", IMAGE, "--base", BASE]
    words += ["--wheelhouse", str(wheels), "--build-arg", "PACKAGES=python3-venv", "--build-arg", "EXTRA="]
    environment = {**os.environ, "DOCKER_HOST": address, "PYTHONPATH": os.pathsep.join([str(project), *sys.path])}
    subprocess.run(words, check=True, cwd=project, env=environment, stdout=subprocess.DEVNULL)
