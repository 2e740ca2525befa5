"""Devices that run units: either one device in this process, or several devices, each in a process of its own. The
processes share the models' slabs in host memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch.multiprocessing  # lets connections send tensors in shared memory

from harness.base import fork_server
from harness.base.child_process import child_environment
from harness.core.cpu_cores import use_cores
from harness.devices import cuda_budget
from harness.devices.budgets import cap_allocator, device_peaks
from harness.devices.streams import Device
from methods.sharding.device_worker import Worker, WorkerOptions
from methods.sharding.shard import Shard, split_shard
from methods.sharding.unit import Result, Unit

# matches the message of an error that says that the simulated host memory ran out
HOST_MEMORY_ERROR = re.compile("sim (host|pinned)")


class UnitFailure(NamedTuple):
    """A unit's failure. `text`: the traceback; `lacks_memory`: the unit ran out of the device's memory."""

    text: str
    lacks_memory: bool = False


class LocalDevice:
    """The device of this process. `is_alone`: True if the device trains a single model. In this case units are queued
    without waiting for the device, and a unit's failure is raised, unless device memory ran out."""

    connection = None
    num_known_splits = 0
    peaks: dict[str, int] = {}  # noqa: RUF012 always empty, because the harness itself reads this process's peaks

    def __init__(self, worker: Worker, *, is_alone: bool = False) -> None:
        self.worker, self.is_alone = worker, is_alone

    @property
    def moved_bytes(self) -> int:
        return self.worker.device.moved_bytes

    def start(self, unit: Unit, next_unit: Unit | None, splits: Sequence[tuple[int, int]]) -> None:
        start_seconds = time.perf_counter()
        outcome = run_unit(self.worker, unit, next_unit, self.is_alone)
        self.last_reply = outcome, time.perf_counter() - start_seconds

    def reply(self) -> tuple[Result | UnitFailure, float]:
        return self.last_reply


class CallProcess:
    """A process of its own, which runs entry(connection, *arguments) and ends when entry() returns. `module_name`:
    name of a module that the call needs; the module is imported once for all such processes. Raises TypeError if an
    argument cannot be sent."""

    def __init__(self, module_name: str, entry: Callable[..., None], *arguments: Any) -> None:
        try:
            # Pickle the call before the process starts, because pickling may fail.
            call_bytes = ForkingPickler.dumps((entry, arguments))
        except (AttributeError, pickle.PicklingError) as error:
            raise TypeError(f"expected what another process can be sent, got: {error}") from error
        # `preparation` has the key to shared memory, and what the process needs to find the classes of the caller's
        # script.
        preparation = spawn.get_preparation_data("device")
        own_socket, child_socket = socket.socketpair()
        with child_socket:
            preload_names = (module_name, "torch._dynamo")
            self.process = fork_server.start(
                __name__, (1, 2), child_environment(), [child_socket.fileno()], preload_names
            )
            print(child_socket.fileno(), file=self.process.stdin, flush=True)
        self.connection = Connection(own_socket.detach())
        self.connection.send(preparation | {"authkey": bytes(preparation["authkey"])})
        self.connection.send_bytes(call_bytes)

    def close(self) -> None:
        self.connection.close()
        self.process.wait()


class ProcessDevice(CallProcess):
    """A device in a process of its own. The process makes its worker by make_worker(*arguments). `num_threads`: the
    number of torch's threads in the process. On a CPU this number changes the rounding of sums, so runs that are
    compared bit by bit need the same number."""

    def __init__(self, make_worker: Callable[..., Any], *arguments: Any, num_threads: int = 1) -> None:
        if num_threads > 1:
            # A process's idle threads must sleep, so that they leave the cores to other processes.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        super().__init__(make_worker.__module__, serve, num_threads, make_worker, *arguments)
        self.num_known_splits = 0  # number of halved shards that the process knows of
        self.moved_bytes, self.peaks = 0, dict[str, int]()  # the process's values at its last reply

    def ready(self) -> None:
        """Wait until the process has made its worker. Raises RuntimeError with the traceback if making the worker
        failed."""
        failure, _ = self.reply()
        if failure:
            raise RuntimeError(failure.text)

    def start(self, unit: Unit, next_unit: Unit | None, splits: Sequence[tuple[int, int]]) -> None:
        # A unit is sent by value, because its tensors are small; the large weights are in shared memory.
        self.connection.send_bytes(pickle.dumps((unit, next_unit, splits)))

    def reply(self) -> Any:
        """Wait until the unit has ended; return the unit's result or failure, and the seconds that it took. Raises
        EOFError if the process has died."""
        outcome, seconds, self.moved_bytes, self.peaks = pickle.loads(self.connection.recv_bytes())
        return outcome, seconds


