"""Ports on which what the tests start may listen."""

from __future__ import annotations

import contextlib
import os
import random
import socket

FIRST, COUNT = 15_000, 15_000  # below the ports that the system gives to connections


def own_ports() -> range:
    """Return the ports that no other of pytest's workers draws from: it could take one before it is used."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = COUNT // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return range(FIRST + worker * size, FIRST + (worker + 1) * size)


def free_ports(count: int) -> list[int]:
    """Return free ports, each once. The system draws: forks of one process would draw the same ports."""
    ports, found = own_ports(), list[int]()
    for port in random.SystemRandom().sample(ports, len(ports)):
        if len(found) == count:
            break
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.append(port)
    return found
