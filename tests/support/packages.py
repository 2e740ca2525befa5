"""What tests take from Debian's packages: installed where that may be done, a reason to be skipped elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

SHARED = Path(tempfile.gettempdir())  # by all processes of a run, whatever their own temporary folder will be
REQUIRED = "CI_REQUIRE_PACKAGES"
APT = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300")
REFUSAL = Path("/usr/sbin/policy-rc.d")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def missing(reason: str) -> NoReturn:
    """Skip the test; where CI_REQUIRE_PACKAGES is set a skip is a failure."""
    if REQUIRED in os.environ:
        pytest.fail(f"{reason}, and {REQUIRED} is set")
    pytest.skip(reason)


def need(names: tuple[str, ...], *signs: str) -> None:
    """As install(); where that is not possible the test is skipped."""
    if reason := install(names, *signs):
        missing(reason)


def install(names: tuple[str, ...], *signs: str) -> str | None:
    """Install packages, unless one of these commands or files is there; nothing of them is started. Returns why not."""
    with locked(SHARED / "tests-apt.lock"):
        if any(shutil.which(sign) or Path(sign).is_file() for sign in signs):
            return None
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            return f"no {signs[0]} here, and it takes root and Debian to install {' '.join(names)}"
        with nothing_started():
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            # else by the lists that are there
            subprocess.run([*APT, "update"], capture_output=True, env=environment)
            words = [*APT, "install", "-y", "--no-install-recommends", *names]
            done = subprocess.run(words, capture_output=True, text=True, env=environment)
        return f"{' '.join(words)}: {(done.stderr.splitlines() or [''])[-1]}" if done.returncode else None


def still_running(folder: str) -> list[int]:
    """Processes whose command line or environment names a folder."""
    found = psutil.process_iter(["pid", "cmdline", "environ"])
    return [each.info["pid"] for each in found if folder in f"{each.info['cmdline']} {each.info['environ']}"]


@contextlib.contextmanager
def nothing_started() -> Iterator[None]:
    """Debian's packages start their services when they are installed, unless this file says no."""
    made = not REFUSAL.exists()
    if made:
        REFUSAL.write_text("#!/bin/sh\nexit 101\n")
        REFUSAL.chmod(0o755)
    try:
        yield
    finally:
        if made:
            REFUSAL.unlink()
