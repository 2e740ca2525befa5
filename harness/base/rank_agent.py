"""Starts this machine's ranks, watches them, and ends them together, in one round or in several rounds one after
another.

An agent forks the ranks from its own process, so a module that the agent has imported, such as torch, is there in its
ranks at once. Whenever the agent forks, it has only one thread, because a fork of a process with several threads is not
safe. If the agent ends, the system kills its ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, NoReturn

LOOPBACK = "127.0.0.1"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
# Seconds from the first failure that the agent sees until the other ranks are killed. In this time another rank may
# report an earlier failure.
GRACE_SECONDS = 1.5
# seconds that ranks have to end by themselves after an interrupt, before they are killed
INTERRUPT_SECONDS = 15.0
# gets the descriptor of the rank's pipe to the agent, returns the rank's exit code
Work = Callable[[int], int]


class Rendezvous(NamedTuple):
    """The place where the ranks of a round meet: the store of the first node's agent, at this address and port."""

    address: str = LOOPBACK
    port: int = 0  # 0: the system chooses a port
    node: int = 0  # number of this agent's node
    is_one_machine: bool = True
    run_id: str = "alone"

    def variables(self, rank: int, local_rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set for this rank. If all ranks are on one machine, they
        use only the loopback network device, unless the caller's environment names another device."""
        values = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": local_world_size,
            "GROUP_RANK": self.node,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        libraries = ("GLOO", "NCCL") if self.is_one_machine else ()
        names = [f"{library}_SOCKET_IFNAME" for library in libraries]
        devices = {name: os.environ.get(name, "lo") for name in names}
        return {name: str(value) for name, value in values.items()} | devices


class Rank:
    """A rank's process, which this agent has forked. `reader`: descriptor from which the agent reads what the rank
    writes into its pipe; -1 after the pipe's end. `end`: pidfd of the process."""

    def __init__(self, number: int, pid: int, reader: int) -> None:
        self.number, self.pid, self.reader = number, pid, reader
        self.end = os.pidfd_open(pid)

    def signal(self, kind: int) -> None:
        """Send a signal to the rank's process and to the processes in its group, which the rank has started."""
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, kind)


