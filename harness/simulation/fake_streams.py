"""Stand-ins for CUDA's streams and events and for host threads. A method's own code runs on the CPU, and every op is
booked on the stream or thread that would run it on a machine with a GPU.

The stand-ins replace the CPU's entry in STREAMS (harness/devices/streams.py). A TorchDispatchMode sees every op and
books it by CUDA's rules. An op on device memory is queued on the current stream of the calling thread. It starts when
the stream is free and the thread has queued it. The thread continues at once, unless the op returns a number or is a
blocking copy. An op that uses only host memory runs on the thread itself. Work given to a pool runs at once, but is
booked on a thread of the pool; whoever asks for the work's result waits for that thread.

An agent is a stream or a thread. It carries a `now`, whose meaning depends on the clock: a set of events known to have
happened (tests/support/races.py), or a time (virtual_clock.py). If an agent waits, its `now` is joined with the `now`
of the event or agent for which it waits.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.devices import streams as streams_of
from harness.simulation.watched_ops import Memories, Memory, Op, named_attributes, tensors_in

DEVICE = "cpu:0"  # stands for the device in the watched code, where plain "cpu" is the host


class Agent(Protocol):
    """A stream or a host thread, which does its work in order."""

    name: str
    now: Any


class Clock(Protocol):
    """Defines the meaning of an agent's `now`, and how ops change it."""

    zero: Any  # the `now` of every agent at the start

    def join(self, one: Any, other: Any) -> Any:
        """Return the earliest `now` that is at or after both."""

    def load(self, thread: Agent) -> float:
        """Return the load of a pool's thread. The pool gives its next work to the thread with the smallest load."""
        ...

    def queued(self, thread: Agent, op: Op) -> None:
        """Note that the thread queues the op on a stream."""

    def ran(self, agent: Agent, op: Op) -> None:
        """Note that the agent has run the op."""

    def freed(self, agent: Agent, now: Any, memory: Memory) -> None:
        """Note that the memory was freed: from `now` on, the agent may use the memory again."""


@dataclass(eq=False)
class HostThread:
    name: str
    now: Any
    stream: Stream  # the current stream


@dataclass(eq=False)
class Event:
    """Stands for a recorded torch.cuda.Event, or for the future of work given to a pool. The work has already run in
    this process, but the clock may book its end at a later time. `now`: the clock's value at that end."""

    streams: FakeStreams
    now: Any
    value: Any = None  # result of the work

    def synchronize(self) -> Any:
        self.streams.wait(self.streams.thread, self.now)
        return self.value

    result = synchronize


@dataclass(eq=False)
class Stream:
    """Stands for torch.cuda.Stream. Queued work runs only after everything for which the queuing thread had waited."""

    streams: FakeStreams
    name: str
    now: Any

    def reached(self) -> None:
        """Make the stream wait for the calling thread's `now`, because this thread is about to queue work."""
        self.streams.wait(self, self.streams.thread.now)

    def wait_event(self, event: Event) -> None:
        self.reached()
        self.streams.wait(self, event.now)

    def record_event(self) -> Event:
        self.reached()
        return Event(self.streams, self.now)

    def synchronize(self) -> None:
        self.streams.wait(self.streams.thread, self.now)


class Pool:
    """Host threads that do work in the order in which they get it. The thread with the smallest load gets the next
    work."""

    def __init__(self, streams: FakeStreams, name: str, num_threads: int) -> None:
        self.streams = streams
        self.threads = [
            HostThread(f"{name} {i}", streams.clock.zero, streams.compute) for i in range(num_threads)
        ]

    def submit(self, work: Callable[..., Any], *args: Any) -> Event:
        streams, thread = self.streams, min(self.threads, key=self.streams.clock.load)
        streams.wait(thread, streams.thread.now)
        with mock.patch.object(streams, "thread", thread):
            value = work(*args)
        return Event(streams, thread.now, value)

    def update(self, deadline: int, landed: Any, num_chunks: int, work: Callable[[int, int], None]) -> Event:
        """Make an update as harness/devices/update_threads.py does: updates run in the order of the calls, one chunk
        after another."""
        tasks = [self.submit(lambda first=first: work(first, first + 1)) for first in range(num_chunks)]
        return Event(self.streams, functools.reduce(self.streams.clock.join, (task.now for task in tasks)))

    def shutdown(self, *, cancel_futures: bool = False) -> None: ...


