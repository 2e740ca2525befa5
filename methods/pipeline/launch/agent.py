"""One machine's agent: starts this machine's ranks of each round, watches them, and ends them.

The agent imports torch once and forks the ranks, so they start at once. It has one thread, so that forking is safe.
Orders come as lines of JSON on standard input; when that closes, the launcher is gone, and the ranks end. Ranks die
with their agent, by the system. Standard output gets the ranks' reports, and how they end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from harness.base import fork_server
from methods.pipeline.launch.folder import WORKERS_LOCK

PR_SET_PDEATHSIG = 1
ERROR_BYTES = 3000  # the end of a traceback, in one line of a pipe
ALIVE_SECONDS = 2.0
# Modules that ranks use; torch imports torch._dynamo when a tensor is first used under one of its counters, without
# compiling.
IMPORTS = ("methods.pipeline.user_pipeline", "torch.distributed.checkpoint", "torch._dynamo")


class Rank:
    """A process that this agent forked."""

    def __init__(self, number: int, pid: int, told: int) -> None:
        self.number, self.pid, self.told = number, pid, told
        self.end = os.pidfd_open(pid)

    def signal(self, kind: int) -> None:
        """Send the signal to the rank and to the processes that it started."""
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, kind)


class MachineAgent:
    def __init__(self, output: int, order: dict[str, Any]) -> None:
        self.output, self.script = output, order
        self.ranks: dict[int, Rank] = {}
        self.store: int | None = None  # process of the store in which a round's ranks find one another
        self.round = 0
        self.waiting = selectors.DefaultSelector()
        self.waiting.register(0, selectors.EVENT_READ, self.obey)
        self.unread = b""
        self.noticed, noticing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.waiting.register(self.noticed, selectors.EVENT_READ, self.give_notice)
        signal.set_wakeup_fd(noticing)
        signal.signal(signal.SIGTERM, ignore)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # of ranks: methods/pipeline/link.py lets it in

    def run(self) -> None:
        self.tell("ready", pid=os.getpid())
        told = time.monotonic()
        while True:
            for key, _ in self.waiting.select(ALIVE_SECONDS):
                if key.fileobj in self.waiting.get_map():  # an earlier one may have closed it
                    key.data()
            if time.monotonic() > told + ALIVE_SECONDS:
                told = time.monotonic()
                self.tell("here")

    def tell(self, kind: str, **facts: Any) -> None:
        os.write(self.output, (json.dumps({"kind": kind, "round": self.round, **facts}) + "\n").encode())

    def give_notice(self) -> None:
        """Report SIGTERM: this machine is about to be taken away, as Slurm and clouds announce it."""
        os.read(self.noticed, 4096)
        self.tell("notice")

    def obey(self) -> None:
        read = os.read(0, 65536)
        if not read:
            self.end()
            sys.exit()
        *lines, self.unread = (self.unread + read).split(b"\n")
        for line in lines:
            order = json.loads(line)
            getattr(self, order.pop("do"))(**order)

    # ---- Orders

    def meet(self, round: int, address: str) -> None:
        """Open the store of a round on a port of the system's choice."""
        self.round = round
        reading, writing = os.pipe()
        self.store = _fork(partial(_serve, address, writing))
        os.close(writing)
        with open(reading) as answer:
            found = answer.read()
        self.tell("store", **json.loads(found)) if found else self.tell("no-store", address=address)

    def start(self, round: int, ranks: list[dict[str, Any]]) -> None:
        """Start ranks. `ranks`: for each its number, arguments, environment and link."""
        self.round = round
        for each in ranks:
            reading, writing = os.pipe()
            others = [self.output, reading, *(rank.told for rank in self.ranks.values() if rank.told >= 0)]
            pid = _fork(partial(_run, self.script, each, writing, others))
            os.close(writing)
            rank = Rank(each["rank"], pid, reading)
            self.ranks[rank.number] = rank
            self.waiting.register(reading, selectors.EVENT_READ, partial(self.relay, rank))
            self.waiting.register(rank.end, selectors.EVENT_READ, partial(self.ended, rank))

    def signal(self) -> None:
        for rank in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)

    def end(self) -> None:
        for rank in self.ranks.values():
            rank.signal(signal.SIGKILL)
        for rank in [*self.ranks.values()]:
            self.ended(rank)
        if self.store is not None:
            os.kill(self.store, signal.SIGKILL)
            os.waitpid(self.store, 0)
            self.store = None
        self.tell("ended")

    # ---- What ranks do

    def relay(self, rank: Rank) -> None:
        """Read a rank's reports, which are whole lines."""
        read = os.read(rank.told, 65536)
        if read:
            _write(self.output, read)
        else:
            self.waiting.unregister(rank.told)
            os.close(rank.told)
            rank.told = -1

    def ended(self, rank: Rank) -> None:
        rank.signal(signal.SIGKILL)  # kills what it started; its number is not free before it is waited for
        code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
        while rank.told >= 0:
            self.relay(rank)
        self.waiting.unregister(rank.end)
        os.close(rank.end)
        del self.ranks[rank.number]
        self.tell("exit", rank=rank.number, code=code)


