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
from harness.core.record import LATEST_TIME
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
        return self.began_shared or _read_list(self.path)["entered"] != self.number


@dataclass
class Turn:
    """The devices whose locks one run holds."""

    devices: list[HeldDevice]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors of the locks, which the run's worker inherits."""
        return tuple(device.descriptor for device in self.devices)

    def is_shared(self) -> bool:
        """True if, since this run entered its devices, another run has been on one of them."""
        return any(device.is_shared() for device in self.devices)


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
        held_devices = [_hold_device(path, job, report, is_timed, foreseen_seconds) for path in _paths(job)]
        yield Turn([stack.enter_context(held_device) for held_device in held_devices])


@contextlib.contextmanager
def _hold_device(
    path: Path, job: Job, report: Report, is_timed: bool, foreseen_seconds: float
) -> Iterator[HeldDevice]:
    """Hold the lock of the device whose `.lock` is `path`, within this context; see turn()."""
    descriptor = _open_file(path)
    is_sharing = not is_timed and job.device != "cuda" and _can_write(_list_file(path))
    job_text = f"{job.method}, {counted(job.workload.num_layers, 'layer')}"
    device = HeldDevice(path, descriptor)
    try:
        with _queued(path, job, report):
            if not _try_lock(descriptor, fcntl.LOCK_EX):
                device.began_shared = is_sharing and _try_lock(descriptor, fcntl.LOCK_SH)
                if not device.began_shared:
                    _report_wait(path, job, report)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            with _edited_list(path) as content:
                device.number = content["entered"] = content["entered"] + 1
                # if this run is alone, those in the list have died
                holders_before = content["holders"] if device.began_shared else []
                entry = _holder_entry(device.number, job_text, foreseen_seconds)
                content["holders"] = [*holders_before, entry]
            if is_sharing:
                # Downgrade the exclusive lock to a shared one. This run holds the queue, so no other run can take the
                # lock in between.
                fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield device
    finally:
        with _edited_list(path) as content:
            others = [entry for entry in content["holders"] if entry["number"] != device.number]
            content["holders"] = others
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also unlocks the file in processes that inherited the lock
        os.close(descriptor)


def wait_seconds(job: Job) -> float:
    """Return the seconds until the job's devices are free, by the estimates of the runs that hold the devices; 0 if the
    devices are free or no estimate is known."""
    return max((_seconds_left(entry) for path in _paths(job) for entry in _holders(path)), default=0.0)


def _seconds_left(entry: JsonObject) -> float:
    return max(0.0, entry["since"] + entry["foreseen_seconds"] - time.time())


def holders_text(path: Path) -> str:
    """Describe, for people, the processes that hold the lock `path`, with their jobs and the time that is left."""
    lines = []
    for entry in _holders(path):
        since = time.strftime("%H:%M:%S", time.localtime(entry["since"]))
        time_left = f", about {_seconds_left(entry):.0f} s more" if _seconds_left(entry) >= 1 else ""
        lines.append(f"process {entry['pid']} has it for {entry['job']} since {since}{time_left}")
    return "; ".join(lines) or f"another process has it (fuser {path} names it)"


def _holders(path: Path) -> list[JsonObject]:
    return [entry for entry in _read_list(path)["holders"] if psutil.pid_exists(entry["pid"])]


def _paths(job: Job) -> list[Path]:
    """Return the sorted paths of the locks of a job's devices. Each GPU has a lock; CPU and sim share one lock."""
    names = set(machine.gpu_uuids(job)) if job.device == "cuda" else {"cpu"}
    return [folder() / f"harness-{name}.lock" for name in sorted(names)]


@contextlib.contextmanager
def _queued(path: Path, job: Job | None = None, report: Report | None = None) -> Iterator[None]:
    """Hold the device's queue within this context. Only the process that holds the queue may wait for the device's lock
    or add itself to the list of holders."""
    descriptor = _open_file(path.with_suffix(".queue"))
    try:
        if not _try_lock(descriptor, fcntl.LOCK_EX):
            if job and report:
                _report_wait(path, job, report)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _report_wait(path: Path, job: Job, report: Report) -> None:
    report({"event": "wait", "text": f"waiting for the {job.device} device: {holders_text(path)}"})


def _try_lock(descriptor: int, kind: int) -> bool:
    """Try to take the lock without waiting; return True if it was taken. `kind`: LOCK_EX (exclusive) or LOCK_SH
    (shared)."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder_entry(number: int, job_text: str, foreseen_seconds: float) -> JsonObject:
    return {
        "number": number,
        "pid": os.getpid(),
        "job": job_text,
        "since": time.time(),
        "foreseen_seconds": foreseen_seconds,
    }


def _list_file(path: Path) -> Path:
    return path.with_suffix(".holders")


@contextlib.contextmanager
def _edited_list(path: Path) -> Iterator[JsonObject]:
    """Yield the contents of the device's list of holders; after the context write the changed contents back. A list
    that another user owns stays as it is."""
    descriptor = _open_file(_list_file(path))
    try:
        # the wait is short: every process holds this lock only for a moment
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        content = _read_list(path)
        yield content
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(content).encode(), 0)
    finally:
        os.close(descriptor)


def _read_list(path: Path) -> JsonObject:
    """Return the contents of the device's list of holders. Anyone may have written the list's file; if the file does
    not have the form of such a list, return an empty list."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = read_json(_list_file(path))
        if all(map(_is_holder_entry, content["holders"])) and len(content["holders"]) <= MOST_HOLDERS:
            return {"holders": list(content["holders"]), "entered": int(content["entered"])}
    return {"holders": [], "entered": 0}


def _is_holder_entry(entry: Any) -> bool:
    """True if this entry of a list of holders has the form that _holder_entry() makes, with possible numbers and
    times."""
    is_whole = isinstance(entry["number"], int) and isinstance(entry["pid"], int)
    is_named = isinstance(entry["job"], str) and len(entry["job"]) <= MOST_CHARACTERS
    is_possible_time = 0 <= entry["since"] < LATEST_TIME and 0 <= entry["foreseen_seconds"] < LATEST_TIME
    return is_whole and 0 < entry["pid"] < 2**31 and is_named and is_possible_time


def _can_write(path: Path) -> bool:
    descriptor = _open_file(path)
    os.close(descriptor)
    return os.access(path, os.W_OK)


def _open_file(path: Path) -> int:
    """Open the file, or create it, and return its descriptor. A file that belongs to another user may be opened for
    reading only, which is enough to lock it.

    Raises ValueError for a link, a pipe or another name of some file, which another user may have put there: a pipe
    would be waited for, and a file of one's own would be overwritten.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        for access in (os.O_RDWR, os.O_RDONLY):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                return _check_regular(os.open(path, access | flags), path)
        descriptor = _check_regular(os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666), path)
    except OSError as error:
        raise _no_lock(path, error.strerror or "an error") from error
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, 0o666)
    return descriptor


def _check_regular(descriptor: int, path: Path) -> int:
    """Return `descriptor` if it is open on a regular file with a single name, without further hard links. If not,
    close the descriptor, and raise ValueError."""
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    kind = "another kind" if not stat.S_ISREG(status.st_mode) else f"one with {status.st_nlink} names"
    raise _no_lock(path, f"{kind}, of user {status.st_uid}")


def _no_lock(path: Path, actual: str) -> ValueError:
    return ValueError(
        f"{path}: expected a regular file for a lock, got {actual}; remove it, or set HARNESS_LOCKS=FOLDER"
    )
