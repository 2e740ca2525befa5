"""Locks of devices between runs: a timed run holds its devices alone; untimed runs may share a device.

A job that uses several GPUs holds the locks of all of them. Each device has three files, which lie in /tmp even if
TMPDIR is set, because the calls of all users share the device.

`.lock` is locked by a run, exclusively or shared. The worker inherits this lock, so a device becomes free when its
worker ends, even if the parent ended first. `.queue` is locked by a process that waits for `.lock`, so that a stream of
untimed runs cannot keep a timed run waiting. `.holders` names the runs that hold the device, for people, and counts the
runs that have entered. The count tells an untimed run whether it was alone; if it was, its seconds count nevertheless.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.base.console import counted
from harness.base.foreign_file import read_json
from harness.base.json_object import JsonObject
from harness.core.job import Job
from harness.core.record import LATEST
from harness.devices import machine

Report = Callable[[JsonObject], None]
# most holders in a .holders file; most characters of a job's text there
MOST_HOLDERS, MOST_CHARACTERS = 1000, 1000


@dataclass
class HeldDevice:
    """A device whose lock a run holds. `descriptor`: the descriptor of the lock; `number`: the number of this run among
    all runs that have entered the device; `began_shared`: True if another run held the device when this run began."""

    path: Path
    descriptor: int
    number: int = 0
    began_shared: bool = False

    def is_shared(self) -> bool:
        """True if another run has been on the device since this run entered it."""
        return self.began_shared or _read(self.path)["entered"] != self.number


@dataclass
class Turn:
    """The devices whose locks one run holds."""

    held: list[HeldDevice]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of the locks, which the run's worker inherits."""
        return tuple(device.descriptor for device in self.held)

    def is_shared(self) -> bool:
        """True if, since this run entered its devices, another run has been on one of them."""
        return any(device.is_shared() for device in self.held)


def folder() -> Path:
    """Return the folder of the locks: the folder that the variable HARNESS_LOCKS names or, if it is not set, /tmp. If
    that folder is not writable, return the folder for temporary files."""
    shared = Path(os.environ.get("HARNESS_LOCKS", "/tmp"))
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def turn(job: Job, report: Report, is_timed: bool = True, foreseen_seconds: float = 0.0) -> Iterator[Turn]:
    """Hold the locks of the job's devices within this context; wait until the devices are free. A call that waits calls
    `report` with an event that names the processes that hold the device. `foreseen_seconds`: how long this run is
    expected to take; other calls show this time while they wait.

    A timed run holds its devices alone. An untimed run shares its devices, with two exceptions. It holds a GPU alone,
    because processes cannot divide the GPU's memory. It holds a device alone if another user owns the device's list of
    holders, because this run then cannot change the list. All calls lock their devices in the same order, so no two
    calls wait for each other.
    """
    with contextlib.ExitStack() as stack:
        yield Turn(
            [
                stack.enter_context(_held(path, job, report, is_timed, foreseen_seconds))
                for path in _paths(job)
            ]
        )


@contextlib.contextmanager
def _held(
    path: Path, job: Job, report: Report, is_timed: bool, foreseen_seconds: float
) -> Iterator[HeldDevice]:
    """Hold the lock of the device whose `.lock` is `path`, within this context; see turn()."""
    handle = _open(path)
    shares = not is_timed and job.device != "cuda" and _can_write(_list(path))
    job_text = f"{job.method}, {counted(job.workload.num_layers, 'layer')}"
    device = HeldDevice(path, handle)
    try:
        with _queued(path, job, report):
            if not _takes(handle, fcntl.LOCK_EX):
                device.began_shared = shares and _takes(handle, fcntl.LOCK_SH)
                if not device.began_shared:
                    _tell(path, job, report)
                    fcntl.flock(handle, fcntl.LOCK_EX)
            with _changed(path) as listed:
                device.number = listed["entered"] = listed["entered"] + 1
                before = listed["holders"] if device.began_shared else []  # alone: those listed have died
                listed["holders"] = [*before, _sign(device.number, job_text, foreseen_seconds)]
            if shares:
                # Downgrade the exclusive lock to a shared one. This run holds the queue, so no other run can take the
                # lock in between.
                fcntl.flock(handle, fcntl.LOCK_SH)
        yield device
    finally:
        with _changed(path) as listed:
            listed["holders"] = [holder for holder in listed["holders"] if holder["number"] != device.number]
        fcntl.flock(handle, fcntl.LOCK_UN)  # also unlocks the file in processes that inherited the lock
        os.close(handle)


def wait_seconds(job: Job) -> float:
    """Return the seconds until the job's devices are free, by the estimates of the runs that hold the devices; 0 if the
    devices are free or no estimate is known."""
    return max((_left(sign) for path in _paths(job) for sign in _holders(path)), default=0.0)


def _left(sign: JsonObject) -> float:
    return max(0.0, sign["since"] + sign["foreseen_seconds"] - time.time())


