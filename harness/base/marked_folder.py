"""Marks folders that the harness makes and later removes. A folder without the mark may be a user's own, whatever its
name is, and is never removed."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

MARK = ".made-by-the-harness"  # name of the file that marks a folder


def mark(folder: Path) -> None:
    (folder / MARK).touch(0o600)


def is_marked(folder: Path | int) -> bool:
    """True if this user's call of mark() has marked the folder. `folder`: a path or an open descriptor."""
    with contextlib.suppress(OSError):
        handle = (
            os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if isinstance(folder, Path)
            else folder
        )
        try:
            status = os.stat(MARK, dir_fd=handle, follow_symlinks=False)
        finally:
            if handle != folder:
                os.close(handle)
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
    return False
