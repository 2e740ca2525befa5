"""Keeps order between a device and its host: streams, events, threads, and the memory that both share.

The same code runs on a CPU, where a stream has nothing to wait for, and on a CUDA device. The race detector and the
virtual clock put streams and threads of their own into STREAMS, and so watch the same code."""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from harness.core.method import Unavailable
from harness.devices.exchange import Ranks
from harness.devices.update_threads import Workers

PART_BYTES = 32 * 2**20  # bytes of new host memory that a core touches at a time
NO_MEMORY = 2  # CUDA's error code cudaErrorMemoryAllocation
UNNOTED = nullcontext()  # the context around work in a run without a trace


class HostStream:
    """A stream of the CPU: queued work runs at once, so waits return at once. The stream serves as its own event."""

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> HostStream:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class CpuStreams:
    """Streams and threads of a CPU device."""

    stream: Any = HostStream
    current: Any = HostStream
    # The contexts around work on streams and threads (span) and around the allocation of host memory (taking);
    # harness/run/trace.py sets both.
    span: Any = None
    taking: Any = nullcontext

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def pool(self, num_threads: int) -> Any:
        """Make a pool of threads of one core each.

        torch sets a thread's number of cores at the thread's first parallel work, from a global count that the pool's
        threads overwrite. So the calling thread, which computes, takes its number before the pool's threads."""
        torch.get_num_threads()
        return ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))

    def workers(self, num_threads: int) -> Any:
        """Make the threads for the host's updates."""
        return Workers(self.pool(num_threads), num_threads)


class CudaStream(torch.cuda.Stream):
    """A stream whose events let a waiting thread sleep: a thread that spins would take a core from the host's Adam."""

    def record_event(self, event: Any = None) -> Any:
        return super().record_event(event or torch.cuda.Event(blocking=True))


class CudaStreams(CpuStreams):
    """Streams and threads of a CUDA device."""

    stream = CudaStream
    current = staticmethod(torch.cuda.current_stream)
    use = staticmethod(torch.cuda.stream)

    def pool(self, num_threads: int) -> Any:
        """Make a pool whose threads use the caller's current device; by default a new thread uses device 0."""
        torch.get_num_threads()  # as in CpuStreams.pool()
        return ThreadPoolExecutor(num_threads, initializer=_start_thread, initargs=(torch.cuda.current_device(),))


