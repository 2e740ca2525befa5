"""Describes the memories that plans fill, and says where each number comes from."""

from __future__ import annotations

from harness.core.job import GIB, Budget, Room, gib
from harness.devices import budgets, named_machines

# host memory of a named machine whose entry in machines.yaml has no host_memory
ASSUMED_HOST_BYTES = 64 * GIB


def host_bytes(name: str, asked: Budget) -> int:
    """Return the bytes of a named machine's host memory: the call's number; without one, that of its entry in
    machines.yaml; without both, ASSUMED_HOST_BYTES. A machine that the call describes by numbers has no entry."""
    listed = named_machines.load(name).room.host_bytes if name in named_machines.names() else None
    return asked.host_bytes or listed or ASSUMED_HOST_BYTES


def told(name: str | None, asked: Budget, fills: Room, device: str) -> str:
    """Return a line of text on the memories of a named machine; if `name` is None, of this machine. A second line has
    what machines.yaml tells of a named machine. `asked`: the budgets that the call gives. `fills`: the memories that
    plans fill."""
    about = named_machines.load(name).about if name in named_machines.names() else ""
    host = "not limited" if fills.host_bytes is None else gib(fills.host_bytes)
    less = budgets.reserve_text(asked, device) if name is None else ""
    host += f" ({', '.join(filter(None, (_host(name, asked), less)))})"
    line = f"memories that plans fill: device {_device(name, asked, fills, device)}; host {host}"
    return f"{line}\n{name}: {about}" if about else line


def device_of(name: str) -> str:
    """Return, as text, the size of a named machine's device memory, and where this number comes from."""
    size = named_machines.load(name).device_memory
    return (
        f"{named_machines.source(name)}: {size}, less a reserve"
        if size
        else f"{named_machines.source(name)}: none"
    )


def _device(name: str | None, asked: Budget, fills: Room, device: str) -> str:
    if fills.device_bytes is None:
        return "not limited" if device == "sim" else "shares the host's"
    found = "--device-memory" if asked.device_bytes else device_of(name) if name else "this machine's GPU"
    if device == "cuda" and (asked.device_bytes or not name):
        found += ", less the context and a reserve"
    return f"{gib(fills.device_bytes)} ({found})"


def _host(name: str | None, asked: Budget) -> str:
    if asked.host_bytes:
        return "--host-memory"
    if name is None:
        return "this machine's; try --host-memory for another"
    if name not in named_machines.names():
        return "assumed; try --host-memory"
    if named_machines.load(name).room.host_bytes:
        return named_machines.source(name)
    return f"assumed: {named_machines.source(name)} has none; try --host-memory"