class RankAgent:
    """Runs the ranks of one round at a time. Subclasses define how to handle the ranks' messages, the ranks' exit codes
    and signals; unless a subclass ends the agent, SIGINT and SIGTERM do not. `private`: descriptors of the agent that
    its ranks must close."""

    def __init__(self, private: Iterable[int] = ()) -> None:
        self.private = list(private)
        self.ranks: dict[int, Rank] = {}
        self.listener: socket.socket | None = None  # socket at which the next round's ranks will meet
        # torch's store, through which ranks find each other; the store runs a thread here
        self.store: Any = None
        self.waiting = selectors.DefaultSelector()
        signal_reader, signal_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.private += [signal_reader, signal_writer]
        self.watch(signal_reader, lambda: self.signalled(os.read(signal_reader, 4096)))
        signal.set_wakeup_fd(signal_writer)
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, ignore)

    def heard(self, rank: int, data: bytes) -> None:
        """Handle data that a rank has written into its pipe. The data are whole lines if the rank writes one whole line
        of at most 4096 bytes at a time."""

    def exited(self, rank: int, code: int) -> None:
        """Handle the exit code of a rank. A rank that this agent has killed has the exit code -9."""

    def signalled(self, kinds: bytes) -> None:
        """Handle signals. `kinds`: the numbers of the signals that arrived, one byte each."""

    def watch(self, descriptor: int, then: Callable[[], Any]) -> None:
        """From now on, call `then` in each turn() in which the descriptor has data to read or has been closed at its
        other end."""
        self.waiting.register(descriptor, selectors.EVENT_READ, then)

    def turn(self, seconds: float) -> None:
        """Wait for events (data, ends of ranks, signals) at most this many seconds, and handle those that have
        arrived."""
        for key, _ in self.waiting.select(seconds):
            if key.fileobj in self.waiting.get_map():  # an earlier handler may have closed the descriptor
                key.data()

    # ---- A round

    def listen(self, address: str = LOOPBACK, port: int = 0) -> tuple[str, int]:
        """Open the socket at which the ranks of the next round will meet; return its address and port. The socket
        listens at `address` only. If `address` cannot be resolved, because it is only Slurm's name of this node, the
        machine's own name is used. Port 0: the system chooses a port. Raises OSError if this machine cannot listen
        there."""
        try:
            family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        except socket.gaierror:
            address = socket.gethostname()
            family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        self.listener = socket.create_server((address, port), family=family)
        return address, self.listener.getsockname()[1]

    def fork(self, works: Mapping[int, Work]) -> None:
        """Start a rank for each number in `works`; the rank does the number's work. Then, if listen() has opened a
        socket, serve the ranks' store there. This is safe, because nothing unpickles the bytes that the store gets."""
        for number, work in works.items():
            reader, writer = os.pipe()
            pid = _fork(f"rank {number}", partial(self._work, work, writer, [reader]))
            os.close(writer)
            rank = self.ranks[number] = Rank(number, pid, reader)
            self.watch(reader, partial(self._relay, rank))
            self.watch(rank.end, partial(self._ended, rank))
        if self.listener:
            from torch.distributed import TCPStore

            address, port = self.listener.getsockname()[:2]
            handle, self.listener = self.listener.detach(), None
            self.store = TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=handle
            )

    def kill(self) -> None:
        """End the round: kill the remaining ranks and the processes that they have started, and close the store."""
        for rank in self.ranks.values():
            rank.signal(signal.SIGKILL)
        for rank in [*self.ranks.values()]:
            self._ended(rank)
        self.store = None  # this ends the store's thread
        if self.listener:
            self.listener.close()
            self.listener = None

    def _relay(self, rank: Rank) -> None:
        if data := os.read(rank.reader, 65536):
            self.heard(rank.number, data)
        else:
            self.waiting.unregister(rank.reader)
            os.close(rank.reader)
            rank.reader = -1

    def _ended(self, rank: Rank) -> None:
        # also kills the rank's children; until waitpid() no other process gets its number
        rank.signal(signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
        while rank.reader >= 0:
            self._relay(rank)
        self.waiting.unregister(rank.end)
        os.close(rank.end)
        del self.ranks[rank.number]
        self.exited(rank.number, code)

    def _work(self, work: Work, writer: int, others: list[int]) -> NoReturn:
        """Do a rank's work in this process, which is a new fork, and end this process with the rank's exit code.
        `writer`: the rank's end of its pipe; `others`: descriptors to close."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # ranks go on ignoring SIGTERM, which may reach all processes; the agent handles it
        signal.set_wakeup_fd(-1)
        self.waiting.close()
        if self.listener:
            self.listener.close()
        rank_descriptors = [number for rank in self.ranks.values() for number in (rank.end, rank.reader)]
        for descriptor in [*self.private, *others, *rank_descriptors]:
            if descriptor >= 0:
                os.close(descriptor)
        with open(os.devnull) as null_device:
            os.dup2(null_device.fileno(), 0)
        random.seed()
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        code = 1
        try:
            code = work(writer)
        except BaseException:
            traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


class OneRound(RankAgent):
    """Runs one round of ranks. The round ends when all ranks have ended, or GRACE_SECONDS after a rank has failed.
    SIGINT and SIGTERM interrupt the round. `hear`: function that is called with a rank's number and the data that the
    rank has written."""

    def __init__(self, hear: Callable[[int, bytes], Any], private: Iterable[int] = ()) -> None:
        super().__init__(private)
        self.hear = hear
        self.exit_codes_of_failed: dict[int, int] = {}
        self.is_interrupted = False
        self.kill_time = math.inf  # time.monotonic() at which the remaining ranks are killed

    def meet(
        self,
        work: Callable[[dict[str, str], int], int],
        num_local: int,
        world_size: int,
        rendezvous: Rendezvous,
    ) -> dict[int, int]:
        """Run the ranks of this node and return as run() does. `work` gets a rank's environment variables and the
        descriptor of the rank's pipe. `num_local`: number of ranks of each node; `rendezvous`: where the ranks of all
        nodes meet."""
        first_rank = rendezvous.node * num_local
        if rendezvous.node == 0:
            address, port = self.listen(rendezvous.address, rendezvous.port)
            rendezvous = rendezvous._replace(address=address, port=port)
        works: dict[int, Work] = {}
        for local in range(num_local):
            variables = rendezvous.variables(first_rank + local, local, world_size, num_local)
            works[first_rank + local] = partial(work, variables)
        return self.run(works)

    def run(self, works: Mapping[int, Work]) -> dict[int, int]:
        """Run the ranks until the round ends. Return the exit codes of the ranks that failed by themselves, before this
        agent killed or interrupted them, in the order in which the agent saw the failures."""
        self.turn(0)  # handle a signal that came before the round
        if not self.is_interrupted:
            self.fork(works)
        while self.ranks and (seconds_left := self.kill_time - time.monotonic()) > 0:
            self.turn(min(seconds_left, 60.0))
        exit_codes_of_failed = dict(self.exit_codes_of_failed)
        self.kill()
        return exit_codes_of_failed

    def interrupt(self) -> None:
        """Send SIGINT to the ranks, so that they end by themselves. After INTERRUPT_SECONDS, run() kills the ranks that
        still run."""
        if not self.is_interrupted:
            self.is_interrupted, self.kill_time = True, time.monotonic() + INTERRUPT_SECONDS
            for rank in self.ranks.values():
                os.kill(rank.pid, signal.SIGINT)

    def heard(self, rank: int, data: bytes) -> None:
        self.hear(rank, data)

    def exited(self, rank: int, code: int) -> None:
        if code and not self.is_interrupted:
            self.exit_codes_of_failed[rank] = code
            self.kill_time = min(self.kill_time, time.monotonic() + GRACE_SECONDS)

    def signalled(self, kinds: bytes) -> None:
        self.interrupt()


def num_local_ranks(world_size: int) -> int:
    """Return how many of `world_size` ranks are on this machine: all ranks, unless the variable PET_NNODES, which
    torchrun reads, tells a number of machines."""
    return world_size // int(os.environ.get("PET_NNODES", "1"))


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def ignore(number: int, frame: Any) -> None:
    """A signal handler that does nothing. SIG_IGN is not used, because programs that this process starts would inherit
    SIG_IGN."""


def _fork(name: str, work: Callable[[], NoReturn]) -> int:
    """Fork a child process that does `work`; return its number. The system kills the child when this process ends, even
    by a signal. The commands ps and top show the child as `name`."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        library = ctypes.CDLL(None)
        library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        library.prctl(PR_SET_NAME, name.encode())
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        work()
    finally:
        os._exit(1)