def _start_thread(device_index: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(device_index)


class SimStreams(CpuStreams):
    """Streams of the device sim: queued work runs at once, and a wait for a copy sleeps until the copy would have
    ended. If sim is not compiled but accounted for in Python (memory_account.py), its streams are the CPU's."""

    def pool(self, num_threads: int) -> Any:
        """Make a pool as CpuStreams does, after sim's thread for backward passes has taken its number of cores, too.

        Sums in a backward pass would round differently from the CPU's with another number of cores."""
        one = torch.ones((), device="sim", requires_grad=True)
        one.register_hook(lambda grad: torch.get_num_threads() and None)
        (one * 1).backward()
        return super().pool(num_threads)

    def stream(self) -> Any:
        return torch.get_device_module("sim").Stream()

    current = staticmethod(torch.accelerator.current_stream)

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return stream


STREAMS: dict[str, Any] = {"cpu": CpuStreams(), "sim": SimStreams(), "cuda": CudaStreams()}


class Device:
    """One device's three streams, the threads that queue inbound copies, the host's update threads, and the exchange
    with other ranks."""

    def __init__(self, name: str, num_workers: int = 1, num_ranks: int = 1) -> None:
        self.name = torch.device(name)
        self.streams = STREAMS[self.name.type]
        if self.name.type == "cuda" and self.name.index is not None:
            torch.cuda.set_device(self.name)  # streams and events belong to the current device
        self.ranks = Ranks(name, num_ranks)
        self.compute = self.streams.current()
        self.inbound, self.outbound = self.streams.stream(), self.streams.stream()
        # Parked layers return by a thread of their own, because this thread waits for updates, for which other copies
        # must not wait.
        self.copier, self.returner = self.streams.pool(1), self.streams.pool(1)
        self.workers, self.num_workers = self.streams.workers(num_workers), num_workers
        self._threads: list[Any] = [self.workers, self.returner, self.copier]  # each waits only for threads before it
        self.moved_bytes = 0
        self.next_place = itertools.count().__next__  # gives homes their numbers, in the order of the forward pass
        self._page_locked: list[torch.UntypedStorage] = []
        # The machine keeps memory that is unmapped while it is locked, and the memory's address cannot be locked again.
        # So a device that is dropped without __exit__ unlocks its memory, too; until then the list keeps the memory
        # mapped.
        weakref.finalize(self, unlock, self._page_locked, self.name).atexit = False

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        for pool in reversed(self._threads):
            pool.shutdown(cancel_futures=exc[0] is not None)  # finish pending writes, unless the run failed
        if exc[0] is not None:
            self.ranks.leave()
        unlock(self._page_locked, self.name)

    def span(self, track: str, work: str, of: str) -> AbstractContextManager[None]:
        """Mark work of one kind on a part of the model, for a trace: on a stream ("compute", "inbound", "outbound"),
        after all its waits, or in a host thread (any other track)."""
        note = self.streams.span
        return UNNOTED if note is None else note(getattr(self, track, None), track, work, of)

    def threads(self, num_threads: int) -> Any:
        """Make a pool of more host threads, which the device shuts down when it is left."""
        self._threads.append(self.streams.pool(num_threads))
        return self._threads[-1]

    def room(self, numel: int, dtype: torch.dtype, *, host: bool) -> Tensor:
        """Return a zeroed slab of exactly this size; on the host of a CUDA device the slab is page-locked. Raises
        torch.OutOfMemoryError if the host's memory cannot be locked."""
        if not host:
            return torch.zeros(numel, dtype=dtype, device=self.name)
        with self.streams.taking(numel * dtype.itemsize):
            if self.name.type == "sim":
                return torch.zeros(numel, dtype=dtype)  # torch's allocator makes this memory, so sim counts it
            return self._pages(numel, dtype)

    def _pages(self, numel: int, dtype: torch.dtype) -> Tensor:
        slab = pages(numel, dtype)
        # Touch every page now with all cores; otherwise one core would touch all pages in the first step.
        whole = slab.view(torch.uint8).numpy()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda start: whole[start : start + PART_BYTES].fill(0), range(0, len(whole), PART_BYTES)))
        if self.name.type == "cuda":
            self.page_lock(slab.untyped_storage())
        return slab

    def page_lock(self, memory: torch.UntypedStorage) -> None:
        """Lock host memory for this process's copies until the device is left or dropped; each process that shares the
        memory must lock it. Raises torch.OutOfMemoryError if not enough memory can be locked."""
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes(), 0))
        if code == NO_MEMORY:
            raise torch.OutOfMemoryError(f"cannot page-lock {memory.nbytes()} bytes of host memory: CUDA error {code}")
        if code:  # such as 801, not supported, or 712, locked already: no smaller model helps
            raise RuntimeError(f"expected CUDA to lock {memory.nbytes()} bytes of the host, got CUDA error {code}")
        self._page_locked.append(memory)

    def unlock_room(self, slab: Tensor) -> None:
        """Unlock host memory from room(), after all that is queued, so that it may be dropped."""
        found = [memory for memory in self._page_locked if memory.data_ptr() == slab.data_ptr()]
        self._page_locked[:] = [memory for memory in self._page_locked if memory.data_ptr() != slab.data_ptr()]
        unlock(found, self.name)

    def synchronize(self, *pending: Future) -> None:
        """Wait for these futures, then for everything queued on the three streams."""
        for future in pending:
            future.result()
        for stream in (self.inbound, self.compute, self.outbound):
            stream.synchronize()


def unlock(locked: list[torch.UntypedStorage], device: torch.device) -> None:
    """Unlock host memory once all work queued on the device is done, and empty the list."""
    if locked:
        torch.cuda.synchronize(device)
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked.pop().data_ptr())


def pages(numel: int, dtype: torch.dtype) -> Tensor:
    """Return host zeros in a mapping of their own, so that no two slabs share a page, because a page can be locked only
    once. The mapping's pages can be huge, and take memory at the first touch."""
    mapped = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # this kernel has no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype)


def num_update_threads(device: str) -> int:
    """Return the number of threads for the host's Adam. Beside a GPU two cores are left free, to launch kernels. On a
    CPU device all cores update: if one core updated, the other cores would wait for its share of each matrix product.
    Ranks that torchrun starts on one machine share the machine's cores."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, cores - 2 if device.startswith("cuda") else cores)


def require_device(device: str, engine: str) -> None:
    """Raise Unavailable if sim is accounted for in Python instead of compiled, because an engine needs a device of
    torch."""
    if device == "sim" and not torch.get_device_module(device).is_available():
        raise Unavailable(f"{engine} needs the compiled device sim: try apt-get install g++, then the same call")
