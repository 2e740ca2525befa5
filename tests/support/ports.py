"""Ports on which what the tests start may listen."""

from __future__ import annotations

import contextlib
import functools
import random
import socket

FIRST, COUNT = 15_000, 15_000  # below the ports that the system gives to connections
SIZE = 300  # ports of a process


def own_ports() -> range:
    """Return the ports that no other process that runs tests draws from: it could take one before it is used."""
    start = FIRST + SIZE * _slot()[0]
    return range(start, start + SIZE)


@functools.cache
def _slot() -> tuple[int, socket.socket]:
    """Return the number of this process's ports, and the name that it holds for them as long as it or a fork lives.
    Raises OSError if all are taken."""
    for number in range(COUNT // SIZE):
        name = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            name.bind(f"\0tests-ports-{number}")  # in no folder: known wherever the ports are
            return number, name
        name.close()
    raise OSError(f"expected at most {COUNT // SIZE} processes that run tests, got more")


def free_ports(count: int) -> list[int]:
    """Return free ports, each once. The system draws: forks of one process would draw the same ports. Raises OSError if
    there are fewer."""
    ports, free = own_ports(), list[int]()
    for port in random.SystemRandom().sample(ports, len(ports)):
        if len(free) == count:
            return free
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            free.append(port)
    if len(free) < count:
        raise OSError(f"expected {count} free ports in {ports}, got {len(free)}")
    return free
