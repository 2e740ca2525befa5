"""Writes a file or a folder whole or not at all. If a writer is killed, its temporary file or folder stays, and the
next writer in the same place removes it."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from harness.base.console import readable

UNFINISHED = ".unfinished"  # ending of a temporary file's name
# Pattern of the names of temporary files and folders, and of no name that a user would choose.
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.unfinished", re.DOTALL)


def write_whole(path: Path, data: str | bytes) -> None:
    """Write the file `path`, or replace it in one moment: a reader sees the whole old file or the whole new one, even
    if this process is killed. Raises ValueError if `path` is a folder, a link or a device, and OSError, which
    names `path`, if the file cannot be written."""
    check_replaceable(path)
    _remove_unfinished_files(path.parent)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(temporary, "xb") as file:
            with contextlib.suppress(OSError):
                # a file system may have no locks; then _remove_unfinished_files() removes nothing
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


def write_page(path: Path, text: str) -> None:
    """Write a text that people read, as write_whole() does. Parts of it may come from records, logs and archives of
    others: characters that would control a terminal or change the direction of writing become escapes."""
    write_whole(path, readable(text))


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Make a new folder whole or not at all. Yield a temporary folder beside it, to be filled within the context; at
    the end the temporary folder is renamed to `folder` or, after an error, removed. Raises ValueError if `folder`
    exists, unless it is an empty folder."""
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.parent.glob(f".{glob.escape(folder.name)}.*{UNFINISHED}"):
        with contextlib.suppress(OSError), _locked(unfinished):
            # an empty folder may have a writer that has not locked it yet
            if TEMPORARY.fullmatch(unfinished.name) and any(unfinished.iterdir()):
                shutil.rmtree(unfinished)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{UNFINISHED}")
    temporary.mkdir()
    with _locked(temporary):
        try:
            yield temporary
            for path in temporary.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # after an error the temporary folder still exists


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock within this context. Raises BlockingIOError if another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_unfinished_files(folder: Path) -> None:
    """Remove the temporary files in `folder` whose writers were killed: files that no process locks. An empty file
    stays, because its writer, which locks the file before writing, may not have locked it yet."""
    for unfinished in folder.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError), open(unfinished, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if TEMPORARY.fullmatch(unfinished.name) and os.fstat(file.fileno()).st_size:
                unfinished.unlink()


def own_folder(folder: Path) -> Path:
    """Return the path `folder`, whose name the harness has chosen, and make the folder if it is missing. Raises
    ValueError if `folder` is a symbolic link, because files would then be written elsewhere."""
    if folder.is_symlink():
        raise ValueError(f"{folder}: expected a folder, got a symbolic link; remove it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_new(folder: Path) -> None:
    """Raise ValueError if `folder` exists, unless it is an empty folder."""
    is_no_folder = folder.is_symlink() or (folder.exists() and not folder.is_dir())
    if is_no_folder or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(
            f"{folder}: expected a new or empty folder, got a file, a link or a full folder; try another"
        )


def check_replaceable(path: Path, head: bytes = b"") -> None:
    """Raise ValueError if `path` is a device file, a pipe, a link or a folder, because nobody means to replace such a
    thing by a file; or a file that does not begin with `head`, as those do that a user lets the harness write."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link"}
            kind = kinds.get(stat.S_IFMT(mode), "a device or pipe")
            raise ValueError(
                f"{path}: expected a new file, or a file to replace, got {kind}; try another name"
            )
        with open(path, "rb") as file:
            first_bytes = file.read(len(head))
        if first_bytes and first_bytes != head:
            message = "expected a new file, or one that an earlier call wrote, got another file"
            raise ValueError(f"{path}: {message}; try another name")
