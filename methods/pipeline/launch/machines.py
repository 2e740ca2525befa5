"""Reads a list of machines, which may change during a job, and starts an agent on each machine: as a process on this
machine, by ssh on another machine, by srun under Slurm. Does not import torch.

The list has one address on each line; `#` begins a comment. An address on several lines stands for as many machines.
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

from harness.base import fork_server
from harness.base.child_process import child_environment
from harness.base.json_object import JsonObject
from harness.base.rank_agent import LOOPBACK
from methods.pipeline.launch.agent import IMPORTED_MODULES

AGENT_MODULE = "methods.pipeline.launch.agent"
# variables that ssh passes on
PASSED_VARIABLES = ("PYTHONPATH", "PYTHONSAFEPATH", "THP_MEM_ALLOC_ENABLE", "OMP_NUM_THREADS")
CLOSE_SECONDS = 5.0  # longest wait for an agent to end
SILENT_SECONDS = 30.0  # a machine that is silent for so long counts as lost, even if its connection is open


@dataclass(frozen=True, order=True)
class MachineLine:
    """A machine of the list: its address, and its number, from 0, among the lines with the same address."""

    address: str
    number: int

    def __str__(self) -> str:
        return self.address if not self.number else f"{self.address} ({self.number + 1})"

    @property
    def host(self) -> str:
        """Return a name that is the same for all lines of one physical machine."""
        return LOOPBACK if is_this_machine(self.address) else self.address


def read_machine_list(path: Path) -> list[MachineLine]:
    """Read the machines of a list. Raises ValueError if the file cannot be read or an address begins with "-"."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: expected a list of machines, got none: {error.strerror}") from error
    count_of_address: Counter[str] = Counter()
    machines = []
    for address in (line.partition("#")[0].strip() for line in text.splitlines()):
        if address.startswith("-"):
            raise ValueError(
                f"{path}: expected the address of a machine, which begins with no -, got {address!r}"
            )
        if address:
            machines.append(MachineLine(address, count_of_address[address]))
            count_of_address[address] += 1
    return machines


@functools.cache
def is_this_machine(address: str) -> bool:
    """Return whether the address is a name or address of this machine."""
    if address in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_loopback:
            return True
    for interface in psutil.net_if_addrs().values():
        if any(address == entry.address.partition("%")[0] for entry in interface):
            return True
    return False


def agent_command(address: str) -> list[str]:
    """Return the command that starts an agent on another machine: by srun inside a Slurm job, else by ssh."""
    environment = child_environment()
    agent_words = [
        "env",
        *(f"{name}={environment[name]}" for name in PASSED_VARIABLES if name in environment),
    ]
    agent_words += [sys.executable, "-m", AGENT_MODULE]
    if "SLURM_JOB_ID" in os.environ:
        return ["srun", "--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={address}", *agent_words]
    return [
        "ssh",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=20",
        "-T",
        "--",
        address,
        shlex.join(agent_words),
    ]


class Remote:
    """The launcher's connection to one agent, which the connection starts. `order`: the agent's first order. `log`:
    file for the agent's errors. `reports`: a queue that gets pairs of this connection and a report; a report of None
    says that the agent has ended."""

    def __init__(
        self, line: MachineLine, order: JsonObject, log: Path, reports: queue.SimpleQueue[Any]
    ) -> None:
        self.line, self.log = line, log
        self.is_ready, self.is_leaving, self.is_lost = False, False, False
        self.began_at = self.heard_at = time.monotonic()
        self.pid: int | None = None  # id of the process to kill; None: not yet known
        read_fd, write_fd = os.pipe()
        with open(log, "a") as error_file, open(write_fd, "wb"):
            self.process: subprocess.Popen[str] | fork_server.Forked
            if is_this_machine(line.address):
                self.process = fork_server.start(
                    AGENT_MODULE, (write_fd, error_file.fileno()), child_environment(), (), IMPORTED_MODULES
                )
            else:
                self.process = subprocess.Popen(
                    agent_command(line.address),
                    stdin=subprocess.PIPE,
                    stdout=write_fd,
                    stderr=error_file,
                    text=True,
                    start_new_session=True,
                    env=child_environment(),
                )
                self.pid = self.process.pid
        assert self.process.stdin
        self.orders, self.answers = self.process.stdin, open(read_fd)  # noqa: SIM115
        self.thread = threading.Thread(target=self._listen, args=(reports,), daemon=True)
        self.thread.start()
        self.send(order)

    def send(self, order: JsonObject) -> None:
        """Send an order. Does not raise if the agent has ended, because the reading thread reports the agent's end."""
        with contextlib.suppress(BrokenPipeError):
            self.orders.write(json.dumps(order) + "\n")
            self.orders.flush()

    def is_silent(self) -> bool:
        return self.is_ready and time.monotonic() > self.heard_at + SILENT_SECONDS

    def close(self) -> None:
        """Make the agent end its ranks and then itself. Kill an agent that still runs after CLOSE_SECONDS."""
        with contextlib.suppress(BrokenPipeError):
            self.orders.close()
        # Without a pid the agent is not forked yet, and will end as soon as it is forked: do not wait for its end.
        self.thread.join(CLOSE_SECONDS if self.pid else 0)
        if self.thread.is_alive() and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _listen(self, reports: queue.SimpleQueue[Any]) -> None:
        for text in self.answers:
            self.heard_at = time.monotonic()
            with contextlib.suppress(ValueError):  # an agent that is killed may leave half a line
                event = json.loads(text)
                if event["kind"] == "ready" and isinstance(self.process, fork_server.Forked):
                    self.pid = event["pid"]
                reports.put((self, event))
        if isinstance(self.process, subprocess.Popen):
            self.process.wait()
        reports.put((self, None))
