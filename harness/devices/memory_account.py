"""The device sim without a compiled library: Python counts the bytes of a second memory, which has its own budget.

In truth every tensor lies in the host's memory. The account books in which memory each tensor would lie: a
TorchDispatchMode books each new storage as "device" or "host" until the storage is freed. The outputs of an operation
are on the device if an input is there, or if a new tensor is asked for with device="sim". While a Tracker is active,
tensors booked on the device report sim as their device, and .to() copies between the two memories. The account works on
real tensors and, for memory rehearsals, on FakeTensors.

The idea comes from torch.distributed._tools.MemTracker, which knows only one memory. The account adds 10 us to each
operation on a 2-core EPYC, where a small operation itself takes 2 us.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.devices.streams import STREAMS, CpuStreams

SIM_NAME = "sim"
# bytes are rounded up to multiples of these; CUDA's allocator takes 512
ROUNDING_BYTES = {"device": 512, "host": 1}
CPU = torch.device("cpu")


class Booked(NamedTuple):
    """A storage that is booked in a memory, "device" or "host". `storage` is a weak reference, which reports when the
    storage is freed."""

    memory: str
    num_bytes: int
    storage: Any


class Tracker:
    """A context that books the allocations of this thread and of the threads of every ThreadPoolExecutor. An allocation
    beyond a memory's budget raises torch.OutOfMemoryError. Budgets are in bytes; None: no budget."""

    def __init__(self, device_bytes: int | None = None, host_bytes: int | None = None) -> None:
        self.budgets = {"device": device_bytes, "host": host_bytes}
        self.in_use = {"device": 0, "host": 0}
        self.peaks = {"device": 0, "host": 0}
        self._is_lifted = False
        self._booked: dict[int, Booked] = {}
        # A storage may be freed at any time, even while a thread holds the lock. So the entry of a freed storage waits
        # here until _subtract_freed() subtracts the entry's bytes.
        self._freed: deque[Booked] = deque()
        self._lock = threading.Lock()
        # `inside`: True during an operation; `to_host`: True if results go to the host
        self.thread = threading.local()
        self._entered = ExitStack()

    def __enter__(self) -> Tracker:
        name_device()
        for patch in self._patches():
            self._entered.enter_context(patch)
        self._entered.enter_context(self.in_thread())
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.close()

    def in_thread(self) -> AbstractContextManager:
        """Return a context that books the allocations of the calling thread. Each thread needs a context, because
        torch's dispatch modes belong to a thread.

        If the tracker is not entered, the context books host memory and changes nothing in torch. Entering the tracker
        registers a device named sim; after that, the process can use no other device beside the CPU.
        """
        return _Booking(self)

    def stats(self) -> dict[str, int]:
        """Return the bytes in use and the peak bytes of each memory. Page-locked memory counts as host memory, so the
        numbers named pinned are 0."""
        with self._lock:
            self._subtract_freed()
            in_use = {f"{memory}_allocated": num_bytes for memory, num_bytes in self.in_use.items()}
            peaks = {f"{memory}_peak": num_bytes for memory, num_bytes in self.peaks.items()}
            return in_use | peaks | {"pinned_allocated": 0, "pinned_peak": 0}

    def reset_peaks(self) -> None:
        """Set the peaks to the bytes in use now."""
        with self._lock:
            self._subtract_freed()
            self.peaks = dict(self.in_use)

    def lift(self) -> None:
        """End the budgets after training. From now on the peaks do not change."""
        self._is_lifted = True

    def run(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call one operation of torch and book the storages that the operation made. Return its result."""
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 0.5  # a FakeTensor has no value, so every value that is read is 0.5
        inputs = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        wanted = kwargs.get("device")
        to_device = wanted is not None and wanted.type == SIM_NAME
        if to_device:
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        # The argument device="cpu" is ignored, because autograd also passes device="cpu" for tensors that are booked
        # on the device.
        to_host = getattr(self.thread, "to_host", False)
        on_device = to_device or (
            not to_host and any(self._memory_of(storage) == "device" for storage in inputs)
        )
        self.thread.inside = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.thread.inside = False
        for tensor in _tensors(result):
            if not tensor.is_meta:
                self._book(tensor.untyped_storage(), inputs, "device" if on_device else "host")
        return result

    def device_of(self, actual: Any, tensor: Tensor) -> torch.device:
        """Return the value of a tensor's attribute `device`: sim for tensors that are booked on the device, unless an
        operation is running in this thread. `actual`: torch's own property."""
        device: torch.device = actual.__get__(tensor)
        if getattr(self.thread, "inside", False) or device.type == "meta":
            return device
        return (
            torch.device(SIM_NAME) if self._memory_of(tensor.untyped_storage()._cdata) == "device" else device
        )

    def _memory_of(self, key: int) -> str:
        """Return the memory in which a storage is booked. A storage that is not booked, because it was made before the
        tracker's start or outside torch's allocator, is in "host"."""
        entry = self._booked.get(key)
        return entry.memory if entry else "host"

    def _book(self, storage: torch.UntypedStorage, inputs: set[int], memory: str) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        before = self._booked.get(key)
        if before is None and key in inputs:
            return  # another allocator made the storage of this input
        memory = before.memory if before else memory
        num_bytes = -(-num_bytes // ROUNDING_BYTES[memory]) * ROUNDING_BYTES[memory]
        if before and before.num_bytes == num_bytes:
            return
        with self._lock:
            self._subtract_freed()
            self._charge(memory, num_bytes - (before.num_bytes if before else 0))
            booked, freed = self._booked, self._freed
            watch = (
                before.storage if before else weakref.ref(storage, lambda _: freed.append(booked.pop(key)))
            )
            booked[key] = Booked(memory, num_bytes, watch)

    def _charge(self, memory: str, num_bytes: int) -> None:
        in_use, budget = self.in_use[memory], None if self._is_lifted else self.budgets[memory]
        if budget is not None and num_bytes > 0 and in_use + num_bytes > budget:
            raise torch.OutOfMemoryError(
                f"sim {memory} out of memory: tried to allocate {num_bytes} bytes, {in_use} of {budget} bytes in use"
            )
        self.in_use[memory] += num_bytes
        if not self._is_lifted:
            self.peaks[memory] = max(self.peaks[memory], self.in_use[memory])

    def _subtract_freed(self) -> None:
        while self._freed:
            entry = self._freed.popleft()
            self.in_use[entry.memory] -= entry.num_bytes

    def _patches(self) -> Iterator[Any]:
        """Yield patches of torch, because a dispatch mode cannot see these: the devices that tensors report, resized
        storages, and work in other threads."""
        for cls in (Tensor, FakeTensor):
            yield mock.patch.object(cls, "device", property(partial(self.device_of, cls.device)))
        yield mock.patch.object(Tensor, "to", _to(self, Tensor.to))
        yield mock.patch.object(Tensor, "cpu", lambda tensor: tensor.to("cpu"))
        yield mock.patch.object(torch, "tensor", _tensor(torch.tensor))

        resize, submit = torch.UntypedStorage.resize_, ThreadPoolExecutor.submit

        def resize_and_book(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._book(storage, {storage._cdata}, "host")
            return result

        def submit_in_mode(
            pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            def booked() -> Any:
                with self.in_thread():
                    return work(*args, **kwargs)

            return submit(pool, booked)

        yield mock.patch.object(torch.UntypedStorage, "resize_", resize_and_book)
        yield mock.patch.object(ThreadPoolExecutor, "submit", submit_in_mode)


class _Booking(TorchDispatchMode):
    """The dispatch mode by which a tracker books the operations of one thread."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracker.run(func, args, dict(kwargs or {}))


def name_device() -> None:
    """Register torch.device("sim") and the module torch.sim, which torch's checkpoints need."""
    if not hasattr(torch, SIM_NAME):
        torch.utils.rename_privateuse1_backend(SIM_NAME)
        module: Any = types.ModuleType(f"torch.{SIM_NAME}")
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        module.manual_seed_all, module._is_in_bad_fork = lambda seed: None, lambda: False
        module.is_available = lambda: False  # an available device would need streams and graphs
        torch._register_device_module(SIM_NAME, module)
        STREAMS[SIM_NAME] = CpuStreams()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _tensor(tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement of torch.tensor(). Unlike torch's function, the replacement can make tensors on sim, and
    tensors from a list of FakeTensors."""

    def new_tensor(data: Any, **kwargs: Any) -> Tensor:
        inner = data[0] if isinstance(data, list) and len(data) == 1 else data
        if isinstance(inner, list) and inner and isinstance(inner[0], FakeTensor):
            return torch.stack(inner)
        device, requires_grad = kwargs.pop("device", None), kwargs.pop("requires_grad", False)
        result_tensor = tensor(data, **kwargs)
        if device is not None and torch.device(device).type != "cpu":
            # "sim" and "sim:0" name the same device
            result_tensor = result_tensor.to(SIM_NAME)
        return result_tensor.requires_grad_(requires_grad)

    return new_tensor


def _to(tracker: Tracker, to: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a replacement of Tensor.to() that knows two memories. A tensor that is not in the memory asked for is
    always copied."""

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = args[0] if args else kwargs.get("device")
        if isinstance(wanted, Tensor):
            return moved(tensor, wanted.device, wanted.dtype, *args[1:], **kwargs)
        goal = torch.device(wanted).type if isinstance(wanted, (str, torch.device)) else None
        if goal not in (SIM_NAME, "cpu") or tensor.is_meta:
            return to(tensor, *args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name != "device"}
        if goal == tensor.device.type:
            return to(tensor, CPU, *args[1:], **options)
        # The device needs a number. Without a number torch would ask for the current device of this type, which only a
        # compiled backend can tell.
        destination = CPU if goal == "cpu" else torch.device(SIM_NAME, 0)
        tracker.thread.to_host = goal == "cpu"
        try:
            return to(tensor, destination, *args[1:], **{**options, "copy": True})
        finally:
            tracker.thread.to_host = False

    return moved
