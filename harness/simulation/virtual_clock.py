"""Computes how long a method's step takes in virtual time on a machine of given rates, with all overlap that the
method's code allows.

Every op takes time of the agent that runs it. An op on the device takes the time of its FLOPs or of its bytes,
whichever is longer; the thread that calls it needs a further time to launch it. A copy between device and host takes
the time of its bytes over the link, whose two directions do not slow each other. An op on the host takes the time of
its bytes. An agent's `now` is the time at which the agent is free, so waiting means to take the later of two times. The
method's own code gives the schedule, the machine gives the rates; no number here was measured.

If a method has several ranks, only one of them runs here. The other ranks are taken to be like it, so an exchange can
begin when this rank is ready. An exchange takes the time of the bytes that one rank sends over the link between
devices. This link carries one exchange at a time.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from torch.utils.flop_counter import flop_registry

from harness.base.json_object import JsonObject
from harness.core.data import token_batches
from harness.core.job import Room, Workload
from harness.core.method import Method
from harness.devices import exchange
from harness.plan.resources import all_reduce_sent_bytes, gather_sent_bytes
from harness.run.timeline import Span, Timeline, steps, write_timeline
from harness.simulation.fake_streams import DEVICE, Agent, FakeStreams, HostThread, Pool, watch_streams
from harness.simulation.watched_ops import Memory, Op, tensors_in

aten = torch.ops.aten
# Torch has FLOP formulas for CUDA's attention kernels. The CPU's kernels take their arguments in the same order.
CUDA_ATTENTION_OPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
# by name of an AdamW kernel: its argument that holds the parameters
UPDATE_ARGUMENTS = {"_fused_adamw_": "self", "adamw": "grads"}
# By name of a collective that exchanges a tensor between ranks: the function that returns the bytes that a rank sends.
SENT_BYTES_BY_COLLECTIVE = {
    "_allgather_base_": gather_sent_bytes,
    "_reduce_scatter_base_": gather_sent_bytes,
    "allreduce_": all_reduce_sent_bytes,
}
# ops that launch no kernel, and so take no time
ALLOCATION_OPS = {"empty", "empty_like", "new_empty", "empty_strided"}


@dataclass(frozen=True)
class VirtualMachine:
    """The rates of a machine. Work at an infinite rate takes no time."""

    device_flops_per_second: float = math.inf
    device_bytes_per_second: float = math.inf
    link_bytes_per_second: float = math.inf  # in each direction
    link_latency_seconds: float = 0.0
    # rate at which a device sends to other devices, while it receives as much
    exchange_bytes_per_second: float = math.inf
    host_bytes_per_second: float = math.inf  # of one thread
    # rate of AdamW's kernel; the time that follows from this rate is added to the time of the kernel's bytes
    device_update_params_per_second: float = math.inf
    host_update_params_per_second: float = math.inf  # of one thread
    num_workers: int = 1  # number of threads for updates
    launch_seconds: float = 0.0  # time that the calling thread needs to launch an op on the device


@dataclass(frozen=True)
class VirtualRun:
    """A training in virtual time; all times are in seconds from its start."""

    step_ends: list[float]  # for each step, the time at which the step's compute ends
    total_seconds: float  # the time at which all work is done
    busy_seconds: dict[str, float]  # by agent, the seconds of its work
    device_flops: float
    spans: list[Span]

    @property
    def step_seconds(self) -> float:
        """Return the mean duration of a step. The first step is left out, because it starts on an idle machine."""
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)

    @property
    def last_step_seconds(self) -> float:
        """Return the duration of the last step, which gains most from work that earlier steps did in advance."""
        return self.step_ends[-1] - self.step_ends[-2]

    def timeline(self, about: JsonObject) -> Timeline:
        return Timeline(self.spans, steps([0.0, *self.step_ends], 1), {**about, "clock": "virtual"})

    def write(self, about: JsonObject, path: Path) -> None:
        """Write the timeline to a file, in the format in which the trace of a run is written."""
        write_timeline(self.timeline(about), path)


class VirtualTime:
    """The clock for which an agent's `now` is the time, in seconds, at which the agent is free."""

    zero = 0.0

    def __init__(self, machine: VirtualMachine, num_ranks: int = 1) -> None:
        self.machine, self.num_ranks, self.link = machine, num_ranks, DeviceLink()
        self.busy_seconds: defaultdict[str, float] = defaultdict(float)
        self.device_flops = 0.0

    def join(self, one: float, other: float) -> float:
        return max(one, other)

    def load(self, thread: Agent) -> float:
        return thread.now

    def queued(self, thread: Agent, op: Op) -> None:
        self._work(thread, op, self.machine.launch_seconds)

    def ran(self, agent: Agent, op: Op) -> None:
        if op.name in SENT_BYTES_BY_COLLECTIVE:
            seconds = self._exchange_seconds(op)
            agent.now = self.link.carry(agent.now, seconds)
            self.busy_seconds["link between devices"] += seconds
        else:
            self._work(agent, op, self._seconds(op))

    def freed(self, agent: Agent, now: float, memory: Memory) -> None: ...

    def _work(self, agent: Agent, op: Op, seconds: float) -> None:
        if op.name not in ALLOCATION_OPS:
            agent.now += seconds
            self.busy_seconds[agent.name] += seconds

    def _exchange_seconds(self, op: Op) -> float:
        tensor_bytes = max(access.num_bytes for access in op.accesses)
        return (
            SENT_BYTES_BY_COLLECTIVE[op.name](tensor_bytes, self.num_ranks)
            / self.machine.exchange_bytes_per_second
        )

    def _seconds(self, op: Op) -> float:
        machine = self.machine
        if op.is_transfer:
            sent_bytes = sum(access.num_bytes for access in op.accesses if access.is_write)
            return machine.link_latency_seconds + sent_bytes / machine.link_bytes_per_second
        touched_bytes = sum(access.num_bytes for access in op.accesses)
        if op.is_host:
            update_seconds = updated_params(op) / machine.host_update_params_per_second
            return touched_bytes / machine.host_bytes_per_second + update_seconds
        flops = flops_of(op)
        self.device_flops += flops
        seconds = max(
            flops / machine.device_flops_per_second, touched_bytes / machine.device_bytes_per_second
        )
        return seconds + updated_params(op) / machine.device_update_params_per_second


