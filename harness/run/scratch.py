"""A run's temporary folder, removed with the run; if the run is killed, the next run removes the folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "harness-run-"


def make() -> tuple[Path, int]:
    """Make a folder; return it and a descriptor that holds its lock. The folder is in use while a process of the run
    has the descriptor open."""
    remove_left()
    while True:
        new = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # another run removed the folder before it was locked
            handle = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if new.exists():
                return new, handle
            os.close(handle)


def remove_left() -> None:
    """Remove this user's temporary folders of runs whose processes are all gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or another user's
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