def ignore(number: int, frame: Any) -> None:
    """A no-op handler: child programs inherit SIG_IGN but not this."""


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _fork(work: Callable[[], NoReturn]) -> int:
    """Fork a child that is killed when this process ends, however it ends."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        work()
    finally:
        os._exit(1)


def _serve(address: str, told: int) -> NoReturn:
    """Hold a store at this address until killed; at the machine's own name if the address is Slurm's name of a node
    alone."""
    from torch.distributed import TCPStore

    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    except socket.gaierror:
        address = socket.gethostname()
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    os.write(told, json.dumps({"address": address, "port": store.port}).encode())
    os.close(told)
    while True:
        signal.pause()


def _run(script: dict[str, Any], mine: dict[str, Any], told: int, others: list[int]) -> NoReturn:
    """Run the user's script in this process, as Python would run it. `others`: descriptors to close."""
    for descriptor in others:
        os.close(descriptor)
    signal.set_wakeup_fd(-1)  # SIGTERM, which reaches all processes of a machine, is for the agent to handle
    log = os.open(mine["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    os.environ.update(mine["environment"], VARUNA_LINK=json.dumps({**mine["link"], "descriptor": told}))
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    os.chdir(script["code_dir"])
    path = os.path.abspath(script["script"])
    sys.argv, code, error = [script["script"], *mine["arguments"]], 1, ""
    sys.path.insert(0, os.path.dirname(path))
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        error = str(end.code) if code and not isinstance(end.code, int) else ""
        print(error, file=sys.stderr)
    except BaseException as raised:
        above = raised.__traceback__
        while above and above.tb_frame.f_code.co_filename != path:  # of what ran the script
            above = above.tb_next
        error = "".join(traceback.format_exception(type(raised), raised, above or raised.__traceback__))
        print(error, file=sys.stderr)
    if code:
        line = {"kind": "error", **mine["link"], "text": error[-ERROR_BYTES // 2 :]}
        os.write(told, (json.dumps({key: line[key] for key in ("kind", "rank", "round", "text")}) + "\n").encode())
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def main() -> None:
    with open(0, "rb", buffering=0, closefd=False) as orders:  # unbuffered: takes no byte of the next order
        order = json.loads(orders.readline())
    output = os.dup(1)
    os.set_inheritable(output, False)
    os.dup2(2, 1)
    lock = open(Path(order["folder"]) / WORKERS_LOCK)  # noqa: SIM115  held until the last rank is gone, too
    fcntl.flock(lock, fcntl.LOCK_SH)
    fork_server.import_all(IMPORTS)
    agent, code = MachineAgent(output, order), 0
    try:
        agent.run()
    except (BrokenPipeError, SystemExit):  # the launcher is gone
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    for rank in agent.ranks.values():
        rank.signal(signal.SIGKILL)
    os._exit(code)  # an interpreter with torch in it takes seconds to end


if __name__ == "__main__":
    main()
