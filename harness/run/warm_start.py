"""Forks workers from a process that has imported torch: the import takes seconds of a core, longer than many a run.

That process imports no code that trains: a worker reads the files of this project and of its method as they are when it
starts. Each caller has one such process, which ends with the caller, even a killed one; workers end as others do.
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
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import IO, Any, NamedTuple, NoReturn

# torch.utils.checkpoint imports the second at its first call; a worker's record needs the others.
PRELOADED = ("torch", "torch._dynamo", "pydantic.dataclasses", "pydantic.type_adapter")
MASKED = (signal.SIGINT, signal.SIGTERM)  # blocked until a worker has the handlers of a new process
MESSAGE_BYTES, MOST_DESCRIPTORS = 2**20, 16
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
START_SECONDS = 120.0  # torch's import takes 2 s on an idle core


class Server(NamedTuple):
    owner: int  # the process that started it; a fork has the connection, too
    inherited: tuple[dict[str, str], list[tuple[int, int]]]  # its environment and its limits
    process: subprocess.Popen[bytes]
    connection: socket.socket


_server: Server | None = None


class Forked:
    """A forked worker, with the interface of subprocess.Popen."""

    def __init__(self, pid: int, stdin: IO[str], control: socket.socket) -> None:
        self.pid, self.stdin, self._control = pid, stdin, control
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._control], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            told = self._control.recv(MESSAGE_BYTES)
            self.returncode = int(told) if told else -signal.SIGKILL  # whoever waited for the worker was killed
            self._control.close()
        return self.returncode


def start(module: str, log: IO[str], descriptors: Sequence[int], environment: dict[str, str]) -> Forked:
    """Run the module's main() in a fork, in a session of its own that prints to the log; descriptors keep their
    numbers. Raises OSError if the fork fails."""
    reader, writer = os.pipe()
    here = os.open(".", os.O_PATH)
    control, theirs = _pair()
    control.settimeout(START_SECONDS)
    order = {"module": module, "environment": environment, "cores": [*os.sched_getaffinity(0)],
             "numbers": [0, 1, 2, *descriptors]}  # fmt: skip
    try:
        with theirs, open(reader, "rb") as stdin:
            given = [theirs.fileno(), here, stdin.fileno(), log.fileno(), log.fileno(), *descriptors]
            socket.send_fds(_connection(environment), [json.dumps(order).encode()], given)
        if not (told := control.recv(MESSAGE_BYTES)):
            raise ConnectionError("the process that forks workers has ended")
    except BaseException:
        os.close(writer)
        control.close()
        raise
    finally:
        os.close(here)
    control.settimeout(None)
    return Forked(int(told), open(writer, "w"), control)


def _connection(environment: dict[str, str]) -> socket.socket:
    """Return the connection to a forking process with this environment and these limits. The temporary folder is
    excepted: each worker has its own."""
    global _server
    environment = {name: value for name, value in environment.items() if name != "TMPDIR"}
    inherited = environment, [resource.getrlimit(kind) for kind in LIMITS]
    is_usable = _server and (_server.owner, _server.inherited) == (os.getpid(), inherited)
    if _server and is_usable and _server.process.poll() is None:
        return _server.connection
    if _server:
        _server.connection.close()
        if _server.owner == os.getpid():
            _server.process.kill()
            _server.process.wait()
    ours, theirs = _pair()
    with theirs:
        words = [sys.executable, "-m", "harness.run.warm_start", str(theirs.fileno())]
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], start_new_session=True, env=environment,
        )  # fmt: skip
    _server = Server(os.getpid(), inherited, process, ours)
    return ours


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, MASKED)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # collection would take a fifth of the import's time
    for name in PRELOADED:
        with contextlib.suppress(Exception):  # the worker will raise it
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not message:
            os._exit(0)
        if not os.fork():
            connection.close()
            _follow(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _follow(order: dict[str, Any], control: int, here: int, *given: int) -> NoReturn:
    """Fork the worker, which reports its own number, and report how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if not (pid := os.fork()):
        _work(order, control, here, given)
    for descriptor in (here, *given):
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError), socket.socket(fileno=control) as told:  # the caller may be gone
        told.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _work(order: dict[str, Any], control: int, here: int, given: Sequence[int]) -> NoReturn:
    """Run the module's main() as a new process would."""
    os.setsid()
    with contextlib.suppress(OSError), socket.socket(fileno=control) as told:
        told.send(str(os.getpid()).encode())  # from now on its group can be told to end
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
    os.environ |= order["environment"]  # contains every variable of the server's
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


if __name__ == "__main__":
    main()
