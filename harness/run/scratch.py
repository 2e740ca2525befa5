"""The temporary folder of a run. The run removes its folder at its end; if the run is killed, the next run removes the
folder. A folder of such a name without the harness's mark is never removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from harness.base.marked_folder import is_marked, mark

PREFIX = "harness-run-"


def make_folder() -> tuple[Path, int]:
    """Make a temporary folder. Return the folder's path and a descriptor that holds its lock. As long as a process of
    the run has this descriptor open, no other run removes the folder."""
    remove_stale_folders()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):
            # another run may remove the folder before this run locks it
            mark(folder)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists():
                return folder, handle
            os.close(handle)


def remove_stale_folders() -> None:
    """Remove the temporary folders of this user's killed runs: the marked folders whose lock no process holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # the folder may be in use, or belong to another user
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.getuid() and is_marked(handle):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
