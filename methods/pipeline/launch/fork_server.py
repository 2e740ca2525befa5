"""Forks this machine's agents from one process that has imported torch, which takes seconds of a core; standard library
only.

A launcher has one such process, and sends it the descriptors of each new agent. The process ends with the launcher,
however that ends; agents depend on the launcher alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.base.child_process import child_environment
from methods.pipeline.launch import agent

MODULE = "methods.pipeline.launch.fork_server"


class ForkServer:
    """Starts with its first agent, and again if something has killed it."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    def fork(self, descriptors: Sequence[int]) -> None:
        """Fork an agent with these descriptors for standard input, output and error output. If it cannot start, they
        are closed."""
        if self.process is None or self.process.poll() is not None:
            self.connection, theirs = socket.socketpair()
            with theirs, open(self.log, "a") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", MODULE], stdin=theirs.fileno(), stdout=log, stderr=log,
                    start_new_session=True, env=child_environment(),
                )  # fmt: skip
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self.connection, [b"a"], descriptors)

    def close(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.connection.close()


def main() -> None:
    ctypes.CDLL(None).prctl(agent.PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, agent.ignore)  # both signals are for the agents to handle
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(Exception):  # each agent will raise it, into its own log
        agent.import_all()
    connection = socket.socket(fileno=0)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        if not message:
            os._exit(0)
        if not os.fork():
            connection.detach()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            agent.main()
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
