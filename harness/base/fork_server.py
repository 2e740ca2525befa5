"""Starts processes as forks of a server process that has already imported torch. The import takes seconds, which is
longer than many runs.

By default the server imports no training code. So a fork imports the files of this project and of the method as they
are when the fork starts. Each calling process has one server. The server ends with its caller, even if the caller is
killed; its running forks go on. This file itself imports only the standard library and executed_code.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from typing import IO, Any, NamedTuple, NoReturn

from harness.base import executed_code

# Modules that the server imports by default. torch._dynamo is there because torch.utils.checkpoint would import it at
# its first call, and pydantic's two modules because a worker needs them to make its record.
IMPORTS = ("torch", "torch._dynamo", "pydantic.dataclasses", "pydantic.type_adapter")
OF_A_RUN = ("TMPDIR", executed_code.VARIABLE)  # environment variables of which each worker has its own values
# signals that a fork blocks until it has set a new process's handlers
MASKED = (signal.SIGINT, signal.SIGTERM)
MESSAGE_BYTES, MOST_DESCRIPTORS = 2**20, 16
END = b"end "  # begins the message of a fork's exit code; the message before it is the fork's process number
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
# most seconds to wait until a fork starts; the import of torch takes 2 s on an idle core
START_SECONDS = 120.0


class Server(NamedTuple):
    owner: int  # number of the process that started the server; its forks must not use the server
    # the server's imports, environment, limits
    inherited: tuple[Sequence[str], dict[str, str], list[tuple[int, int]]]
    process: subprocess.Popen[bytes]
    connection: socket.socket


_server: Server | None = None


class Forked:
    """The caller's handle of a process that the server forks: a part of the interface of subprocess.Popen."""

    def __init__(self, stdin: IO[str], control: socket.socket) -> None:
        self.stdin, self._control = stdin, control
        self.pid = 0
        self.returncode: int | None = None

    def started(self) -> Forked:
        """Wait until the process is forked, and set its number `pid`. Raises OSError if the server or the fork ends
        first, or if START_SECONDS pass."""
        if not self.pid:
            self._control.settimeout(START_SECONDS)
            try:
                message = self._control.recv(MESSAGE_BYTES)
                if not message or message.startswith(END):
                    raise ConnectionError(
                        "the process that forks others has ended, or its fork before it could start"
                    )
            except OSError:
                self.stdin.close()
                self._control.close()
                raise
            self._control.settimeout(None)
            self.pid = int(message)
        return self

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.started()._control], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            message = self.started()._control.recv(MESSAGE_BYTES)
            # empty: the server was killed
            self.returncode = int(message.removeprefix(END)) if message else -signal.SIGKILL
            self._control.close()
        return self.returncode


def start(
    module: str,
    streams: tuple[int, int],
    environment: dict[str, str],
    kept: Iterable[int] = (),
    imports: Sequence[str] = IMPORTS,
) -> Forked:
    """Run the module's main() in a new fork, which has a session of its own; return without waiting for the fork.

    `streams`: descriptors that become the fork's standard output and standard error. `environment`: all of the fork's
    environment variables. `kept`: descriptors that keep their numbers in the fork. `imports`: modules that the
    server has imported. Raises OSError if the server cannot be started.
    """
    reader, writer = os.pipe()
    folder = os.open(".", os.O_PATH)
    control, of_server = _pair()
    order = {
        "module": module,
        "environment": environment,
        "cores": [*os.sched_getaffinity(0)],
        "numbers": [0, 1, 2, *kept],
    }
    try:
        with of_server, open(reader, "rb") as stdin:
            descriptors = [of_server.fileno(), folder, stdin.fileno(), *streams, *kept]
            try:
                socket.send_fds(_connection(environment, imports), [json.dumps(order).encode()], descriptors)
            except ConnectionError:  # the server was killed, so start another server
                close()
                socket.send_fds(_connection(environment, imports), [json.dumps(order).encode()], descriptors)
    except BaseException:
        os.close(writer)
        control.close()
        raise
    finally:
        os.close(folder)
    return Forked(open(writer, "w"), control)


def close() -> None:
    """End the server. A fork that was ordered but has not started will not start; running forks go on."""
    global _server
    if _server:
        _server.connection.close()
        if _server.owner == os.getpid():
            _server.process.kill()
            _server.process.wait()
    _server = None


