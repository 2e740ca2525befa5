"""Keeps order between a device and its host: streams, events, threads, and the host memory that the device copies.

The same code runs on a CUDA device and on a CPU, whose streams need no waiting. The race detector and the virtual clock
put their own streams and threads into STREAMS, and so observe the same code."""

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

from harness.core.cpu_cores import available_cores, use_cores
from harness.core.method import Unavailable
from harness.devices.exchange import Ranks
from harness.devices.update_threads import Workers

TOUCHED_BYTES = 32 * 2**20  # bytes of new host memory that one core touches in one task
CUDA_NO_MEMORY = 2  # CUDA's error code cudaErrorMemoryAllocation
UNTRACED = nullcontext()  # the context around work in a run without a trace


class HostStream:
    """A stream of the CPU. Work runs when it is queued, so nothing waits. The stream also serves as its own event."""

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
    # Functions that return a context: `span` for work on a stream or thread, `taking` for an allocation of host memory.
    # harness/run/trace.py sets both. If `span` is None, the run has no trace.
    span: Any = None
    taking: Any = nullcontext

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def pool(self, num_threads: int) -> Any:
        """Make a pool of threads, each of which computes with one core."""
        return ThreadPoolExecutor(num_threads, initializer=use_cores, initargs=(1,))

    def workers(self, num_threads: int) -> Any:
        """Make the threads for the optimizer's updates on the host."""
        return Workers(self.pool(num_threads), num_threads)


class CudaStream(torch.cuda.Stream):
    """A stream on whose events threads wait asleep, because busy waiting would take a core from the host's Adam."""

    def record_event(self, event: Any = None) -> Any:
        return super().record_event(event or torch.cuda.Event(blocking=True))


class CudaStreams(CpuStreams):
    """Streams and threads of a CUDA device."""

    stream = CudaStream
    current = staticmethod(torch.cuda.current_stream)
    use = staticmethod(torch.cuda.stream)

    def pool(self, num_threads: int) -> Any:
        """Make a pool whose threads use the caller's current device; by default a new thread uses device 0."""
        return ThreadPoolExecutor(
            num_threads, initializer=_start_thread, initargs=(torch.cuda.current_device(),)
        )


def _start_thread(device_index: int) -> None:
    use_cores(1)
    torch.cuda.set_device(device_index)


class SimStreams(CpuStreams):
    """Streams of the compiled device sim. Work runs when it is queued; a wait for a copy sleeps until the simulated
    link would have copied. If sim is counted in Python (memory_account.py), its streams are CpuStreams instead."""

    def stream(self) -> Any:
        return torch.get_device_module("sim").Stream()

    current = staticmethod(torch.accelerator.current_stream)

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return stream


STREAMS: dict[str, Any] = {"cpu": CpuStreams(), "sim": SimStreams(), "cuda": CudaStreams()}


