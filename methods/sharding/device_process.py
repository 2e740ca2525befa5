"""Where units run: in this process, or in one of a device's own, which shares the slabs at home."""

from __future__ import annotations

import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.multiprocessing

from harness.devices.streams import Device
from methods.sharding.device_worker import Worker
from methods.sharding.halve import split
from methods.sharding.shard import Shard
from methods.sharding.unit import Result, Unit

HOST = re.compile("sim (host|pinned)")  # what the simulated device's allocators say when it was not the device's memory


class Failure(NamedTuple):
    """How a unit ended: its traceback, and whether it ran out of the device's memory."""

    text: str
    is_memory: bool = False


class Here:
    """The device of this process. `waits`: a unit is done when start() returns, not only queued. `catches`: reply() is
    the failure of one that failed; else that is raised, but for want of the device's memory."""

    connection = None

    def __init__(self, worker: Worker, *, waits: bool = True, catches: bool = False) -> None:
        self.worker, self.waits, self.catches = worker, waits, catches
        self.told = 0

    @property
    def moved_bytes(self) -> int:
        return self.worker.device.moved_bytes

    def start(self, unit: Unit, following: Unit | None, splits: Sequence[tuple[int, int]]) -> None:
        started = time.perf_counter()
        self.done = run_unit(self.worker, unit, following, self.waits, self.catches), time.perf_counter() - started

    def reply(self) -> tuple[Result | Failure, float]:
        return self.done


class Elsewhere:
    """A device in a process of its own. `make_worker` makes its worker there, from `given`. On a CPU sums over another
    number of threads round otherwise: what is compared to the last bit needs as many as whom it is compared with."""

    def __init__(self, make_worker: Callable[..., Any], *given: Any, num_threads: int = 1) -> None:
        # New processes are forked from one that has imported all that they will and started no thread.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([make_worker.__module__, "torch._dynamo"])
        if num_threads > 1:  # threads of one process that wait must not keep another's from a core
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, num_threads, make_worker, *given), daemon=True)
        self.process.start()
        other.close()
        self.told = 0  # how many halvings of shards it knows of
        self.moved_bytes = 0

    def ready(self) -> None:
        """Wait until it has made its worker. Raises RuntimeError with the traceback where it could not."""
        failure, _ = self.reply()
        if failure is not None:
            raise RuntimeError(failure.text)

    def start(self, unit: Unit, following: Unit | None, splits: Sequence[tuple[int, int]]) -> None:
        # By value: boundaries are small beside weights, which are shared.
        self.connection.send_bytes(pickle.dumps((unit, following, splits)))

    def reply(self) -> Any:
        """What the unit left, or its failure; and its seconds. Raises EOFError where the process has died."""
        left, seconds, self.moved_bytes = pickle.loads(self.connection.recv_bytes())
        return left, seconds

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def serve(connection: Any, num_threads: int, make_worker: Callable[..., Any], *given: Any) -> None:
    """The process of a device: unit after unit, until nobody sends any."""
    torch.set_num_threads(num_threads)
    try:
        worker = make_worker(*given)
    except Exception:
        connection.send_bytes(pickle.dumps((Failure(traceback.format_exc()), 0.0, 0)))
        return
    connection.send_bytes(pickle.dumps((None, 0.0, 0)))
    while True:
        try:
            unit, following, splits = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        started = time.perf_counter()
        for model, index in splits:  # as they were made where the schedule is, in the same order
            split(worker.models[model], index)
        left = run_unit(worker, unit, following)
        connection.send_bytes(pickle.dumps((left, time.perf_counter() - started, worker.device.moved_bytes)))


def run_unit(
    worker: Any, unit: Unit, following: Unit | None, waits: bool = True, catches: bool = True
) -> Result | Failure:
    """A unit to its end: what it left, or how it failed."""
    try:
        left = worker.run(unit, following)
        return worker.finished(left) if waits else left
    except Exception as error:
        is_memory = isinstance(error, torch.OutOfMemoryError) and not HOST.match(str(error))
        if not (catches or is_memory):
            raise
        worker.forget(unit)
        return Failure(traceback.format_exc(), is_memory)


def make_worker(name: str, models: list[list[Shard]], options: dict[str, Any]) -> Worker:
    """In the process of a device: its worker, by its name for torch."""
    return Worker(Device(name), models, **options)
