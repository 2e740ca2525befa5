"""The user that a container runs as: the caller or, if root calls, the user USER. If root calls, the record that USER
writes reaches root's folder of results through an exchange folder.

A container that root started sees an empty exchange folder instead of the results. On the host this folder lies in
`results/.exchange-STEM`, which only root can enter. When the container has ended, root reads the job's record and the
output of its compilers, writes both anew into the results, and removes the exchange folder with all other files. Only
the log lies in the results from the start: USER owns the log while the job runs, and everybody can read it meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from harness.base.foreign_file import read_json, read_text
from harness.base.whole_file import write_whole
from harness.core import log_lines
from harness.core.method import Unavailable
from harness.core.record import Record

USER = 1000  # id of the user and of the group that docker/Dockerfile makes
PREFIX = ".exchange-"
# patterns of the files in this checkout that a job reads
CODE = ("*.yaml", "harness/**/*", "places/**/*", "methods/**/*")
MOST_NAMES = 8  # most names of other files that an ExchangeFolder keeps


def ids() -> tuple[int, int]:
    """Return the ids of the user and of the group that a container runs as."""
    return (os.getuid(), os.getgid()) if os.getuid() else (USER, USER)


def make_writable(folder: Path) -> None:
    """Make a folder to which a container writes, if it is missing. Raises Unavailable if the container's user may not
    write to the folder."""
    if not folder.exists():
        folder.mkdir(parents=True)
        if not os.getuid():
            os.chown(folder, USER, USER, follow_symlinks=False)
    if not os.getuid() and not _user_may(folder, os.R_OK | os.W_OK | os.X_OK):
        raise Unavailable(
            f"expected a folder that user {USER} may write to, got {folder}, owned by {folder.owner()}; try"
            f" chown -R {USER} {folder}, or a new folder"
        )


def check_readable(path: Path, patterns: tuple[str, ...]) -> None:
    """Raise Unavailable if the container's user may not read the path, or a file below the path that matches one of
    these patterns."""
    if os.getuid() or not path.exists():
        return
    files = [path]
    for pattern in patterns:
        files += path.glob(pattern)
    for file in files:
        if "__pycache__" not in file.parts and not _user_may(file, os.R_OK | os.X_OK * file.is_dir()):
            mode = stat.S_IMODE(file.stat().st_mode)
            raise Unavailable(
                f"expected files that user {USER} may read, got {file}, owned by {file.owner()}, mode {mode:o}; try"
                f" chmod -R a+rX {path}"
            )


def _user_may(path: Path, bits: int) -> bool:
    """True if the path's mode gives USER these permission bits. The modes of the folders above do not matter, because
    the container mounts the path itself."""
    status = path.stat()
    shift = 0
    if status.st_uid == USER:
        shift = 6
    elif status.st_gid == USER:
        shift = 3
    return status.st_mode >> shift & bits == bits


class ExchangeFolder:
    """The exchange folder of one job. The process that runs the job locks the job's log; the lock tells other processes
    that this process is alive.

    The constructor raises BlockingIOError if another process holds the lock. open() raises Unavailable if USER cannot
    own files in the folder of results.
    """

    def __init__(self, stem: Path) -> None:
        self.stem, self.outer = stem, stem.with_name(f"{PREFIX}{stem.name}")
        self.folder = self.outer / "results"
        self.refusal = ""  # why the record was not taken; "": it was taken, or there is none
        self.other_names = list[str]()  # names of the other files that the job left
        self.path = Path(f"{stem}.txt")
        self.path.touch()
        self.log = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.log)
            raise

    def open(self) -> None:
        """Make the exchange folder. Make USER the owner of the folder and of the log."""
        self.outer.mkdir(0o700)
        self.folder.mkdir(0o700)
        try:
            os.chown(self.folder, USER, USER)
            os.fchown(self.log, USER, USER)
        except OSError as error:
            raise Unavailable(
                f"--results: expected a folder where user {USER} can own files, got {self.stem.parent}:"
                f" {error.strerror}; try a folder on this machine's disk"
            ) from error

    def release(self) -> None:
        os.close(self.log)

    def close(self, key: str | None) -> None:
        """Take the job's record into the results, remove the exchange folder, and make root the owner of the log again.
        `key`: the key that the record must have; None: any key."""
        try:
            if self.folder.exists():
                self._take_files(key)
        finally:
            subprocess.run(["rm", "-rf", "--", self.outer])  # rm can remove folders of any depth
            # Change the mode before the owner: the job may have set the log's set-uid bit, which must not turn the log
            # into a program with root's rights.
            os.fchmod(self.log, 0o644 & ~_umask())
            os.fchown(self.log, os.getuid(), os.getgid())
            self.release()

    def _take_files(self, key: str | None) -> None:
        """Write the job's record and the logs of its builds into the results. Set `refusal` and `other_names`."""
        record_name, log = f"{self.stem.name}.json", self.path.name
        method = self.stem.name.removeprefix("log_").split("_l-")[0]
        build_logs = [log_lines.BUILD_LOG.format(library) for library in (method, "sim")]
        for name in build_logs:
            try:
                _check_one_name(self.folder / name)
                write_whole(self.stem.with_name(name), read_text(self.folder / name))
            except (OSError, ValueError) as error:
                if not isinstance(error, FileNotFoundError):
                    self.other_names.append(name)
        try:
            _check_one_name(self.folder / record_name)
            record = Record.from_dict(read_json(self.folder / record_name))
            if key not in (None, record.key):
                raise ValueError(f"expected a record with key {key}, got {record.key}")
            record.write(Path(f"{self.stem}.json"))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            text = error.strerror if isinstance(error, OSError) else error
            self.refusal = f"the record that its container left was not taken: {text}"
        with os.scandir(self.folder) as entries:
            # Skip root's files: the engine, as root, made mount points in this folder for the files that the container
            # sees.
            job_names = (entry.name for entry in entries if entry.stat(follow_symlinks=False).st_uid == USER)
            other_names = (
                name for name in job_names if name not in (record_name, log, *build_logs) and name[0] != "."
            )
            self.other_names += [f"{name!a:.80}" for name in islice(other_names, MOST_NAMES)]


def leftover_exchanges(results: Path) -> Iterator[ExchangeFolder]:
    """Yield the exchange folders that killed calls left behind. The caller must close or release each of them."""
    for outer in results.glob(f"{PREFIX}*") if not os.getuid() else ():
        status = outer.lstat()
        # only root makes exchange folders, so somebody else made this one
        if status.st_uid or not stat.S_ISDIR(status.st_mode):
            continue
        try:
            yield ExchangeFolder(outer.with_name(outer.name.removeprefix(PREFIX)))
        except BlockingIOError:
            continue


def _check_one_name(path: Path) -> None:
    status = os.lstat(path)
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        raise OSError(
            errno.EMLINK, f"expected a file with one name, got {status.st_nlink} hard links", str(path)
        )


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
