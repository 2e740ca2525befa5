"""Forks processes from a server process that has imported torch: the import takes seconds, longer than many runs.

By default the server imports no training code, so a fork reads this project's files and the method's as they are when
the fork starts. Each caller has one server. The server ends with the caller, even if the caller is killed; the server's
forks go on. Standard library only.
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

# torch.utils.checkpoint imports torch._dynamo at its first call; a worker's record needs both modules of pydantic.
IMPORTS = ("torch", "torch._dynamo", "pydantic.dataclasses", "pydantic.type_adapter")
MASKED = (signal.SIGINT, signal.SIGTERM)  # signals that stay blocked until a fork has a new process's handlers
MESSAGE_BYTES, MOST_DESCRIPTORS = 2**20, 16
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
START_SECONDS = 120.0  # most seconds until a fork starts; torch's import takes 2 s on an idle core


class Server(NamedTuple):
    owner: int  # number of the process that started the server; its forks inherit the connection, but must not use it
    inherited: tuple[Sequence[str], dict[str, str], list[tuple[int, int]]]  # the server's imports, environment, limits
    process: subprocess.Popen[bytes]
    connection: socket.socket


_server: Server | None = None


class Forked:
    """A forked process, with the interface of subprocess.Popen."""

    def __init__(self, stdin: IO[str], control: socket.socket) -> None:
        self.stdin, self._control = stdin, control
        self.pid = 0
        self.returncode: int | None = None

    def started(self) -> Forked:
        """Wait until the process is forked. Raises OSError if the server ends first."""
        if not self.pid:
            self._control.settimeout(START_SECONDS)
            try:
                if not (told := self._control.recv(MESSAGE_BYTES)):
                    raise ConnectionError("the process that forks others has ended")
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
            self.returncode = int(told) if told else -signal.SIGKILL  # the server, which sends exit codes, was killed
            self._control.close()
        return self.returncode


def start(
    module: str, output: int, errors: int, environment: dict[str, str], kept: Iterable[int] = (),
    imports: Sequence[str] = IMPORTS,
) -> Forked:  # fmt: skip
    """Run the module's main() in a new fork with a session of its own; return without waiting for the fork. `output`,
    `errors`: descriptors of the fork's streams; `kept`: descriptors that keep their numbers in the fork. Raises OSError
    if the server cannot be started."""
    reader, writer = os.pipe()
    here = os.open(".", os.O_PATH)
    control, theirs = _pair()
    order = {"module": module, "environment": environment, "cores": [*os.sched_getaffinity(0)],
             "numbers": [0, 1, 2, *kept]}  # fmt: skip
    try:
        with theirs, open(reader, "rb") as stdin:
            given = [theirs.fileno(), here, stdin.fileno(), output, errors, *kept]
            try:
                socket.send_fds(_connection(environment, imports), [json.dumps(order).encode()], given)
            except ConnectionError:  # the server was killed: start another
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
    """End the server; forks that it has not started yet will not start."""
    global _server
    if _server:
        _server.connection.close()
        if _server.owner == os.getpid():
            _server.process.kill()
            _server.process.wait()
    _server = None


def import_all(names: Iterable[str]) -> None:
    """Import these modules without garbage collection, which would take a fifth of the time. Later collections skip
    the modules' objects."""
    gc.disable()
    for name in names:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def _connection(environment: dict[str, str], imports: Sequence[str]) -> socket.socket:
    """Return the connection to a server with these imports, this environment and this process's present limits; start a
    server if there is none. TMPDIR in the environment may differ, because each worker has its own."""
    global _server
    environment = {name: value for name, value in environment.items() if name != "TMPDIR"}
    inherited = imports, environment, [resource.getrlimit(kind) for kind in LIMITS]
    is_usable = _server and (_server.owner, _server.inherited) == (os.getpid(), inherited)
    if _server and is_usable and _server.process.poll() is None:
        return _server.connection
    close()
    ours, theirs = _pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.base.fork_server", str(theirs.fileno()), *imports],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], start_new_session=True, env=environment,
        )  # fmt: skip
    _server = Server(os.getpid(), inherited, process, ours)
    return ours


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Forks:
    """The server's state: the connection to its caller, and for each fork the connection that reports the fork's
    end."""

    def __init__(self, connection: socket.socket) -> None:
        self.waiting, self.connection = selectors.DefaultSelector(), connection
        self.waiting.register(connection, selectors.EVENT_READ)
        self.running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the fork's number, its caller

    def serve(self) -> NoReturn:
        """Fork as asked; send for each fork its process number and, at its end, its exit code."""
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
        except OSError:  # the system allows no more processes: closing the connection tells the caller
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
            asked.send(str(code).encode())

    def _forget(self) -> None:
        """Close, in a fork, the descriptors that belong to the server."""
        self.waiting.close()
        self.connection.close()
        for end, (_, asked) in self.running.items():
            os.close(end)
            asked.close()


def _work(order: dict[str, Any], asked: socket.socket, here: int, *given: int) -> NoReturn:
    """Run the module's main() as a new process would."""
    os.setsid()
    with contextlib.suppress(OSError), asked:
        asked.send(str(os.getpid()).encode())  # from now on the caller can signal this process's group
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
    os.environ |= order["environment"]  # the order's environment has every variable of the server's
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
    with contextlib.suppress(Exception):  # if an import fails, it fails in the forks again
        import_all(sys.argv[2:])
    Forks(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
