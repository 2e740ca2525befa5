"""Other releases of an engine than the installed one. pip installs each into a folder of its own; a run puts this
folder first on Python's path, in its own process alone.

Only the engine itself is installed, without what it needs: the environment's packages serve every release. For
transformers this file also tells what other releases name or ask otherwise. Each of these entries says why it changes
no training.
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
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import urlsplit

from harness.base.checkout import ROOT
from harness.base.whole_file import write_whole
from harness.core.method import Method
from harness.core.refusals import Unavailable

ENGINES = ROOT / ".venv" / "engines"
# files of a release's folder: what was installed, or why it was not
FACTS_FILE, FAILURE_FILE = "archive.json", "failure.txt"
VERSION_PATTERN = re.compile(r"\d+(\.\d+)+[\w.]*")
# DeepSpeed's set-up compiles nothing; a kernel is compiled when a run needs it.
PIP_ENVIRONMENT = {"DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
KNOWN_VERSIONS_PATTERN = re.compile(r"Could not find a version .*\(from versions: ([^)]*)\)")
# What pip prints when it has given up; a "Retrying" may have succeeded, and 404 is an index without the package.
UNREACHABLE_PATTERN = re.compile(r"Could not fetch URL (?!.* 404 )|Max retries exceeded|ReadTimeoutError: ")
# Older names of arguments of transformers' TrainingArguments, for releases that lack the newer ones: the same switch.
OLDER_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
# Modules that releases of transformers import, each with what stands in for it. The check demands other versions of
# huggingface_hub and tokenizers than the environment's, and httpx, which some releases import, fetches files: no
# training here reads a hub, a text or a file of the net. A release that does need another version of a package does not
# import.
STAND_INS: dict[str, dict[str, Any]] = {
    "transformers.dependency_versions_check": {"dep_version_check": lambda package, hint=None: None},
    "httpx": {"HTTPError": OSError},
}


@dataclass(frozen=True)
class Release:
    """A release of an engine. Raises ValueError if `version` is no version."""

    package: str  # name on the package index, such as deepspeed
    version: str  # such as 0.18.9

    def __post_init__(self) -> None:
        if not VERSION_PATTERN.fullmatch(self.version):
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
        return (self.folder / FACTS_FILE).exists() and self.packages.exists()

    @cached_property
    def archive(self) -> dict[str, str]:
        """The name and the sha256 of the archive that was installed. Raises Unavailable if none was."""
        if not self.is_installed:
            raise Unavailable(self.failure() or f"{self} is not installed: run once without --on")
        facts: dict[str, str] = json.loads((self.folder / FACTS_FILE).read_text())
        return facts

    def identity(self) -> dict[str, str]:
        """Return what the archive adds to a run's identity; nothing before it is installed."""
        return {str(self): self.archive["sha256"]} if self.is_installed else {}

    def description(self) -> str:
        """Describe the release and its archive for the fairness table."""
        if not self.is_installed:
            return str(self)
        return f"{self} ({self.archive['archive']}, sha256 {self.archive['sha256']})"

    def failure(self) -> str:
        """Return why the last installation failed; empty if none did."""
        file = self.folder / FAILURE_FILE
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
            pip_run = subprocess.run(
                command, env=os.environ | PIP_ENVIRONMENT, capture_output=True, text=True
            )
            print(pip_run.stdout, pip_run.stderr, sep="\n", flush=True)
            if pip_run.returncode:
                reason = self._reason(pip_run.stdout + pip_run.stderr)
                (self.folder / FAILURE_FILE).write_text(reason)
                raise Unavailable(reason)
            (self.folder / FAILURE_FILE).unlink(missing_ok=True)
            write_whole(self.folder / FACTS_FILE, json.dumps(_installed_archive(report)))

    def _reason(self, output: str) -> str:
        """Return in one line why pip, which printed `output`, did not install the release."""
        if UNREACHABLE_PATTERN.search(output):
            why = "the package index cannot be reached: look at the network and at pip's configuration"
            return f"{self} cannot be installed: {why}, or try without --option release"
        if known_versions := KNOWN_VERSIONS_PATTERN.search(output):
            newest = ", ".join(known_versions[1].split(", ")[-3:])
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


def _installed_archive(report: Path) -> dict[str, str]:
    """Return the name and the sha256 of the one archive in pip's report."""
    (installed,) = json.loads(report.read_text())["install"]
    origin = installed["download_info"]
    name = urlsplit(origin["url"]).path.rpartition("/")[2]  # a mirror's query may hold a token
    return {"archive": name, "sha256": origin["archive_info"]["hashes"]["sha256"]}


class ReleasedMethod(Method):
    """The base class of a method that trains with an engine of which other releases than the installed one can run."""

    package: ClassVar[str]  # the engine's name on the package index
    release: str | None = None  # version of the engine; None: the installed one
    release_option = "release"

    def __post_init__(self) -> None:
        assert self.other_release or not self.release  # Release() raises ValueError if the text is no version

    @property
    def other_release(self) -> Release | None:
        """The release that runs beside the installed one; None: the installed one runs."""
        return Release(self.package, self.release) if self.release else None

    @property
    def implementation(self) -> str:
        """The method's implementation for the fairness table."""
        return f"upstream: {self.other_release.description() if self.other_release else self.package}"

    def identity(self) -> dict[str, str]:
        return self.other_release.identity() if self.other_release else {}

    def to_build(self) -> str | None:
        return self.other_release.to_install() if self.other_release else None

    def build(self) -> None:
        if self.other_release:
            self.other_release.install()


def import_transformers() -> None:
    """Import the release of transformers that Release.use() has chosen, with the stand-ins. Raises what the import
    raises."""
    for name, contents in STAND_INS.items():
        if "." in name or not find_spec(name):
            module = sys.modules[name] = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            vars(module).update(contents)
    os.environ["HF_HUB_OFFLINE"] = "1"
    importlib.import_module("transformers.trainer")


def training_arguments_of(arguments_class: Any, **settings: Any) -> Any:
    """Return the TrainingArguments of a release with these settings. `arguments_class`: the release's own class, which
    gets each setting by the name that the class knows."""
    fields = arguments_class.__dataclass_fields__
    named = {name if name in fields else OLDER_NAMES[name]: value for name, value in settings.items()}
    return arguments_class(**named)