class Device:
    """A device's three streams (compute, inbound and outbound copies), the threads that queue inbound copies, the
    host's update threads, and the exchange with other ranks."""

    def __init__(self, name: str, num_workers: int = 1, num_ranks: int = 1) -> None:
        self.name = torch.device(name)
        self.streams = STREAMS[self.name.type]
        if self.name.type == "cuda" and self.name.index is not None:
            torch.cuda.set_device(self.name)  # streams and events belong to the current device
        self.ranks = Ranks(name, num_ranks)
        self.compute = self.streams.current()
        self.inbound, self.outbound = self.streams.stream(), self.streams.stream()
        # The thread `returner` waits for updates, and copies parked layers back. All other copies must not wait for
        # updates, so the thread `copier` does them.
        self.copier, self.returner = self.streams.pool(1), self.streams.pool(1)
        self.workers, self.num_workers = self.streams.workers(num_workers), num_workers
        # a pool may wait for pools before it
        self._threads: list[Any] = [self.workers, self.returner, self.copier]
        self.moved_bytes = 0
        # counts the layers' homes on the host, in the order of the forward pass
        self.next_place = itertools.count().__next__
        self._page_locked: list[torch.UntypedStorage] = []
        # Memory must be unlocked before it is unmapped, or the machine keeps it and cannot lock its address again. So
        # the list keeps locked memory mapped, and a device that is dropped without __exit__ unlocks the memory, too.
        weakref.finalize(self, unlock, self._page_locked, self.name).atexit = False

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        for pool in reversed(self._threads):
            pool.shutdown(cancel_futures=exc[0] is not None)  # pending work ends first, unless the run failed
        if exc[0] is not None:
            self.ranks.leave()
        unlock(self._page_locked, self.name)

    def span(self, track: str, work: str, of: str) -> AbstractContextManager[None]:
        """Return a context that marks a piece of work for a trace; callers enter it after the work's waits. `track`: a
        stream ("compute", "inbound", "outbound") or a host thread; `work`: the kind; `of`: the part of the model."""
        note = self.streams.span
        return UNTRACED if note is None else note(getattr(self, track, None), track, work, of)

    def threads(self, num_threads: int) -> Any:
        """Make another pool of host threads. The device shuts the pool down when the device's context ends."""
        self._threads.append(self.streams.pool(num_threads))
        return self._threads[-1]

    def room(self, numel: int, dtype: torch.dtype, *, host: bool) -> Tensor:
        """Return a slab of `numel` zeros on the device or, if `host`, on the host. If the device is CUDA, a slab on the
        host is page-locked. Raises torch.OutOfMemoryError if not enough memory can be locked."""
        if not host:
            return torch.zeros(numel, dtype=dtype, device=self.name)
        with self.streams.taking(numel * dtype.itemsize):
            if self.name.type == "sim":
                # torch's allocator makes this memory, so sim counts it
                return torch.zeros(numel, dtype=dtype)
            return self._pages(numel, dtype)

    def _pages(self, numel: int, dtype: torch.dtype) -> Tensor:
        slab = pages(numel, dtype, is_inherited=self.name.type != "cuda")
        # All cores touch the new pages now; otherwise one core would touch all of them in the first step.
        slab_bytes = slab.view(torch.uint8).numpy()
        with ThreadPoolExecutor() as pool:
            starts = range(0, len(slab_bytes), TOUCHED_BYTES)
            list(pool.map(lambda start: slab_bytes[start : start + TOUCHED_BYTES].fill(0), starts))
        if self.name.type == "cuda":
            self.page_lock(slab.untyped_storage())
        return slab

    def page_lock(self, memory: torch.UntypedStorage) -> None:
        """Page-lock host memory for this process's copies, until the device's context ends. If processes share memory,
        each process must lock it. Raises torch.OutOfMemoryError if not enough memory can be locked."""
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes(), 0))
        if code:
            with suppress(RuntimeError):  # CUDA raises the error again at the next call, which is this one
                torch.zeros((), device=self.name)
        if code == CUDA_NO_MEMORY:
            raise torch.OutOfMemoryError(
                f"cannot page-lock {memory.nbytes()} bytes of host memory: CUDA error {code}"
            )
        if code:  # such as 801 (not supported) or 712 (locked already): a smaller model would fail, too
            raise RuntimeError(
                f"expected CUDA to lock {memory.nbytes()} bytes of the host, got CUDA error {code}"
            )
        self._page_locked.append(memory)

    def unlock_room(self, slab: Tensor) -> None:
        """Wait for all work queued on the device, then unlock a slab that room() made on the host. Afterwards the slab
        may be dropped."""
        address = slab.data_ptr()
        slab_memory = [memory for memory in self._page_locked if memory.data_ptr() == address]
        self._page_locked[:] = [memory for memory in self._page_locked if memory.data_ptr() != address]
        unlock(slab_memory, self.name)

    def synchronize(self, *pending: Future) -> None:
        """Wait for these futures, then for everything queued on the three streams."""
        for future in pending:
            future.result()
        for stream in (self.inbound, self.compute, self.outbound):
            stream.synchronize()


def unlock(locked: list[torch.UntypedStorage], device: torch.device) -> None:
    """Wait for all work queued on the device; then unlock the host memory in the list, and empty the list."""
    if locked:
        torch.cuda.synchronize(device)
    while locked:
        memory = locked.pop()  # keeps the memory mapped until it is unlocked
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def pages(numel: int, dtype: torch.dtype, *, is_inherited: bool = True) -> Tensor:
    """Return zeros in a host mapping of their own, because slabs must not share a page: a page can be locked only once.
    The mapping may have huge pages. A page takes memory when it is first touched.
    `is_inherited`: False: forked children lack the mapping. A fork would copy page-locked pages, or part this process's
    writes from the pages that a GPU reads."""
    mapped = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may have no huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    if not is_inherited:
        mapped.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(mapped, dtype=dtype)


def num_update_threads(device: str) -> int:
    """Return the number of threads for the host's Adam. If the device is a GPU, two cores stay free to launch kernels.
    On a CPU device all cores update: if one core updated alone, the others would wait for its share of each matrix
    product. The ranks that torchrun starts on one machine share the machine's cores."""
    cores = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, cores - 2 if device.startswith("cuda") else cores)


def require_device(device: str, engine: str) -> None:
    """Raise Unavailable if the device is sim and sim is not compiled: an engine needs a real device of torch."""
    if device == "sim" and not torch.get_device_module(device).is_available():
        raise Unavailable(
            f"{engine} needs the compiled device sim: try apt-get install g++, then the same call"
        )