class DeviceLink:
    """The link between devices. It carries each exchange in the first gap that is long enough. Exchanges are added in
    the order of the program; an exchange that is added later may be ready earlier."""

    def __init__(self) -> None:
        # pairs of start and end of the exchanges, in the order of time
        self.busy_spans: list[tuple[float, float]] = []

    def carry(self, ready: float, seconds: float) -> float:
        """Add an exchange that may begin at the time `ready` and takes `seconds`. Return the time at which it ends."""
        start = ready
        for busy_start, busy_end in self.busy_spans:
            if start + seconds <= busy_start:
                break
            start = max(start, busy_end)
        bisect.insort(self.busy_spans, (start, start + seconds))
        return start + seconds


def updated_params(op: Op) -> int:
    """Return the number of parameters that an op updates: 0 unless the op is an AdamW kernel, of this project or of
    torch."""
    if op.name not in UPDATE_ARGUMENTS:
        return 0
    return sum(tensor.numel() for tensor in tensors_in(op.arguments[UPDATE_ARGUMENTS[op.name]]))


def flops_of(op: Op) -> float:
    """Return the floating-point operations of a matrix product or of attention, which takes half as many if it is
    causal; 0 for any other op."""
    packet = op.func.overloadpacket
    formula = flop_registry.get(CUDA_ATTENTION_OPS.get(packet, packet))
    if formula is None:
        return 0.0
    flops: float = formula(*tensors_in(list(op.arguments.values())), out_val=op.result)
    return flops / 2 if op.arguments.get("is_causal") else flops


class AgentSpans:
    """The spans of the agents' work, in virtual seconds. Work that takes no time has no span."""

    def __init__(self, streams: FakeStreams) -> None:
        self.streams, self.done = streams, list[Span]()

    @contextmanager
    def span(self, stream: Any, track: str, work: str, of: str) -> Iterator[None]:
        agent = stream or self.streams.thread
        if stream:
            stream.reached()
        start = agent.now
        yield
        self.add(Span(track, work, of.rstrip("."), start, agent.now))

    def add(self, span: Span) -> None:
        if span.end > span.start:
            self.done.append(span)