def start_processes(
    names: Sequence[str],
    models: list[list[Shard]],
    options: WorkerOptions,
    stack: ExitStack,
    num_threads: int = 1,
) -> list[Any]:
    """Start a process with a worker for each device in `names`, which are torch's names. The processes end when the
    stack is closed. A process may take `options.device_memory` bytes of its device or, if that is None, as much as
    memory_shares() returns.
    """
    devices = [
        ProcessDevice(make_worker, name, models, options, share, num_threads=num_threads)
        for name, share in zip(names, memory_shares(names), strict=True)
    ]
    for device in devices:
        stack.callback(device.close)
    for device in devices:
        device.ready()
    return devices


def memory_shares(names: Sequence[str]) -> list[float]:
    """Return, for each device, the share of the device's memory that the device's process may take, at most 1.0.

    The share equals the share that this process may take; on this process's own GPU the memory that this process needs
    is subtracted. If this process has no CUDA context, return 1.0 for each device: asking torch would make a context.
    """
    if not (names[0].startswith("cuda") and torch.cuda.is_initialized()):
        return [1.0] * len(names)
    default_share, current = torch.cuda.get_per_process_memory_fraction(), torch.cuda.current_device()
    leading_share = max(
        0.0,
        default_share - cuda_budget.LEADING_BYTES / torch.cuda.get_device_properties(current).total_memory,
    )
    return [leading_share if torch.device(name).index in (None, current) else default_share for name in names]


def make_worker(
    name: str,
    models: list[list[Shard]],
    options: WorkerOptions,
    share: float,
) -> Worker:
    device = Device(name)
    if device.name.type == "cuda":
        if options.device_memory is None:
            torch.cuda.set_per_process_memory_fraction(share)
        else:
            cap_allocator(options.device_memory, cuda_budget.context_bytes(), device.name.index)
    lock_slabs(device, models)
    return Worker(device, models, options)


def lock_slabs(device: Device, models: list[list[Shard]]) -> None:
    """Page-lock the models' slabs in host memory, which processes share, so that a GPU's copies run while this process
    goes on."""
    if device.name.type != "cuda":
        return
    storages = (
        slab.untyped_storage() for shards in models for shard in shards for slab in shard.slabs.values()
    )
    for storage in {storage.data_ptr(): storage for storage in storages}.values():
        # Lock each storage only once, because slabs share storages.
        device.page_lock(storage)


def largest_peaks(devices: Sequence[LocalDevice | ProcessDevice]) -> dict[str, int]:
    """Return, for each kind of memory peak, the largest bytes among the devices in processes of their own. No
    LocalDevice has peaks to add."""
    names = {name for device in devices for name in device.peaks}
    return {name: max(device.peaks.get(name, 0) for device in devices) for name in names}


def main() -> None:
    """Entry point of a Process, which reads the file descriptor of its connection from standard input."""
    connection, this_process = Connection(int(sys.stdin.readline())), multiprocessing.current_process()
    # Without this flag, a script without a main guard would run again.
    this_process._inheriting = True  # type: ignore[attr-defined]
    spawn.prepare(connection.recv())
    del this_process._inheriting  # type: ignore[attr-defined]
    entry, arguments = connection.recv()
    entry(connection, *arguments)


def serve(connection: Any, num_threads: int, make_worker: Callable[..., Any], *arguments: Any) -> None:
    """Make a worker by make_worker(*arguments) and run the units that come over the connection, until the connection is
    closed."""

    def reply(
        outcome: Any, seconds: float = 0.0, moved_bytes: int = 0, peaks: dict[str, int] | None = None
    ) -> None:
        connection.send_bytes(pickle.dumps((outcome, seconds, moved_bytes, peaks or {})))

    use_cores(num_threads)
    try:
        worker = make_worker(*arguments)
    except Exception:
        return reply(UnitFailure(traceback.format_exc()))
    reply(None)
    with suppress(EOFError):
        while True:
            unit, next_unit, splits = pickle.loads(connection.recv_bytes())
            start_seconds = time.perf_counter()
            for model, index in splits:  # halve the shards that the dispatcher has halved, in the same order
                split_shard(worker.models[model], index)
            outcome = run_unit(worker, unit, next_unit)
            seconds, device = time.perf_counter() - start_seconds, worker.device
            reply(outcome, seconds, device.moved_bytes, device_peaks(device.name.type))


def run_unit(worker: Any, unit: Unit, next_unit: Unit | None, is_alone: bool = False) -> Result | UnitFailure:
    """Run a unit and return its result, or its failure. `is_alone`: True: do not wait for the device, and raise
    failures other than a lack of device memory."""
    try:
        outcome = worker.run(unit, next_unit)
        return outcome if is_alone else worker.finish(outcome)
    except Exception as error:
        lacks_memory = isinstance(error, torch.OutOfMemoryError) and not HOST_MEMORY_ERROR.match(str(error))
        if is_alone and not lacks_memory:
            raise
        worker.forget(unit)
        return UnitFailure(traceback.format_exc(), lacks_memory)
