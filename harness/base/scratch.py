"""The temporary folder of a run, and the mark of folders that the harness makes and later removes.

A run removes its folder at its end; if the run is killed, the next run removes the folder. A folder without the mark
may be a user's own, whatever its name is, and is never removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

NAME_PREFIX = "harness-run-"
MARK_FILE = ".made-by-the-harness"  # name of the file that marks a folder


def make_folder() -> tuple[Path, int]:
    """Make a temporary folder. Return the folder's path and a descriptor that holds its lock. As long as a process of
    the run has this descriptor open, no other run removes the folder."""
    remove_stale_folders()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=NAME_PREFIX))
        with contextlib.suppress(FileNotFoundError):
            # another run may remove the folder before this run locks it
            mark(folder)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if folder.exists():
                return folder, descriptor
            os.close(descriptor)


def ranks_folder(record_path: Path) -> Path:
    """Return the folder in which the ranks of a job write their own records. `record_path`: path of the job's
    record."""
    return record_path.with_name(f".ranks-{record_path.stem}")


def remove_stale_folders() -> None:
    """Remove the temporary folders of this user's killed runs: the marked folders whose lock no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{NAME_PREFIX}*"):
        with contextlib.suppress(OSError):  # the folder may be in use, or belong to another user
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.getuid() and is_marked(descriptor):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def mark(folder: Path) -> None:
    (folder / MARK_FILE).touch(0o600)


def is_marked(folder: Path | int) -> bool:
    """True if this user's call of mark() has marked the folder. `folder`: a path or an open descriptor."""
    with contextlib.suppress(OSError):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        descriptor = folder if isinstance(folder, int) else os.open(folder, flags)
        try:
            status = os.stat(MARK_FILE, dir_fd=descriptor, follow_symlinks=False)
        finally:
            if descriptor != folder:
                os.close(descriptor)
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    return False
