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
                if not (told := self._control.recv(MESSAGE_BYTES)) or told.startswith(END):
                    raise ConnectionError(
                        "the process that forks others has ended, or its fork before it could start"
                    )
            except OSError:
                self.stdin.close()
                self._control.close()
                raise
            self._control.settimeout(None)
            self.pid = int(told)
        return self

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self.started()._control], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            told = self.started()._control.recv(MESSAGE_BYTES)
            # empty: the server was killed
            self.returncode = int(told.removeprefix(END)) if told else -signal.SIGKILL
            self._control.close()
        return self.returncode


def start(
    module: str,
    output: int,
    errors: int,
    environment: dict[str, str],
    kept: Iterable[int] = (),
    imports: Sequence[str] = IMPORTS,
) -> Forked:
    """Run the module's main() in a new fork, which has a session of its own; return without waiting for the fork.

    `output`, `errors`: descriptors that become the fork's standard output and standard error. `environment`: all of the
    fork's environment variables. `kept`: descriptors that keep their numbers in the fork. `imports`: modules that the
    server has imported. Raises OSError if the server cannot be started.
    """
    reader, writer = os.pipe()
    here = os.open(".", os.O_PATH)
    control, theirs = _pair()
    order = {
        "module": module,
        "environment": environment,
        "cores": [*os.sched_getaffinity(0)],
        "numbers": [0, 1, 2, *kept],
    }
    try:
        with theirs, open(reader, "rb") as stdin:
            given = [theirs.fileno(), here, stdin.fileno(), output, errors, *kept]
            try:
                socket.send_fds(_connection(environment, imports), [json.dumps(order).encode()], given)
            except ConnectionError:  # the server was killed, so start another server
                close()
                socket.send_fds(_connection(environment, imports), [json.dumps(order).encode()], given)
    except BaseException:
        os.close(writer)
        control.close()
        raise
    finally:
        os.close(here)
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
    ours, theirs = _pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.base.fork_server", str(theirs.fileno()), *imports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=environment,
        )
    _server = Server(os.getpid(), inherited, process, ours)
    return ours


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Forks:
    """The server's state: its connection to the caller, and the running forks, each with the connection over which the
    server reports the fork's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.waiting, self.connection = selectors.DefaultSelector(), connection
        self.waiting.register(connection, selectors.EVENT_READ)
        self.running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process number, connection

    def serve(self) -> NoReturn:
        """Handle the caller's orders until the caller ends. For each fork, send the exit code over the fork's
        connection when the fork ends."""
        while True:
            for key, _ in self.waiting.select():
                self._take() if key.fileobj is self.connection else self._ended(key.fd)

    def _take(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self.connection, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        control, *given = descriptors
        asked = socket.socket(fileno=control)
        try:
            if not (pid := os.fork()):
                self._forget()
                _work(json.loads(message), asked, *given)
        except OSError:
            # the system allows no more processes; the caller notices that the connection is closed
            asked.close()
        else:
            end = os.pidfd_open(pid)
            self.waiting.register(end, selectors.EVENT_READ)
            self.running[end] = pid, asked
        for descriptor in given:
            os.close(descriptor)

    def _ended(self, end: int) -> None:
        self.waiting.unregister(end)
        os.close(end)
        pid, asked = self.running.pop(end)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError), asked:  # the caller may be gone
            asked.send(END + str(code).encode())

    def _forget(self) -> None:
        """Close the server's descriptors in this process, which is a new fork."""
        self.waiting.close()
        self.connection.close()
        for end, (_, asked) in self.running.items():
            os.close(end)
            asked.close()


def _work(order: dict[str, Any], asked: socket.socket, here: int, *given: int) -> NoReturn:
    """Run the module's main() in this process, a new fork, in the state of a newly started process. Send the fork's
    process number over `asked` first. `here`: descriptor of the working folder; `given`: descriptors that get the
    numbers of order["numbers"]."""
    os.setsid()
    with contextlib.suppress(OSError), asked:
        asked.send(str(os.getpid()).encode())  # now the caller can send signals to this process's group
    os.fchdir(here)
    os.close(here)
    beyond = max(*order["numbers"], *given) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, beyond) for descriptor in given]
    for descriptor in given:
        os.close(descriptor)
    for descriptor, number in zip(moved, order["numbers"], strict=True):
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
    Forks(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
