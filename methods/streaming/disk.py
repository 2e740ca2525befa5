"""Keeps states on the disk: the master and moments of a layer are stored in files and pass through a few host buffers.

A visit reads a layer's state into a buffer, updates the state there and writes it back. While one layer is updated, the
next layer is read and the previous layer is written. A file holds one kind of state (for example, first moments) of all
layers. The whole file is reserved before the first step, so that a disk that is too small fails before training. A file
is unlinked as soon as it is open, so that no run leaves a file behind.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.devices.streams import Device, pages
from methods.offload import torch_ops  # noqa: F401  registers torch.ops.harness.read and write
from methods.offload.state import kept_dtypes
from methods.shared.memory_needs import NUM_BUFFERS, stored_numel, writable_folder


class StateFile:
    """An unlinked file, opened with the system's cache and, if the file system supports O_DIRECT, a second time without
    the cache.

    Raises OSError, with the folder's name, if the disk has no room or fails.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        descriptor, path = tempfile.mkstemp(dir=folder)
        self.cached = self.direct = os.fdopen(descriptor, "r+b", buffering=0)
        with suppress(OSError):  # the file system has no O_DIRECT
            self.direct = os.fdopen(os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0)), "r+b", buffering=0)
        os.unlink(path)
        with naming_folder(folder):
            torch.ops.harness.reserve(self.at(0), num_bytes)

    def at(self, start: int) -> Tensor:
        """Return three numbers for torch_ops.read_slab() and write_slab(): the cached and the direct file descriptor,
        and `start`, the offset in bytes."""
        return torch.tensor([self.cached.fileno(), self.direct.fileno(), start])


@contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Add the folder's name to errors of the disk, because unlinked files have no name."""
    try:
        yield
    except OSError as error:
        error.filename = str(folder)
        raise


class Disk:
    """The files and host buffers for the states of all layers on the disk: one file for each kind of state. `numel`:
    the elements of the largest layer. `dtype`: the weights' dtype."""

    def __init__(self, device: Device, folder: Path, num_layers: int, numel: int, dtype: str) -> None:
        self.device, self.folder, self.dtypes = device, folder, kept_dtypes(dtype)
        self.numel = stored_numel(numel)
        self.files = [StateFile(folder, num_layers * self.numel * dtype.itemsize) for dtype in self.dtypes]
        self.buffers = [
            [device.room(self.numel, dtype, host=True) for dtype in self.dtypes]
            for _ in range(min(NUM_BUFFERS, num_layers))
        ]
        self.writer = device.threads(1)
        # A buffer is written back while the other buffers are read and updated.
        self.visitors = device.threads(max(1, len(self.buffers) - 1))
        self.visits: list[Any] = [None] * len(self.buffers)  # each buffer's last visit; None: no visit yet
        self.next_buffers = itertools.cycle(range(len(self.buffers)))


class Shelf:
    """One layer's place in the files."""

    def __init__(self, disk: Disk, layer_index: int) -> None:
        self.disk, self.prefix = disk, ""  # prefix: the beginning of the names of the layer's tensors
        state_sizes = (disk.numel * dtype.itemsize for dtype in disk.dtypes)
        self.state = [
            file.at(layer_index * state_size)
            for file, state_size in zip(disk.files, state_sizes, strict=True)
        ]
        self.last_visit: Any = None  # the future of the last visit(); None: no visit yet

    def visit(self, update: Callable[[list[Tensor]], Any]) -> Any:
        """Queue a visit: read the state, call update(), wait for the future that update() returns, and write the state
        back. Return a future that ends with the update. The result of this future is a second future, which
        ends when the state is written."""
        disk, buffer_index = self.disk, next(self.disk.next_buffers)
        buffer = disk.buffers[buffer_index]
        earlier_visits = {self.last_visit, disk.visits[buffer_index]} - {None}

        def visit_state() -> Any:
            for visit in earlier_visits:
                visit.result().result()
            self._move(torch.ops.harness.read, buffer)
            update(buffer).result()
            return disk.writer.submit(lambda: self._move(torch.ops.harness.write, buffer))

        self.last_visit = disk.visits[buffer_index] = disk.visitors.submit(visit_state)
        return self.last_visit

    def read(self) -> list[Tensor]:
        """Return a copy of the state after the last visit."""
        if self.last_visit is not None:
            self.last_visit.result().result()
        # not page-locked: no device reads it
        state_copy = [pages(self.disk.numel, dtype) for dtype in self.disk.dtypes]
        self._move(torch.ops.harness.read, state_copy)
        return state_copy

    def _move(self, read_or_write: Any, buffer: list[Tensor]) -> None:
        with (
            naming_folder(self.disk.folder),
            self.disk.device.span("disk", read_or_write.__name__, self.prefix),
        ):
            for file, slab in zip(self.state, buffer, strict=True):
                read_or_write(file, slab)


def shelves(device: Device, num_layers: int, folder: str | None, numel: int, dtype: str) -> Iterator[Shelf]:
    """Yield a shelf for each of the layers; the states are in files of this folder (None: the system's temporary
    folder). Raises OSError if the disk has no room."""
    if num_layers:
        disk = Disk(device, writable_folder(folder), num_layers, numel, dtype)
        yield from (Shelf(disk, layer_index) for layer_index in range(num_layers))