class DueUpdate:
    """An update that waits for its gradient, or is under way. `released`: time at which its gradient has arrived.
    `seconds`: time that the update needs. `labels`: spans whose track, work and part of the model the update's own
    spans get."""

    def __init__(
        self, pool: VirtualWorkers, deadline: int, released: float, seconds: float, labels: list[Span]
    ) -> None:
        self.pool, self.deadline, self.released = pool, deadline, released
        self.seconds_left, self.labels = seconds, labels
        self.end = math.inf

    def result(self) -> None:
        self.pool.work_until(self)
        self.pool.streams.wait(self.pool.streams.thread, self.end)


class VirtualWorkers(Pool):
    """Stands for Workers of harness/devices/update_threads.py. All threads work together on one update, the one with
    the earliest deadline among the updates whose gradients have arrived. The order is computed only when somebody waits
    for an update."""

    def __init__(self, streams: FakeStreams, clock: VirtualTime, num_threads: int, spans: AgentSpans) -> None:
        super().__init__(streams, "workers", num_threads)
        self.clock, self.now, self.spans = clock, 0.0, spans
        self.waiting: list[DueUpdate] = []

    def update(self, deadline: int, landed: Any, num_chunks: int, work: Callable[[int, int], None]) -> Any:
        streams, busy = self.streams, self.clock.busy_seconds
        # apart from self.spans, because the work has its time only in work_until()
        work_spans = AgentSpans(self.streams)
        thread, before = HostThread("workers", streams.thread.now, streams.compute), busy["workers"]
        with mock.patch.multiple(streams, thread=thread, span=work_spans.span):
            work(0, num_chunks)
        seconds = busy["workers"] - before
        self.waiting.append(
            DueUpdate(self, deadline, thread.now - seconds, seconds / len(self.threads), work_spans.done[:1])
        )
        return self.waiting[-1]

    def work_until(self, wanted: DueUpdate) -> None:
        while wanted in self.waiting:
            ready_updates = [update for update in self.waiting if update.released <= self.now]
            if not ready_updates:
                self.now = min(update.released for update in self.waiting)
                continue
            most_urgent = min(ready_updates, key=lambda update: update.deadline)
            waits = [update.released - self.now for update in self.waiting if update.released > self.now]
            seconds = min(most_urgent.seconds_left, *waits) if waits else most_urgent.seconds_left
            for label in most_urgent.labels:
                self.spans.add(label._replace(start=self.now, end=self.now + seconds))
            self.now += seconds
            most_urgent.seconds_left -= seconds
            if most_urgent.seconds_left <= 1e-9 * self.now:
                most_urgent.end = self.now
                self.waiting.remove(most_urgent)


@contextmanager
def first_rank_of(num_ranks: int) -> Iterator[None]:
    """Let this process be the first of `num_ranks` ranks. The other ranks do not exist, so collectives move no data."""
    if num_ranks == 1:
        yield
        return
    store = fake_pg.FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=num_ranks)
    try:
        with mock.patch.object(exchange, "join_others", lambda device: None):
            yield
    finally:
        dist.destroy_process_group()


def virtual_run(method: Method, workload: Workload, machine: VirtualMachine, steps: int = 3) -> VirtualRun:
    """Train `steps` steps in the virtual time of this machine. If the method has several ranks, only one of them
    trains."""
    training = method.settled(method.plan(workload, Room())).train(
        workload, token_batches(workload, steps), DEVICE
    )
    num_ranks = getattr(method, "world_size", 1)
    clock = VirtualTime(machine, num_ranks)
    with first_rank_of(num_ranks), watch_streams(clock, machine.num_workers) as streams:
        spans = AgentSpans(streams)
        streams.span = spans.span
        workers = VirtualWorkers(streams, clock, machine.num_workers, spans)
        streams.workers = lambda num_threads: workers  # type: ignore[method-assign]
        step_ends = [streams.compute.now for _ in training]
        streams.compute.synchronize()
        return VirtualRun(
            step_ends, streams.thread.now, dict(clock.busy_seconds), clock.device_flops, spans.done
        )