class FakeStreams:
    """The CPU's entry in STREAMS while code is watched. It knows the calling thread and every memory."""

    def __init__(self, clock: Clock, num_workers: int = 1) -> None:
        self.clock, self.num_workers, self.taking = clock, num_workers, nullcontext
        self.span: Any = None
        self.compute = Stream(self, "compute", clock.zero)
        self.thread = HostThread("main", clock.zero, self.compute)
        self.memories = Memories(self._freed)
        self._numbers = itertools.count(1)

    def stream(self) -> Stream:
        return Stream(self, f"stream {next(self._numbers)}", self.clock.zero)

    def current(self) -> Stream:
        return self.thread.stream

    def pool(self, num_threads: int) -> Pool:
        return Pool(self, f"pool {next(self._numbers)} thread", num_threads)

    def workers(self, num_threads: int) -> Pool:
        """Make the threads that run updates: as many as watch_streams() was told, not `num_threads`."""
        return self.pool(self.num_workers)

    def use(self, stream: Stream) -> AbstractContextManager:
        return mock.patch.object(self.thread, "stream", stream)

    def wait(self, agent: Agent, now: Any) -> None:
        agent.now = self.clock.join(agent.now, now)

    def book(self, op: Op) -> None:
        """Book the op on the agent that would run it: the calling thread, or the thread's current stream."""
        if not op.accesses:
            return
        if op.is_host:
            self.clock.ran(self.thread, op)
            return
        self.clock.queued(self.thread, op)
        stream = self.current()
        stream.reached()
        self.clock.ran(stream, op)
        if op.blocks:
            stream.synchronize()

    def name(self, owner: Any, prefix: str = "") -> None:
        """Name the memories, streams and threads that an object has as attributes; each gets the name of its attribute,
        with `prefix` before it."""
        for attribute, value in named_attributes(owner):
            for tensor in tensors_in(value):
                memory = self.memories.of(tensor)
                memory.name = memory.name or prefix + attribute
            if isinstance(value, Stream):
                value.name = attribute
            if isinstance(value, Pool):
                for number, thread in enumerate(value.threads):
                    thread.name = f"{attribute} {number}"

    def _freed(self, memory: Memory) -> None:
        if memory.stream is not None:
            self.clock.freed(memory.stream, self.clock.join(memory.stream.now, self.thread.now), memory)


class _Ops(TorchDispatchMode):
    """Runs every op, and then books it."""

    streams: FakeStreams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.streams.book(self.streams.memories.op(func, args, kwargs or {}, result, self.streams.current()))
        return result


class _CopiesHome(TorchFunctionMode):
    """Makes `.to("cpu")` a copy, as it is on a device. On a CPU it would only return its argument."""

    streams: FakeStreams

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, memories = kwargs or {}, self.streams.memories
        is_home = func is Tensor.cpu or (func is Tensor.to and "cpu" in (*args[1:2], kwargs.get("device")))
        if not is_home or memories.of(args[0]).is_host:
            return func(*args, **kwargs)
        with memories.allocating(host=True):
            copy = args[0].clone()
        if not kwargs.get("non_blocking"):
            self.streams.current().synchronize()
        return copy


@contextmanager
def watch_streams(clock: Clock, num_workers: int = 1) -> Iterator[FakeStreams]:
    """Inside the context, replace the streams of DEVICE and the host's threads. `num_workers`: number of threads for
    updates."""
    ops, copies_home = _Ops(), _CopiesHome()
    ops.streams = copies_home.streams = streams = FakeStreams(clock, num_workers)
    with ExitStack() as stack, ops, copies_home:
        _install(streams, stack)
        try:
            yield streams
        finally:
            streams.memories.forget()


def _install(streams: FakeStreams, stack: ExitStack) -> None:
    """Put the streams into STREAMS until the stack is closed. Until then, mark the host memory that is allocated, and
    name objects when they are made."""
    # Import these modules here: tests plant bugs in modules, and then load them anew.
    names = ("layer_state", "disk", "slot", "boundaries")
    state, disk, slot, boundaries = (importlib.import_module(f"methods.streaming.{name}") for name in names)

    def room(device: Any, make: Any, *args: Any, host: bool) -> Tensor:
        slab = make(device, *args, host=host)
        streams.memories.of(slab, made_by="room").is_host = host
        return slab

    named = functools.partial(_naming_constructor, streams)

    def numbered(name: str) -> Any:
        numbers = itertools.count(1)
        return lambda owner: f"{name} {next(numbers)} "

    def is_on_host(device: Any, layer: Any, terms: Any, home: Any, *_: Any) -> bool:
        return home.on_host

    stack.enter_context(mock.patch.dict(streams_of.STREAMS, cpu=streams))
    for cls, name, replacement in (
        (streams_of.Device, "room", room),
        (streams_of.Device, "__init__", named(lambda device: "")),
        (state.LayerState, "__init__", named(lambda layer: layer.prefix, is_on_host)),
        (disk.Shelf, "__init__", named(numbered("shelf"), files_of=lambda shelf: shelf.state)),
        (slot.Slot, "__init__", named(numbered("slot"))),
        (slot.GradientRoom, "__init__", named(numbered("gradients"))),
        (boundaries.BoundarySlot, "__init__", named(numbered("boundaries"))),
        (boundaries.Boundary, "__init__", named(lambda boundary: f"{boundary.layer_name}boundary ")),
    ):
        function = functools.partialmethod(replacement, getattr(cls, name))
        stack.enter_context(mock.patch.object(cls, name, function))


def _naming_constructor(
    streams: FakeStreams,
    prefix_of: Callable[[Any], str],
    is_on_host: Callable[..., bool | None] = lambda *_: None,
    files_of: Callable[[Any], list[Tensor]] = lambda _: [],
) -> Any:
    """Return a replacement for a class's __init__(), which names the memory of the new object. `is_on_host`: returns
    from the arguments of __init__() whether it allocates host memory; None: only if its ops read host memory alone.
    `files_of`: returns the object's files, which count as host memory."""

    def constructed(owner: Any, make: Any, *args: Any, **options: Any) -> None:
        with streams.memories.allocating(host=is_on_host(*args)):
            make(owner, *args, **options)
        for file in files_of(owner):
            streams.memories.of(file).is_host = True
        streams.name(owner, prefix_of(owner))

    return constructed