def import_all(names: Iterable[str]) -> None:
    """Import these modules, with garbage collection off, because collection would take a fifth of the time. Later
    collections skip all objects that exist after the imports."""
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _connection(environment: dict[str, str], imports: Sequence[str]) -> socket.socket:
    """Return the connection to a server that has these imports, this environment and this process's present resource
    limits. If the present server differs or has ended, start a new server. The variables OF_A_RUN are not compared."""
    global _server
    environment = {name: value for name, value in environment.items() if name not in OF_A_RUN}
    inherited = imports, environment, [resource.getrlimit(kind) for kind in LIMITS]
    is_usable = _server and (_server.owner, _server.inherited) == (os.getpid(), inherited)
    if _server and is_usable and _server.process.poll() is None:
        return _server.connection
    close()
    of_caller, of_server = _pair()
    with of_server:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.base.fork_server", str(of_server.fileno()), *imports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[of_server.fileno()],
            start_new_session=True,
            env=environment,
        )
    _server = Server(os.getpid(), inherited, process, of_caller)
    return of_caller


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Fork(NamedTuple):
    """What a new fork has received: the order, the connection over which the server reports the fork, a descriptor of
    the working folder, and the descriptors that get the numbers of order["numbers"]."""

    order: dict[str, Any]
    control: socket.socket
    folder: int
    descriptors: list[int]


class Forks:
    """The server's state: its connection to the caller, and the running forks, each with the connection over which the
    server reports the fork's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.waiting, self.connection = selectors.DefaultSelector(), connection
        self.waiting.register(connection, selectors.EVENT_READ)
        self.running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process number, connection

    def serve(self) -> Fork:
        """Handle the caller's orders until the caller ends. For each fork, send the exit code over the fork's
        connection when the fork ends. Returns only in a new fork."""
        while True:
            for key, _ in self.waiting.select():
                if key.fileobj is not self.connection:
                    self._ended(key.fd)
                elif fork := self._take():
                    return fork

    def _take(self) -> Fork | None:
        """Take an order, and fork a process for it. Returns None in the server."""
        message, descriptors, _, _ = socket.recv_fds(self.connection, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        control = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError:
            # the system allows no more processes; the caller notices that the connection is closed
            control.close()
        else:
            if not pid:
                self._forget()
                return Fork(json.loads(message), control, descriptors[1], descriptors[2:])
            end = os.pidfd_open(pid)
            self.waiting.register(end, selectors.EVENT_READ)
            self.running[end] = pid, control
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        return None

    def _ended(self, end: int) -> None:
        self.waiting.unregister(end)
        os.close(end)
        pid, control = self.running.pop(end)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError), control:  # the caller may be gone
            control.send(END + str(code).encode())

    def _forget(self) -> None:
        """Close the server's descriptors in this process, which is a new fork."""
        self.waiting.close()
        self.connection.close()
        for end, (_, control) in self.running.items():
            os.close(end)
            control.close()


def run_order(fork: Fork) -> NoReturn:
    """Run the ordered module's main() in this process, a new fork, in the state of a newly started process. Send the
    fork's process number to the caller first."""
    order, numbers = fork.order, fork.order["numbers"]
    os.setsid()
    with contextlib.suppress(OSError), fork.control:
        fork.control.send(
            str(os.getpid()).encode()
        )  # now the caller can send signals to this process's group
    os.fchdir(fork.folder)
    os.close(fork.folder)
    beyond = max(*numbers, *fork.descriptors) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, beyond) for descriptor in fork.descriptors]
    for descriptor in fork.descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.sched_setaffinity(0, order["cores"])
    for name in OF_A_RUN:
        os.environ.pop(name, None)
    os.environ |= order["environment"]  # replaces all of the server's other variables: the names are the same
    executed_code.watch()
    tempfile.tempdir = None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MASKED)
    try:
        importlib.import_module(order["module"]).main()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(end.code or 0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, MASKED)
    with contextlib.suppress(Exception):  # a failed import fails again in each fork, which reports it
        import_all(sys.argv[2:])
    run_order(Forks(socket.socket(fileno=int(sys.argv[1]))).serve())


if __name__ == "__main__":
    main()
