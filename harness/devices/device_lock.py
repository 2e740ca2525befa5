"""One job at a time on a device: a lock that the end of its process releases, with a line that names the holder.

The lock file lies in /tmp, whatever TMPDIR is: all callers share the device. The worker inherits it: a device is free
when its worker is gone, even if the parent went first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.core.foreign_file import read_json
from harness.core.job import Job
from harness.devices import machine


def folder() -> Path:
    """Of the locks: $HARNESS_LOCKS, for several machines that share one system, else /tmp."""
    shared = Path(os.environ.get("HARNESS_LOCKS", "/tmp"))
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def turn(job: Job, report: Callable[[dict[str, Any]], None]) -> Iterator[int]:
    """Hold the job's device; a waiting call reports which process holds it. Yields the lock's descriptor."""
    # Each GPU has a lock; all devices that compute on the CPU share one.
    name = machine.gpu().get("gpu_uuid", "0") if job.device == "cuda" else "cpu"
    path = folder() / f"harness-{name}.lock"
    handle = _open(path)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report({"event": "wait", "text": f"waiting for the {job.device} device: {holder(path)}"})
            fcntl.flock(handle, fcntl.LOCK_EX)
        sign = {"pid": os.getpid(), "job": f"{job.method}, {job.workload.num_layers} layers", "since": time.time()}
        with contextlib.suppress(OSError):  # another user's file: the lock holds, unsigned
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(sign).encode(), 0)
        yield handle
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # also for processes that inherited it
        os.close(handle)


def holder(path: Path) -> str:
    """The process that holds a lock, for people."""
    try:
        sign = read_json(path)
        since = time.strftime("%H:%M:%S", time.localtime(sign["since"]))
        return f"process {sign['pid']} has it for {sign['job']} since {since}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"another process has it (fuser {path} names it)"


def _open(path: Path) -> int:
    """Open or create the file; another user's may only be readable, which suffices to lock it."""
    for flags in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            return os.open(path, flags | os.O_NOFOLLOW)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    with contextlib.suppress(PermissionError):
        os.fchmod(handle, 0o666)
    return handle
