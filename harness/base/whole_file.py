"""Writes a file whole or not at all. A writer that was killed leaves a temporary file, which the next one removes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from pathlib import Path

UNFINISHED = ".unfinished"  # end of a temporary file's name


def write_whole(path: Path, data: str | bytes) -> None:
    """Replace the file at once: a reader sees the old file or the new one, even if this process is killed. Raises
    ValueError if the path is not a file, and OSError with the path if it cannot be written."""
    check_replaceable(path)
    _remove_left(path.parent)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(temporary, "xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks: nothing is removed from it either
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(data.encode(errors="backslashreplace") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _remove_left(folder: Path) -> None:
    """Remove the temporary files whose writers were killed. A writer holds its file locked before it writes to it, so
    an empty file may be one whose writer has not locked it yet."""
    for left in folder.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError), open(left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:
                left.unlink()


def own_folder(folder: Path) -> Path:
    """Make a folder that the harness names itself, if it is missing. Raises ValueError if the name is a link, because
    the files would lie elsewhere."""
    if folder.is_symlink():
        raise ValueError(f"{folder}: expected a folder, got a symbolic link; remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_replaceable(path: Path) -> None:
    """Raise ValueError if a device file, a link or a folder has this name: nobody means to replace these."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a symbolic link" if stat.S_ISLNK(mode) else "a device or pipe"
            raise ValueError(f"{path}: expected the name of a new file or of one to replace, got {kind}; name another")
