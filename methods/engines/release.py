"""Other releases of an engine than the installed one. pip installs each into a folder of its own; a run puts this
folder first on Python's path, in its own process alone.

Only the engine itself is installed, without what it needs: the environment's packages serve every release.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from harness.base.checkout import ROOT
from harness.base.whole_file import write_whole
from harness.core.refusals import Unavailable

ENGINES = ROOT / ".venv" / "engines"
# files of a release's folder: what was installed, or why it was not
FACTS, FAILURE = "archive.json", "failure.txt"
VERSION = re.compile(r"\d+(\.\d+)+[\w.]*")
# DeepSpeed's set-up compiles nothing; a kernel is compiled when a run needs it.
ENVIRONMENT = {"DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
VERSIONS = re.compile(r"Could not find a version .*\(from versions: ([^)]*)\)")
# What pip prints when it has given up; a "Retrying" may have succeeded, and 404 is an index without the package.
UNREACHABLE = re.compile(r"Could not fetch URL (?!.* 404 )|Max retries exceeded|ReadTimeoutError: ")


@dataclass(frozen=True)
class Release:
    """A release of an engine. Raises ValueError if `version` is no version."""

    package: str  # name on the package index, such as deepspeed
    version: str  # such as 0.18.9

    def __post_init__(self) -> None:
        if not VERSION.fullmatch(self.version):
            raise ValueError(
                f"release: expected a version of {self.package} such as 0.18.9, got {self.version!r}"
            )

    def __str__(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version's numbers, by which releases are in order."""
        return tuple(map(int, re.findall(r"\d+", self.version)))

    @property
    def folder(self) -> Path:
        return ENGINES / f"{self.package}-{self.version}"

    @property
    def packages(self) -> Path:
        """The folder that holds the release's modules. Its path is one of installed packages, whose code counts by
        their version (harness/core/identity.py)."""
        return self.folder / "lib" / "python3" / "site-packages"

    @property
    def is_installed(self) -> bool:
        return (self.folder / FACTS).exists() and self.packages.exists()

    @cached_property
    def archive(self) -> dict[str, str]:
        """The name and the sha256 of the archive that was installed. Raises Unavailable if none was."""
        if not self.is_installed:
            raise Unavailable(self.failure() or f"{self} is not installed: run once without --on")
        facts: dict[str, str] = json.loads((self.folder / FACTS).read_text())
        return facts

    def identity(self) -> dict[str, str]:
        """Return what the archive adds to a run's identity; nothing before it is installed."""
        return {str(self): self.archive["sha256"]} if self.is_installed else {}

    def described(self) -> str:
        """Describe the release and its archive for the fairness table."""
        return (
            f"{self} ({self.archive['archive']}, sha256 {self.archive['sha256']})"
            if self.is_installed
            else str(self)
        )

    def failure(self) -> str:
        """Return why the last installation failed; empty if none did."""
        file = self.folder / FAILURE
        return file.read_text() if file.exists() else ""

    def to_install(self) -> str | None:
        """Describe the installation for people; None if the release is installed."""
        return None if self.is_installed else f"{self}, once, into a folder of its own, about 20 seconds"

    def install(self) -> None:
        """Install the release, unless it is installed. Only one process installs at a time; others wait. Raises
        Unavailable, and keeps the reason for failure(), if pip cannot install it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.is_installed:
                return
            shutil.rmtree(self.packages, ignore_errors=True)  # an interrupted installation left it
            report = self.folder / "report.json"
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-vv",
                "--use-pep517",
                "--no-deps",
                "--no-build-isolation",
                "--target",
                str(self.packages),
                "--report",
                str(report),
                f"{self.package}=={self.version}",
            ]
            done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True)
            print(done.stdout, done.stderr, sep="\n", flush=True)
            if done.returncode:
                reason = self._reason(done.stdout + done.stderr)
                (self.folder / FAILURE).write_text(reason)
                raise Unavailable(reason)
            (self.folder / FAILURE).unlink(missing_ok=True)
            write_whole(self.folder / FACTS, json.dumps(_archive(report)))

    def _reason(self, output: str) -> str:
        """Return in one line why pip, which printed `output`, did not install the release."""
        if UNREACHABLE.search(output):
            why = "the package index cannot be reached: look at the network and at pip's configuration"
            return f"{self} cannot be installed: {why}, or try without --option release"
        if known := VERSIONS.search(output):
            newest = ", ".join(known[1].split(", ")[-3:])
            lacks = f"expected a release of {self.package}, got {self.version}, which the package index lacks"
            return lacks if newest == "none" else f"{lacks}; try {newest}"
        lines = [line.strip() for line in output.splitlines() if line.strip().lower().startswith("error")]
        return f"{self} cannot be installed: {lines[-1][:200] if lines else 'pip failed without a reason'}"

    def use(self) -> None:
        """Make this process import this release. Call this before the first import of the engine. Raises Unavailable
        if the release is not installed."""
        assert self.archive
        name = self.package.partition("-")[0]  # megatron-core's modules lie in megatron
        assert name not in sys.modules, f"{name} was imported before its release was chosen"
        sys.path.insert(0, str(self.packages))
        importlib.invalidate_caches()


@contextmanager
def importing(release: Release | None, needs: str) -> Iterator[None]:
    """Import an engine inside this context: this release of it, or the installed one if `release` is None. `needs`: how
    to get the installed one. Raises Unavailable if there is none, or if the release does not import under the installed
    torch."""
    if release:
        release.use()
    try:
        yield
    except Exception as error:
        if not (release or isinstance(error, ImportError)):
            raise
        message = f"{release} does not import under torch {version('torch')}" if release else needs
        raise Unavailable(
            f"{message} ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        ) from error


def _archive(report: Path) -> dict[str, str]:
    """Return the name and the sha256 of the one archive in pip's report."""
    (installed,) = json.loads(report.read_text())["install"]
    origin = installed["download_info"]
    name = urlsplit(origin["url"]).path.rpartition("/")[2]  # a mirror's query may hold a token
    return {"archive": name, "sha256": origin["archive_info"]["hashes"]["sha256"]}
