"""Device locks: a timed run holds its devices alone; untimed runs share devices with each other.

A job of several GPUs holds each of them. Each device has three files. The files lie in /tmp whatever TMPDIR is, because
all callers share the device. A run locks `.lock` alone or shared, and the worker inherits the lock, so a device is free
once its worker is gone, even if the parent ended first. A process that waits for `.lock` holds `.queue`, so that a
stream of untimed runs cannot keep a timed run out. `.holders` names the holders, for people, and counts the runs that
arrive: the seconds of an untimed run count if no other run arrived meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.base.foreign_file import read_json
from harness.core.job import Job
from harness.core.record import LATEST
from harness.devices import machine

Report = Callable[[dict[str, Any]], None]
MOST_HOLDERS, MOST_CHARACTERS = 1000, 1000  # most holders in a list, most characters of a job's name in it


@dataclass
class HeldDevice:
    """A run's turn on one device. `descriptor`: the descriptor of the device's lock; `number`: the number of this turn
    among the device's turns."""

    path: Path
    descriptor: int
    number: int = 0
    began_shared: bool = False

    def is_shared(self) -> bool:
        """True if another run was on the device since this turn began."""
        return self.began_shared or _read(self.path)["entered"] != self.number


@dataclass
class Turn:
    """A run's turn on all devices that it uses."""

    held: list[HeldDevice]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of the locks, which the worker inherits."""
        return tuple(each.descriptor for each in self.held)

    def is_shared(self) -> bool:
        """True if another run was on one of the devices since this turn began."""
        return any(each.is_shared() for each in self.held)


def folder() -> Path:
    """Return the folder of the locks: $HARNESS_LOCKS, if several machines share one system, else /tmp; if that is not
    writable, the folder for temporary files."""
    shared = Path(os.environ.get("HARNESS_LOCKS", "/tmp"))
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def turn(job: Job, report: Report, is_timed: bool = True, foreseen_seconds: float = 0.0) -> Iterator[Turn]:
    """Hold the job's devices, alone if the job is timed; a waiting call reports which processes hold one.

    An untimed run holds a GPU alone, too, because processes cannot divide the GPU's memory. An untimed run also holds a
    device alone if another user owns the list of holders, which the run then cannot change. All calls take their
    devices in the same order, so that no two calls wait for each other.
    """
    with contextlib.ExitStack() as stack:
        yield Turn([
            stack.enter_context(_held(path, job, report, is_timed, foreseen_seconds)) for path in _paths(job)
        ])  # fmt: skip


@contextlib.contextmanager
def _held(path: Path, job: Job, report: Report, is_timed: bool, foreseen_seconds: float) -> Iterator[HeldDevice]:
    """Hold one device."""
    handle = _open(path)
    shares = not is_timed and job.device != "cuda" and _can_write(_list(path))
    told = f"{job.method}, {job.workload.num_layers} layers"
    found = HeldDevice(path, handle)
    try:
        with _queued(path, job, report):
            if not _takes(handle, fcntl.LOCK_EX):
                found.began_shared = shares and _takes(handle, fcntl.LOCK_SH)
                if not found.began_shared:
                    _tell(path, job, report)
                    fcntl.flock(handle, fcntl.LOCK_EX)
            with _changed(path) as listed:
                found.number = listed["entered"] = listed["entered"] + 1
                before = listed["holders"] if found.began_shared else []  # none if alone: the listed holders have died
                listed["holders"] = [*before, _sign(found.number, told, foreseen_seconds)]
            if shares:
                fcntl.flock(handle, fcntl.LOCK_SH)  # from alone to shared, while this run holds the queue
        yield found
    finally:
        with _changed(path) as listed:
            listed["holders"] = [holder for holder in listed["holders"] if holder["number"] != found.number]
        fcntl.flock(handle, fcntl.LOCK_UN)  # unlock for processes that inherited the lock, too
        os.close(handle)


def wait_seconds(job: Job) -> float:
    """Return the seconds until the job's devices are free, as the holders estimate; 0 if the devices are free or the
    time is unknown."""
    return max((_left(sign) for path in _paths(job) for sign in _holders(path)), default=0.0)


def _left(sign: dict[str, Any]) -> float:
    return max(0.0, sign["since"] + sign["foreseen_seconds"] - time.time())


def holder(path: Path) -> str:
    """Name the processes that hold a lock, for people."""
    told = []
    for sign in _holders(path):
        since = time.strftime("%H:%M:%S", time.localtime(sign["since"]))
        left = f", about {_left(sign):.0f} s more" if _left(sign) >= 1 else ""
        told.append(f"process {sign['pid']} has it for {sign['job']} since {since}{left}")
    return "; ".join(told) or f"another process has it (fuser {path} names it)"


def _holders(path: Path) -> list[dict[str, Any]]:
    return [sign for sign in _read(path)["holders"] if psutil.pid_exists(sign["pid"])]


def _paths(job: Job) -> list[Path]:
    """Return the paths of the locks of a job's devices, sorted: each GPU has one, the CPU and sim share one."""
    names = {"cpu"}
    if job.device == "cuda":
        number = max(job.world_size, job.options.get("num_devices", 1))
        names = {_uuid(name) for name in machine.visible_gpus()[:number]} or {"0"}
    return [folder() / f"harness-{name}.lock" for name in sorted(names)]