def holder(path: Path) -> str:
    """Describe, for people, the processes that hold the lock `path`, with their jobs and the time that is left."""
    lines = []
    for sign in _holders(path):
        since = time.strftime("%H:%M:%S", time.localtime(sign["since"]))
        left = f", about {_left(sign):.0f} s more" if _left(sign) >= 1 else ""
        lines.append(f"process {sign['pid']} has it for {sign['job']} since {since}{left}")
    return "; ".join(lines) or f"another process has it (fuser {path} names it)"


def _holders(path: Path) -> list[JsonObject]:
    return [sign for sign in _read(path)["holders"] if psutil.pid_exists(sign["pid"])]


def _paths(job: Job) -> list[Path]:
    """Return the sorted paths of the locks of a job's devices. Each GPU has a lock; CPU and sim share one lock."""
    names = set(machine.gpu_uuids(job)) if job.device == "cuda" else {"cpu"}
    return [folder() / f"harness-{name}.lock" for name in sorted(names)]


@contextlib.contextmanager
def _queued(path: Path, job: Job | None = None, report: Report | None = None) -> Iterator[None]:
    """Hold the device's queue within this context. Only the process that holds the queue may wait for the device's lock
    or add itself to the list of holders."""
    handle = _open(path.with_suffix(".queue"))
    try:
        if not _takes(handle, fcntl.LOCK_EX):
            if job and report:
                _tell(path, job, report)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _tell(path: Path, job: Job, report: Report) -> None:
    report({"event": "wait", "text": f"waiting for the {job.device} device: {holder(path)}"})


def _takes(handle: int, kind: int) -> bool:
    """Try to take the lock without waiting; return True if it was taken. `kind`: LOCK_EX (exclusive) or LOCK_SH
    (shared)."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(number: int, job_text: str, foreseen_seconds: float) -> JsonObject:
    return {
        "number": number,
        "pid": os.getpid(),
        "job": job_text,
        "since": time.time(),
        "foreseen_seconds": foreseen_seconds,
    }


def _list(path: Path) -> Path:
    return path.with_suffix(".holders")


@contextlib.contextmanager
def _changed(path: Path) -> Iterator[JsonObject]:
    """Yield the contents of the device's list of holders; after the context write the changed contents back. A list
    that another user owns stays as it is."""
    handle = _open(_list(path))
    try:
        # the wait is short: every process holds this lock only for a moment
        fcntl.flock(handle, fcntl.LOCK_EX)
        listed = _read(path)
        yield listed
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(listed).encode(), 0)
    finally:
        os.close(handle)


def _read(path: Path) -> JsonObject:
    """Return the contents of the device's list of holders. Anyone may have written the list's file; if the file does
    not have the form of such a list, return an empty list."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = read_json(_list(path))
        if all(map(_is_sign, listed["holders"])) and len(listed["holders"]) <= MOST_HOLDERS:
            return {"holders": list(listed["holders"]), "entered": int(listed["entered"])}
    return {"holders": [], "entered": 0}


def _is_sign(sign: Any) -> bool:
    """True if this entry of a list of holders has the form that _sign() makes, with possible numbers and times."""
    is_whole = isinstance(sign["number"], int) and isinstance(sign["pid"], int)
    is_named = isinstance(sign["job"], str) and len(sign["job"]) <= MOST_CHARACTERS
    times = 0 <= sign["since"] < LATEST and 0 <= sign["foreseen_seconds"] < LATEST
    return is_whole and 0 < sign["pid"] < 2**31 and is_named and times


def _can_write(path: Path) -> bool:
    handle = _open(path)
    os.close(handle)
    return os.access(path, os.W_OK)


def _open(path: Path) -> int:
    """Open the file, or create it, and return its descriptor. A file that belongs to another user may be opened for
    reading only, which is enough to lock it.

    Raises ValueError for a link, a pipe or another name of some file, which another user may have put there: a pipe
    would be waited for, and a file of one's own would be overwritten.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        for access in (os.O_RDWR, os.O_RDONLY):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                return _checked(os.open(path, access | flags), path)
        handle = _checked(os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666), path)
    except OSError as error:
        raise _no_lock(path, error.strerror or "an error") from error
    with contextlib.suppress(PermissionError):
        os.fchmod(handle, 0o666)
    return handle


def _checked(handle: int, path: Path) -> int:
    """Return the descriptor of a regular file that has no second name; close any other, and raise ValueError."""
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return handle
    os.close(handle)
    kind = "another kind" if not stat.S_ISREG(status.st_mode) else f"one with {status.st_nlink} names"
    raise _no_lock(path, f"{kind}, of user {status.st_uid}")


def _no_lock(path: Path, got: str) -> ValueError:
    return ValueError(
        f"{path}: expected a regular file for a lock, got {got}; remove it, or set HARNESS_LOCKS=FOLDER"
    )
