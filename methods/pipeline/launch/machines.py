"""Machines of a list that changes, and the agent on each: a process here, by ssh elsewhere, by srun under Slurm;
standard library only.

The list has an address a line; `#` begins a comment. An address on several lines is as many machines.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.core.child_process import child_environment

AGENT = "methods.pipeline.launch.agent"
IMPORTS = ["methods.pipeline.user_pipeline", "torch.distributed.checkpoint"]
PASSED_ON = ("PYTHONPATH", "PYTHONSAFEPATH", "THP_MEM_ALLOC_ENABLE", "OMP_NUM_THREADS")  # by ssh
SILENT_SECONDS = 30.0  # after which a machine that closes no connection counts as lost


@dataclass(frozen=True, order=True)
class Line:
    """A machine: an address, and which of its lines in the list."""

    address: str
    number: int

    def __str__(self) -> str:
        return self.address if not self.number else f"{self.address} ({self.number + 1})"


def read_list(path: Path) -> list[Line]:
    """Raises ValueError where there is none."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: expected a list of machines, got none: {error.strerror}") from error
    seen: Counter[str] = Counter()
    found = []
    for address in (line.partition("#")[0].strip() for line in text.splitlines()):
        if address:
            found.append(Line(address, seen[address]))
            seen[address] += 1
    return found


@functools.cache
def is_here(address: str) -> bool:
    """True for this machine's own names and addresses."""
    if address in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            return True
    own = {each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found}
    return address in own


def command(address: str) -> list[str]:
    """That starts an agent there."""
    words = [sys.executable, "-m", AGENT]
    if is_here(address):
        return words
    environment = child_environment()
    words = ["env", *(f"{name}={environment[name]}" for name in PASSED_ON if name in environment), *words]
    if "SLURM_JOB_ID" in os.environ:
        return ["srun", "--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={address}", *words]
    return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-T", address, shlex.join(words)]


class Remote:
    """An agent as its launcher sees it. What it tells goes to `told`, with the agent; None when it is gone."""

    def __init__(self, line: Line, order: dict[str, Any], log: Path, told: queue.SimpleQueue[Any]) -> None:
        self.line, self.log = line, log
        self.is_ready, self.is_leaving, self.is_lost = False, False, False
        self.began = self.heard = time.monotonic()
        with open(log, "a") as errors:
            self.process = subprocess.Popen(
                command(line.address), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True, env=child_environment(), text=True,
            )  # fmt: skip
        self.thread = threading.Thread(target=self._listen, args=(told,), daemon=True)
        self.thread.start()
        self.send(order)

    def send(self, order: dict[str, Any]) -> None:
        """An agent that is gone says so by itself."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def is_silent(self) -> bool:
        return self.is_ready and time.monotonic() > self.heard + SILENT_SECONDS

    def close(self) -> None:
        """The agent ends its ranks and itself."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _listen(self, told: queue.SimpleQueue[Any]) -> None:
        assert self.process.stdout
        for text in self.process.stdout:
            self.heard = time.monotonic()
            with contextlib.suppress(ValueError):  # a line cut off by a kill
                told.put((self, json.loads(text)))
        self.process.wait()
        told.put((self, None))