def _uuid(name: str) -> str:
    """Return the whole UUID of a GPU, from its index or the start of its UUID in CUDA_VISIBLE_DEVICES; 0 if the driver
    does not know the GPU."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        if name.startswith("MIG"):
            return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(name)))
        for index in range(pynvml.nvmlDeviceGetCount()):
            uuid = str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
            if name == str(index) or uuid.startswith(name):
                return uuid
    return "0"


@contextlib.contextmanager
def _queued(path: Path, job: Job | None = None, report: Report | None = None) -> Iterator[None]:
    """Hold the queue: only the process that holds the queue waits for the device or adds to the list of holders."""
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
    """Take the lock if no waiting is needed; return whether it was taken."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(number: int, told: str, foreseen_seconds: float) -> dict[str, Any]:
    return {"number": number, "pid": os.getpid(), "job": told, "since": time.time(),
            "foreseen_seconds": foreseen_seconds}  # fmt: skip


def _list(path: Path) -> Path:
    return path.with_suffix(".holders")


@contextlib.contextmanager
def _changed(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the list of holders and write back its changes; another user's list stays as it is."""
    handle = _open(_list(path))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # this lock is never held for long
        listed = _read(path)
        yield listed
        with contextlib.suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(listed).encode(), 0)
    finally:
        os.close(handle)


def _read(path: Path) -> dict[str, Any]:
    """Read the list, which anyone on the machine may have written; empty if it has another form."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(_list(path))
        if all(map(_is_sign, found["holders"])) and len(found["holders"]) <= MOST_HOLDERS:
            return {"holders": list(found["holders"]), "entered": int(found["entered"])}
    return {"holders": [], "entered": 0}


def _is_sign(sign: Any) -> bool:
    """True if _sign() could have made this entry of the list, judged by the bounds of process numbers and times."""
    is_whole = isinstance(sign["number"], int) and isinstance(sign["pid"], int)
    is_named = isinstance(sign["job"], str) and len(sign["job"]) <= MOST_CHARACTERS
    times = 0 <= sign["since"] < LATEST and 0 <= sign["foreseen_seconds"] < LATEST
    return is_whole and 0 < sign["pid"] < 2**31 and is_named and times


def _can_write(path: Path) -> bool:
    handle = _open(path)
    os.close(handle)
    return os.access(path, os.W_OK)


def _open(path: Path) -> int:
    """Open the file, or create it. Another user's file may be read-only for this process, which suffices for a lock."""
    for flags in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            return os.open(path, flags | os.O_NOFOLLOW)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with contextlib.suppress(PermissionError):
        os.fchmod(handle, 0o666)
    return handle
