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
from typing import IO, NamedTuple, NoReturn

from harness.base import executed_code

# Modules that the server imports by default. torch._dynamo is there because torch.utils.checkpoint would import it at
# its first call, and pydantic's two modules because a worker needs them to make its record.
IMPORTS = ("torch", "torch._dynamo", "pydantic.dataclasses", "pydantic.type_adapter")
# environment variables of which each worker has its own values
RUN_VARIABLES = ("TMPDIR", executed_code.NOTES_VARIABLE)
# signals that a fork blocks until it has set a new process's handlers
MASKED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
MESSAGE_BYTES, MOST_DESCRIPTORS = 2**20, 16
# begins the message of a fork's exit code; the message before it is the fork's process number
END_PREFIX = b"end "
RESOURCE_LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
# most seconds to wait until a fork starts; the import of torch takes 2 s on an idle core
MOST_START_SECONDS = 120.0


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
        first, or if MOST_START_SECONDS pass."""
        if not self.pid:
            self._control.settimeout(MOST_START_SECONDS)
            try:
                message = self._control.recv(MESSAGE_BYTES)
                if not message or message.startswith(END_PREFIX):
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
            self.returncode = int(message.removeprefix(END_PREFIX)) if message else -signal.SIGKILL
            self._control.close()
        return self.returncode


def start(
    module: str,
    streams: tuple[int, int],
    environment: dict[str, str],
    kept_descriptors: Iterable[int] = (),
    imports: Sequence[str] = IMPORTS,
) -> Forked:
    """Run the module's main() in a new fork, which has a session of its own; return without waiting for the fork.

    `streams`: descriptors that become the fork's standard output and standard error. `environment`: all of the fork's
    environment variables. `kept_descriptors`: descriptors that keep their numbers in the fork. `imports`: modules that
    the server has imported. Raises OSError if the server cannot be started.
    """
    reader, writer = os.pipe()
    folder = os.open(".", os.O_PATH)
    control, server_end = _make_socket_pair()
    cores = [*os.sched_getaffinity(0)]
    order = ForkOrder(module, environment, cores, numbers=[0, 1, 2, *kept_descriptors])
    message = json.dumps(order._asdict()).encode()
    try:
        with server_end, open(reader, "rb") as stdin:
            descriptors = [server_end.fileno(), folder, stdin.fileno(), *streams, *kept_descriptors]
            try:
                socket.send_fds(_connection(environment, imports), [message], descriptors)
            except ConnectionError:  # the server was killed, so start another server
                close()
                socket.send_fds(_connection(environment, imports), [message], descriptors)
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
    limits. If the present server differs or has ended, start a new server. The variables RUN_VARIABLES are not
    compared."""
    global _server
    environment = {
        variable: value for variable, value in environment.items() if variable not in RUN_VARIABLES
    }
    inherited = imports, environment, [resource.getrlimit(kind) for kind in RESOURCE_LIMITS]
    is_usable = _server and (_server.owner, _server.inherited) == (os.getpid(), inherited)
    if _server and is_usable and _server.process.poll() is None:
        return _server.connection
    close()
    caller_end, server_end = _make_socket_pair()
    with server_end:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.base.fork_server", str(server_end.fileno()), *imports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[server_end.fileno()],
            start_new_session=True,
            env=environment,
        )
    _server = Server(os.getpid(), inherited, process, caller_end)
    return caller_end


def _make_socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ForkOrder(NamedTuple):
    """The caller's order of a fork, which goes to the server as JSON."""

    module: str
    environment: dict[str, str]
    cores: list[int]  # the cores that the fork may use
    numbers: list[int]  # the numbers that the descriptors get in the fork


class Fork(NamedTuple):
    """What a new fork has received."""

    order: ForkOrder
    control: (
        socket.socket
    )  # the connection over which the server reports this fork's number and end to the caller
    folder: int  # descriptor of the working folder
    descriptors: list[int]  # descriptors to which the fork gives the numbers `order.numbers`, one each


class Forks:
    """The server's state: its connection to the caller, and the running forks, each with the connection over which the
    server reports the fork's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.selector, self.connection = selectors.DefaultSelector(), connection
        self.selector.register(connection, selectors.EVENT_READ)
        self.forks_by_pidfd: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: process number, connection

    def serve(self) -> Fork:
        """Handle the caller's orders until the caller ends. For each fork, send the exit code over the fork's
        connection when the fork ends. Returns only in a new fork."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is not self.connection:
                    self._report_end(key.fd)
                elif fork := self._take_order():
                    return fork

    def _take_order(self) -> Fork | None:
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
                self._close_descriptors()
                order = ForkOrder(**json.loads(message))
                return Fork(order, control, folder=descriptors[1], descriptors=descriptors[2:])
            pidfd = os.pidfd_open(pid)
            self.selector.register(pidfd, selectors.EVENT_READ)
            self.forks_by_pidfd[pidfd] = pid, control
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        return None

    def _report_end(self, pidfd: int) -> None:
        self.selector.unregister(pidfd)
        os.close(pidfd)
        pid, control = self.forks_by_pidfd.pop(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError), control:  # the caller may be gone
            control.send(END_PREFIX + str(code).encode())

    def _close_descriptors(self) -> None:
        """Close the server's descriptors in this process, which is a new fork."""
        self.selector.close()
        self.connection.close()
        for pidfd, (_, control) in self.forks_by_pidfd.items():
            os.close(pidfd)
            control.close()


def run_order(fork: Fork) -> NoReturn:
    """Run the ordered module's main() in this process, a new fork, in the state of a newly started process. Send the
    fork's process number to the caller first."""
    order, numbers = fork.order, fork.order.numbers
    os.setsid()
    with contextlib.suppress(OSError), fork.control:
        # now the caller can send signals to this process's group
        fork.control.send(str(os.getpid()).encode())
    os.fchdir(fork.folder)
    os.close(fork.folder)
    first_unused = max(*numbers, *fork.descriptors) + 1
    moved_descriptors = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, first_unused) for descriptor in fork.descriptors
    ]
    for descriptor in fork.descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved_descriptors, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.sched_setaffinity(0, order.cores)
    for variable in RUN_VARIABLES:
        os.environ.pop(variable, None)
    os.environ |= order.environment  # replaces all of the server's other variables: the names are the same
    executed_code.watch()
    tempfile.tempdir = None
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MASKED_SIGNALS)
    _run_main(order.module)


def _run_main(module_name: str) -> NoReturn:
    """Run the module's main(), and end this process with main()'s exit code."""
    try:
        importlib.import_module(module_name).main()
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
    signal.pthread_sigmask(signal.SIG_BLOCK, MASKED_SIGNALS)
    with contextlib.suppress(Exception):  # a failed import fails again in each fork, which reports it
        import_all(sys.argv[2:])
    run_order(Forks(socket.socket(fileno=int(sys.argv[1]))).serve())


if __name__ == "__main__":
    main()
