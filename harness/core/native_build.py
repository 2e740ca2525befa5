"""Compiles a shared library of this project. The library's file name contains a hash of its sources and parts, so the
library is compiled again only if a source or a part changes."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from harness.core.refusals import Unavailable

COMPILERS = ("g++", "clang++", "c++")


@functools.cache
def find_compiler() -> str | None:
    """Return the path of the first of COMPILERS that the system has; None if the system has no such compiler."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def has_header(name: str) -> bool:
    """True if a header of this name lies in one of the compiler's default folders, or in a folder that an environment
    variable adds to them."""
    variables = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
    added_folders = os.pathsep.join(os.environ.get(name, "") for name in variables).split(os.pathsep)
    prefixes = ("/usr/local", "/usr", os.environ.get("CONDA_PREFIX", "/usr"))
    folders = [f"{prefix}/include" for prefix in prefixes] + [
        f"/usr/include/{sysconfig.get_config_var('MULTIARCH')}"
    ]
    folders = [*filter(None, added_folders), sysconfig.get_path("include"), *folders]
    return any(Path(folder, name).exists() for folder in folders)


@dataclass(frozen=True)
class Library:
    """A shared library in `folder`. Only the first of its sources is compiled; this one may include the other sources.
    The library's file name changes if any source or `parts` changes."""

    what: str  # the library's name for people
    seconds: int  # rough duration of compiling, in seconds
    folder: Path
    sources: tuple[Path, ...]
    parts: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        digest = hashlib.sha256("".join(self.parts).encode())
        for source in self.sources:
            digest.update(source.read_bytes())
        return self.folder / f"{self.folder.name}-{digest.hexdigest()[:16]}.so"

    @property
    def is_built(self) -> bool:
        return self.path.exists()

    def to_build(self) -> str | None:
        """Describe for people what build() would compile; None if the library exists or the system has no compiler."""
        if self.is_built or not find_compiler():
            return None
        return f"{self.what}, once, about {self.seconds} seconds"

    def build(self, *flags: str) -> None:
        """Compile the library; `flags` go to the compiler. The library gets its name only after it is complete. Raises
        Unavailable if there is no compiler or compiling fails."""
        compiler, path = find_compiler(), self.path
        if not compiler:
            raise Unavailable(
                f"{self.what} needs a C++ compiler ({', '.join(COMPILERS)}): try apt-get install g++"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob("*.building"):
            if not Path(f"/proc/{leftover.name.split('.')[0]}").exists():
                leftover.unlink(missing_ok=True)
        unfinished = self.folder / f"{os.getpid()}.building"
        command = [compiler, "-fPIC", "-shared", str(self.sources[0]), "-o", str(unfinished), *flags]
        completed = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if completed.returncode:
            sys.stderr.write(completed.stderr)
            error_lines = [line for line in completed.stderr.splitlines() if "error" in line]
            error = error_lines[0] if error_lines else completed.stderr[-200:]
            raise Unavailable(f"{compiler} cannot compile {self.what}: {error.strip()}")
        os.replace(unfinished, path)
