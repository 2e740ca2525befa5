"""Order between a device and its host: streams, events, threads, and the memory they share.

The same code runs on a CPU, where a stream has nothing to wait for, and on a CUDA device. The race detector and the
virtual clock put their own streams and threads into STREAMS and watch the same code.
"""

from __future__ import annotations

import itertools
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.core.method import Unavailable
from harness.devices.update_threads import Workers

PART_BYTES = 32 * 2**20  # of host memory that one core takes at once
UNNOTED = nullcontext()


class HostStream:
    """A stream of the CPU: work is done when it is queued, so there is nothing to wait for. Its own event, too."""

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> HostStream:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class CpuStreams:
    """Streams and threads where the device is the CPU."""

    stream: Any = HostStream
    current: Any = HostStream
    # Set by harness/run/trace.py: around work on streams and threads, in a traced run; around taking so many bytes of
    # host memory.
    span: Any = None
    taking: Any = nullcontext

    def use(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def pool(self, num_threads: int) -> Any:
        """Threads of one core each. torch hands a thread its number of cores at its first parallel work, from a count
        that these threads overwrite: the computing thread takes its own first."""
        torch.get_num_threads()
        return ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,))

    def workers(self, num_threads: int) -> Any:
        """Threads for the host's updates."""
        return Workers(self.pool(num_threads), num_threads)


class CudaStream(torch.cuda.Stream):
    """A stream whose events put a waiting thread to sleep: a spinning one would take a core from the host's Adam."""

    def record_event(self, event: Any = None) -> Any:
        return super().record_event(event or torch.cuda.Event(blocking=True))


class CudaStreams(CpuStreams):
    """Streams and threads of the CUDA device."""

    stream = CudaStream
    current = staticmethod(torch.cuda.current_stream)
    use = staticmethod(torch.cuda.stream)

    def pool(self, num_threads: int) -> Any:
        """Threads on the current device of the thread that asks for them: a new thread's own is device 0."""
        torch.get_num_threads()  # as CpuStreams.pool()
        return ThreadPoolExecutor(num_threads, initializer=_start_thread, initargs=(torch.cuda.current_device(),))


def _start_thread(device_index: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(device_index)


class SimStreams(CpuStreams):
    """Streams of the device sim: queued work happens at once, and a wait for a copy sleeps until the copy would have
    ended. If sim is only accounted for, its streams are the CPU's (memory_account.py)."""

    def pool(self, num_threads: int) -> Any:
        """On sim the backward pass has a thread of its own, which must take its cores before these threads do, too:
        sums over another number of them round otherwise than the CPU's."""
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
    """One device's three streams, the threads that queue inbound copies, and the host's update threads."""

    def __init__(self, name: str, num_workers: int = 1) -> None:
        self.name = torch.device(name)
        self.streams = STREAMS[self.name.type]
        if self.name.type == "cuda" and self.name.index is not None:
            torch.cuda.set_device(self.name)  # streams and events belong to the current device
        self.compute = self.streams.current()
        self.inbound, self.outbound = self.streams.stream(), self.streams.stream()
        # Parked layers return in a thread of their own: it waits for updates, and travelling layers must not.
        self.copier, self.returner = self.streams.pool(1), self.streams.pool(1)
        self.workers, self.num_workers = self.streams.workers(num_workers), num_workers
        self._threads: list[Any] = [self.workers, self.returner, self.copier]  # each waits only for earlier ones
        self.moved_bytes = 0
        self.next_place = itertools.count().__next__  # of a home, in the order of the forward pass
        self._page_locked: list[Tensor] = []

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: object) -> None:
        for pool in reversed(self._threads):
            pool.shutdown(cancel_futures=exc[0] is not None)  # finish pending writes, unless the run failed
        if self._page_locked:
            torch.cuda.synchronize()
        for slab in self._page_locked:
            torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())

    def span(self, track: str, work: str, of: str) -> AbstractContextManager[None]:
        """Around work of one kind on a part of the model: queued on a stream ("compute", "inbound", "outbound"), after
        all its waits, or done by a thread of the host (any other track)."""
        note = self.streams.span
        return UNNOTED if note is None else note(getattr(self, track, None), track, work, of)

    def threads(self, num_threads: int) -> Any:
        """More threads of the host, shut down with the device."""
        self._threads.append(self.streams.pool(num_threads))
        return self._threads[-1]

    def room(self, numel: int, dtype: torch.dtype, *, host: bool) -> Tensor:
        """A zeroed slab, exactly as large as asked; on the host of a CUDA device it is page-locked. Raises
        torch.OutOfMemoryError if the host's memory cannot be locked."""
        if not host:
            return torch.zeros(numel, dtype=dtype, device=self.name)
        with self.streams.taking(numel * dtype.itemsize):
            if self.name.type == "sim":
                return torch.zeros(numel, dtype=dtype)  # from the allocator whose bytes are budgeted
            return self._pages(numel, dtype)

    def _pages(self, numel: int, dtype: torch.dtype) -> Tensor:
        slab = pages(numel, dtype)
        # Touch every page now, by all cores, instead of by one in the first step.
        whole = slab.view(torch.uint8).numpy()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda start: whole[start : start + PART_BYTES].fill(0), range(0, len(whole), PART_BYTES)))
        if self.name.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
            if code:
                raise torch.OutOfMemoryError(f"cannot page-lock {slab.nbytes} bytes of host memory: CUDA error {code}")
            self._page_locked.append(slab)
        return slab

    def synchronize(self, *pending: Future) -> None:
        """Wait for these futures, then for everything queued on the three streams."""
        for future in pending:
            future.result()
        for stream in (self.inbound, self.compute, self.outbound):
            stream.synchronize()


def pages(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros on the host in a mapping of their own: no two slabs share a page, which could be locked only once; pages
    can be huge, and are taken when they are touched."""
    mapped = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=dtype)


def num_update_threads(device: str) -> int:
    """Threads of the host's Adam: beside a GPU two cores are left to launch. Where the cores compute, all of them: one
    that is busy alone makes every other wait for its share of each product."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores - 2) if device.startswith("cuda") else cores


def join_alone(device: str) -> None:
    """Start torch.distributed for a single rank; on sim it passes no messages."""
    if device == "sim":
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
    backend = {"cpu": "gloo", "sim": "cpu:gloo,sim:fake", "cuda": "nccl"}[device]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def require_device(device: str, engine: str) -> None:
    """Raise Unavailable if this process only accounts for the device: an engine needs torch to have it."""
    if device == "sim" and not torch.get_device_module(device).is_available():
        raise Unavailable(f"{engine} does not run on sim without the compiled device: apt-get install g++, and again")
