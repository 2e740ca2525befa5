"""Finds the memory accesses of an op that torch has dispatched: which bytes of which allocation it reads and writes,
and whether these are on the host or on the device.

On a CPU there is only one kind of memory. So memory counts as host memory if it was allocated as host memory, or by an
op that reads only host memory. All other memory stands for device memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

# By name of a collective: the argument that it writes, though its schema does not mark this argument as written.
WRITTEN_ARGUMENTS = {
    "_allgather_base_": "output_tensor",
    "_reduce_scatter_base_": "output_tensor",
    "allreduce_": "tensors",
}
# ops that write to their first argument without reading it
OVERWRITING_OPS = {"copy_", "zero_", "fill_", "normal_", "uniform_"}


@dataclass(eq=False)
class Memory:
    """One allocation of memory."""

    made_by: str  # name of the op that allocated it
    is_host: bool = False
    stream: Any = None  # the stream of the op that allocated this memory on the device; None: host memory
    name: str = ""
    notes: list[Any] = field(default_factory=list)  # data that a clock or a test keeps about this memory

    def __str__(self) -> str:
        return self.name or f"what {self.made_by} made"


class Access(NamedTuple):
    """The bytes [start, end) of a memory that a tensor spans. `num_bytes`: the bytes of the tensor's elements, without
    the gaps between them."""

    memory: Memory
    start: int
    end: int
    num_bytes: int
    is_write: bool


class Op(NamedTuple):
    """An op that has run. `func`: its overload. `arguments`: its arguments by name. `accesses`: empty if the op only
    made a view."""

    func: Any
    arguments: dict[str, Any]
    result: Any
    accesses: list[Access]

    @property
    def name(self) -> str:
        return self.func.overloadpacket.__name__

    @property
    def is_host(self) -> bool:
        return all(access.memory.is_host for access in self.accesses)

    @property
    def is_transfer(self) -> bool:
        """True if the op copies from host to device or from device to host."""
        return len({access.memory.is_host for access in self.accesses}) == 2

    @property
    def blocks(self) -> bool:
        """True if the calling thread waits until the device has run the op: the op returns a number, or is a copy
        without non_blocking."""
        if self.name == "copy_":
            return self.is_transfer and not self.arguments.get("non_blocking")
        return isinstance(self.result, (int, float))


class Memories:
    """Finds the memory of a tensor among all memories in use. `on_free` is called with each memory that is freed."""

    def __init__(self, on_free: Callable[[Memory], None]) -> None:
        self._on_free = on_free
        self._alive: dict[int, tuple[weakref.ref, Memory]] = {}
        # True: new memory is on the host; False: on the device; None: on the host if the op reads only host memory
        self._fresh_is_host: bool | None = None

    def of(self, tensor: Tensor, made_by: str = "another") -> Memory:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps this object as long as the memory exists
        if key not in self._alive:
            self._alive[key] = (
                weakref.ref(storage, lambda _: self._on_free(self._alive.pop(key)[1])),
                Memory(made_by),
            )
        return self._alive[key][1]

    def allocating(self, *, host: bool | None) -> AbstractContextManager:
        """Inside the context, count new memory as host memory (True) or as device memory (False). None: new memory is
        host memory if the op that allocates it reads only host memory."""
        return mock.patch.object(self, "_fresh_is_host", host)

    def forget(self) -> None:
        """Forget all memories, so that `on_free` is called for none of them."""
        self._alive.clear()

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, stream: Any) -> Op:
        """Return the Op for an op that has just run. The device memory that it allocated belongs to `stream`."""
        name, (names, written) = func.overloadpacket.__name__, _arguments_of(func)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        unread = written if name in OVERWRITING_OPS else ()
        reads, writes = list[Tensor](), list[Tensor]()
        for key, value in arguments.items():
            if key in written:
                writes += tensors_in(value)
            if key not in unread:
                reads += tensors_in(value)
        storages = {id(tensor.untyped_storage()) for tensor in reads + writes}
        fresh = [tensor for tensor in tensors_in(result) if id(tensor.untyped_storage()) not in storages]
        if tensors_in(result) and not writes and not fresh:
            return Op(func, arguments, result, [])
        is_host = bool(storages) and all(self.of(tensor).is_host for tensor in reads + writes)
        for tensor in fresh:
            memory = self.of(tensor, made_by=name)
            memory.is_host = is_host if self._fresh_is_host is None else self._fresh_is_host
            memory.stream = None if memory.is_host else stream
        accesses = [self._access(tensor, is_write=False) for tensor in reads]
        accesses += [self._access(tensor, is_write=True) for tensor in writes + fresh]
        return Op(func, arguments, result, accesses)

    def _access(self, tensor: Tensor, *, is_write: bool) -> Access:
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        reach = sum(
            (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return Access(self.of(tensor), start, start + (reach + 1) * size, tensor.numel() * size, is_write)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in an argument or a result, which may be a list, without empty tensors and those that have no
    memory."""
    leaves = value if isinstance(value, (list, tuple)) else [value]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_meta]


def named_attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each attribute of an object. For a state (a named tuple), yield instead the name and
    value of each of its slabs; the names in a spare state begin with "spare"."""
    for attribute, value in vars(owner).items():
        if not hasattr(value, "_asdict"):
            yield attribute, value
            continue
        for name, slab in value._asdict().items():
            yield name if attribute in ("state", "current") else f"{attribute} {name}", slab


@functools.cache
def _arguments_of(func: Any) -> tuple[list[str], set[str]]:
    """Return the names of an overload's arguments, and the names of those arguments that the overload writes."""
    schema = func._schema.arguments
    written = {argument.name for argument in schema if argument.alias_info and argument.alias_info.is_write}
    name = func.overloadpacket.__name__
    if name in WRITTEN_ARGUMENTS:
        written.add(WRITTEN_ARGUMENTS[name])
    return [argument.name for argument in schema], written
