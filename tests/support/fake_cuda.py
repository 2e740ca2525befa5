"""torch.cuda without a GPU, by CUDA's documented rules: a method's own code runs on CPU memory, in real threads, and
what breaks a rule is noted, or where a GPU would fail at once is an AssertionError.

- A thread starts on device 0 and on its default streams. A stream belongs to the device that is current when it is
  made; an event to that of the stream that it is first recorded on, and to no other. use() of a stream makes its device
  current; work for another device is then a mistake.
- An op runs on its tensors' device, on the current stream of that device and thread. Tensors of two memories meet in
  copies alone, but for single numbers.
- A copy that does not block needs page-locked host memory.
- Two accesses to the same bytes, one of them a write, need an order: of a stream, by events, or by a thread that waits.
- Memory of the device goes back to the stream that it came from, which may use it again at once. Another stream's use
  must be over by then, or told by record_stream(). Page-locked memory is given back when nothing uses it.

It shares no code with harness/simulation, whose streams run one thing after another and know no devices.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.devices import streams, update_threads

HOST = -1  # as a device
OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_")  # do not read what they write


class Use(NamedTuple):
    """An access by an agent, a stream or a thread, as its so-many-eth."""

    agent: Any
    tick: int
    what: str
    start: int
    end: int
    is_write: bool

    def is_known(self, now: Counter) -> bool:
        return now[self.agent.name] >= self.tick

    def __str__(self) -> str:
        return f"{self.agent.name} {'writes' if self.is_write else 'reads'} it ({self.what})"


class CudaMemory:
    """A storage: its device, on a device the stream that it came from, on the host whether copies need not block."""

    def __init__(self, device: int, stream: Any = None, *, is_locked: bool = False) -> None:
        self.device, self.stream, self.is_locked = device, stream, is_locked
        self.uses: list[Use] = []
        self.recorded: set[Any] = set()


class Thread:
    """A host thread as CUDA sees it, and what it knows to have happened."""

    def __init__(self, name: str) -> None:
        self.name, self.now, self.device = name, Counter(), 0
        self.streams: dict[int, FakeStream] = {}  # current ones by device, if not the default
        self.used: list[FakeStream] = []  # by use(), the innermost last
        # where a running factory makes memory, and whether it is locked
        self.fresh: tuple[int, bool] | None = None


class FakeStream:
    def __init__(self, cuda: FakeCuda, device: int | None = None, name: str = "") -> None:
        self.cuda, self.device = cuda, cuda.current_device() if device is None else device
        self.name, self.now = name or f"stream {next(cuda.numbers)} of device {self.device}", Counter()

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent(self.cuda)
        event.record(self)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        assert event.device is not None, f"{self.name} waits for an event that was never recorded"
        self.reached()
        self.now |= event.now

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.cuda.thread.now |= self.now

    def reached(self) -> None:
        """Work queued by this thread comes after all that it has waited for."""
        self.now |= self.cuda.thread.now


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.device, self.now = cuda, None, Counter()

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.cuda.current_stream()
        assert self.device in (None, stream.device), f"an event of device {self.device} on {stream.name}"
        stream.reached()
        self.device, self.now, self.seconds = stream.device, stream.now.copy(), time.perf_counter()

    def query(self) -> bool:
        """As on a device that never gets ahead of what a thread has waited for."""
        return self.now <= self.cuda.thread.now

    def elapsed_time(self, later: FakeEvent) -> float:
        """In milliseconds."""
        for event in (self, later):
            assert event.now <= self.cuda.thread.now, (
                "an event is timed by a thread that has not waited for it"
            )
        return (later.seconds - self.seconds) * 1000

    def synchronize(self) -> None:
        assert self.device is not None, "a thread waits for an event that was never recorded"
        self.cuda.thread.now |= self.now


class FakeCuda:
    """A process's devices, threads and memories, and the rules that were broken."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices, self.local, self.lock = num_devices, threading.local(), threading.RLock()
        self.numbers, self.broken = itertools.count(1), dict[str, None]()
        self.defaults = [
            FakeStream(self, device, f"the default stream of {device}") for device in range(num_devices)
        ]
        self.memories: dict[int, tuple[weakref.ref, CudaMemory]] = {}
        self.locked: dict[int, int] = {}  # page-locked ranges, by address

    @property
    def thread(self) -> Thread:
        if not hasattr(self.local, "thread"):
            self.local.thread = Thread(f"thread {next(self.numbers)}")
        return self.local.thread

    def current_device(self) -> int:
        return self.thread.device

    def set_device(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        assert 0 <= index < self.num_devices, f"there is no device {index}"
        self.thread.device = index

    def current_stream(self, device: int | None = None) -> FakeStream:
        index = self.thread.device if device is None else device
        return self.thread.streams.get(index, self.defaults[index])

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        thread, before = self.thread, (self.thread.device, dict(self.thread.streams))
        thread.device, thread.streams = stream.device, {**thread.streams, stream.device: stream}
        thread.used.append(stream)
        yield
        thread.used.pop()
        thread.device, thread.streams = before

    def synchronize(self, device: torch.device | None = None) -> None:
        index = self.thread.device if device is None or device.index is None else device.index
        for stream in {id(stream): stream for stream in self.all_streams}.values():
            if stream.device == index:
                stream.synchronize()

    def register(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return 0

    def unregister(self, address: int) -> int:
        size = self.locked.pop(address)
        with self.lock:
            for storage, memory in list(self.memories.values()):
                there = storage()
                if there is not None and address <= there.data_ptr() < address + size:
                    self.check_over(memory, self.thread.now, "page-locked memory is given back")
        return 0

    def make_stream(self, table: Any = None) -> FakeStream:
        stream = FakeStream(self)
        self.all_streams.append(stream)
        return stream

    def install(self, patch: pytest.MonkeyPatch) -> FakeCuda:
        self.all_streams = [*self.defaults]
        runtime = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        for name, replacement in (
            ("set_device", self.set_device),
            ("current_device", self.current_device),
            ("cudart", lambda: runtime),
            ("synchronize", self.synchronize),
            ("Event", lambda **words: FakeEvent(self)),
            ("reset_peak_memory_stats", lambda: None),
            ("reset_accumulated_memory_stats", lambda: None),
        ):
            patch.setattr(torch.cuda, name, replacement)
        patch.setattr(streams.CudaStreams, "stream", self.make_stream)
        patch.setattr(streams.CudaStreams, "current", staticmethod(self.current_stream))
        patch.setattr(streams.CudaStreams, "use", staticmethod(self.use))
        patch.setattr(
            Tensor, "record_stream", lambda tensor, stream: self.memory_of(tensor).recorded.add(stream)
        )
        # As it is for tensors: a mode of functions is off in the whole backward pass, recomputes included.
        patch.setattr(torch.autograd, "backward", _without_modes(torch.autograd.backward))
        self._follow_threads(patch)
        return self

    def _follow_threads(self, patch: pytest.MonkeyPatch) -> None:
        """What a thread hands to another, by work or by its result, it hands with all that it knows."""
        submit, shutdown = ThreadPoolExecutor.submit, ThreadPoolExecutor.shutdown
        result, update = Future.result, update_threads.Workers.update
        cuda, modes, told_in = (
            self,
            (_Functions(self), _CudaOps(self)),
            weakref.WeakKeyDictionary[Any, _Told](),
        )

        def knowing(work: Any, now: Counter, told: _Told) -> Any:
            def run(*args: Any, **words: Any) -> Any:
                cuda.thread.now |= now
                with modes[0], modes[1]:
                    try:
                        return work(*args, **words)
                    finally:
                        told.join(cuda.thread.now)

            return run

        def submitted(pool: Any, work: Any, *args: Any, **words: Any) -> Future:
            told = _Told(told_in.setdefault(pool, _Told()))
            future = submit(pool, knowing(work, cuda.thread.now.copy(), told), *args, **words)
            future.told = told  # type: ignore[attr-defined]
            return future

        def ended(pool: Any, wait: bool = True, **words: Any) -> None:
            shutdown(pool, wait, **words)
            cuda.thread.now |= told_in.get(pool, _Told()).now

        def resulted(future: Future, timeout: float | None = None) -> Any:
            found = result(future, timeout)
            cuda.thread.now |= getattr(future, "told", _Told()).now
            return found

        def updated(workers: Any, deadline: int, landed: Any, num_chunks: int, work: Any) -> Future:
            told = _Told()
            future = update(
                workers, deadline, landed, num_chunks, knowing(work, cuda.thread.now.copy(), told)
            )
            future.told = told  # type: ignore[attr-defined]
            return future

        patch.setattr(ThreadPoolExecutor, "submit", submitted)
        patch.setattr(ThreadPoolExecutor, "shutdown", ended)
        patch.setattr(Future, "result", resulted)
        patch.setattr(update_threads.Workers, "update", updated)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around code of this thread that uses the devices."""
        with _Functions(self), _CudaOps(self):
            yield
        self.memories.clear()

    def memory_of(self, tensor: Tensor) -> CudaMemory:
        storage = tensor.untyped_storage()
        with self.lock:
            if id(storage) not in self.memories:
                address = storage.data_ptr()
                is_locked = any(start <= address < start + size for start, size in self.locked.items())
                self._add(storage, CudaMemory(HOST, is_locked=is_locked))
            return self.memories[id(storage)][1]

    def _add(self, storage: Any, memory: CudaMemory) -> None:
        key = id(storage)  # torch keeps this object as long as the memory
        self.memories[key] = (weakref.ref(storage, lambda _: self._freed(key)), memory)

    def _freed(self, key: int) -> None:
        with self.lock:
            memory = self.memories.pop(key, (None, CudaMemory(HOST)))[1]
            if memory.device != HOST:
                self.check_over(memory, memory.stream.now | self.thread.now, f"freed to {memory.stream.name}")

    def check_over(self, memory: CudaMemory, now: Counter, what: str) -> None:
        for use in memory.uses:
            if not use.is_known(now) and use.agent not in memory.recorded:
                self.broken[f"{what} while {use}"] = None

    def made(self, result: Any, device: int, *, is_locked: bool = False) -> None:
        """Count new memory as a device's, or as the host's."""
        for tensor in tensors(result):
            stream = None if device == HOST else self.current_stream(device)
            with self.lock:
                self._add(tensor.untyped_storage(), CudaMemory(device, stream, is_locked=is_locked))

    def book(self, name: str, reads: list[Tensor], writes: list[Tensor], device: int) -> Any:
        """The op's accesses, by the stream or the thread that runs it, which is returned."""
        agent = self.thread if device == HOST else self.current_stream(device)
        with self.lock:
            if isinstance(agent, FakeStream):
                if self.thread.used and self.thread.used[-1].device != device:
                    self.broken[f"{name} on device {device} while {self.thread.used[-1].name} is current"] = (
                        None
                    )
                agent.reached()
            agent.now[agent.name] += 1
            for tensor, is_write in [*((each, False) for each in reads), *((each, True) for each in writes)]:
                self._note(agent, tensor, name, is_write=is_write)
        return agent

    def _note(self, agent: Any, tensor: Tensor, what: str, *, is_write: bool) -> None:
        size, memory = tensor.element_size(), self.memory_of(tensor)
        start = tensor.storage_offset() * size
        reach = sum(
            (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        use = Use(agent, agent.now[agent.name], what, start, start + (reach + 1) * size, is_write)
        kept = []
        for past in memory.uses:
            is_same = past.start < use.end and use.start < past.end
            known = past.is_known(agent.now)
            if is_same and (is_write or past.is_write) and not known:
                self.broken[f"{use} without a wait until {past}"] = None
            covers = use.start <= past.start and past.end <= use.end and (is_write or not past.is_write)
            if not (known and covers):
                kept.append(past)
        memory.uses = [*kept, use]


class _Told:
    """What threads knew at the end of their parts of a work; `whole`: the same of all works of a pool."""

    def __init__(self, whole: _Told | None = None) -> None:
        self.now, self.whole, self.lock = Counter(), whole, threading.Lock()

    def join(self, now: Counter) -> None:
        with self.lock:
            self.now |= now
        if self.whole:
            self.whole.join(now)


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return called


@functools.cache
def _arguments_of(func: Any) -> tuple[list[str], set[str]]:
    """The names of an op's arguments, and of those that it writes."""
    arguments = func._schema.arguments
    written = {
        argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write
    }
    return [argument.name for argument in arguments], written


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (int, float, str)) or value is None:
        return []
    leaves = value if isinstance(value, (list, tuple)) else [value]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_meta]


class _CudaOps(TorchDispatchMode):
    """Books each op where it would run."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cuda = kwargs or {}, self.cuda
        name, (names, written) = func.overloadpacket.__name__, _arguments_of(func)
        given = dict(zip(names, args, strict=False)) | kwargs
        writes = [tensor for key in written & given.keys() for tensor in tensors(given[key])]
        unread = written if name in OVERWRITES else set()
        reads = [tensor for key in given.keys() - unread for tensor in tensors(given[key])]
        before = {id(tensor.untyped_storage()) for tensor in reads + writes}
        result = func(*args, **kwargs)
        fresh = [tensor for tensor in tensors(result) if id(tensor.untyped_storage()) not in before]
        if tensors(result) and not writes and not fresh:
            return result  # a view
        device = self._device_of(name, reads + writes)
        if name.endswith("_like") or name.startswith("new_"):
            reads = []  # but for its shape
        if fresh:
            place, is_locked = cuda.thread.fresh or (device, False)
            device = device if reads else place
            cuda.made(fresh, place, is_locked=is_locked)
        agent = cuda.book(name, reads, writes + fresh, device)
        if isinstance(agent, FakeStream) and (result is not None and not tensors(result) and not writes):
            agent.synchronize()  # a number
        if name == "copy_" and isinstance(agent, FakeStream):
            self._check_copy(agent, writes[0], reads[0], is_async=bool(given.get("non_blocking")))
        return result

    def _device_of(self, name: str, given: list[Tensor]) -> int:
        devices = {self.cuda.memory_of(tensor).device for tensor in given if tensor.dim()}
        devices = devices or {self.cuda.memory_of(tensor).device for tensor in given}
        assert len(devices) < 2 or name == "copy_", f"{name} of tensors of devices {sorted(devices)}"
        return max(devices, default=HOST)

    def _check_copy(self, stream: FakeStream, to: Tensor, source: Tensor, *, is_async: bool) -> None:
        homes = [memory for memory in map(self.cuda.memory_of, (to, source)) if memory.device == HOST]
        if homes and not is_async:
            stream.synchronize()
        if is_async and any(not memory.is_locked for memory in homes) and to.dim():
            self.cuda.broken["a copy that does not block, with host memory that is not page-locked"] = None


class _Functions(TorchFunctionMode):
    """Gives tensors the device that they are counted on, and moves them there."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, cuda = dict(kwargs or {}), self.cuda
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            device = func(*args) if args[0].is_meta else None
            return device or _named(cuda.memory_of(args[0]).device)
        target, is_locked = kwargs.get("device"), bool(kwargs.pop("pin_memory", False))
        if func in (Tensor.to, Tensor.cpu):
            target = "cpu" if func == Tensor.cpu else target
            target = next((each for each in args[1:2] if isinstance(each, (str, torch.device))), target)
            if target is not None:
                return self._moved(args[0], torch.device(target), is_async=bool(kwargs.get("non_blocking")))
        if is_locked:
            return self._made(HOST, True, func, *args, **kwargs)
        if target is None or torch.device(target).type != "cuda":
            return func(*args, **kwargs)
        return self._made(_index(target), False, func, *args, **{**kwargs, "device": "cpu"})

    def _moved(self, tensor: Tensor, target: torch.device, *, is_async: bool) -> Tensor:
        place = _index(target)
        if self.cuda.memory_of(tensor).device == place:
            return tensor
        # As torch: a copy to the host that does not block is to page-locked memory of torch's own.
        to = self._made(place, is_async, torch.empty_like, tensor.detach())
        return to.copy_(tensor.detach(), non_blocking=is_async)

    def _made(self, place: int, is_locked: bool, func: Any, *args: Any, **kwargs: Any) -> Any:
        thread = self.cuda.thread
        before, thread.fresh = thread.fresh, (place, is_locked)
        try:
            return func(*args, **kwargs)
        finally:
            thread.fresh = before


def _index(device: Any) -> int:
    device = torch.device(device)
    return HOST if device.type == "cpu" else device.index or 0


def _named(index: int) -> torch.device:
    return torch.device("cpu") if index == HOST else torch.device("cuda", index)
