"""Who runs next, and where: a rule gives each free device a waiting model's unit, and tells it what will come next.

One device may be this process; several are processes, which share the slabs at home. What is told to come next is a
hint and binds nobody: a free device takes the waiting model that the rule prefers, so the schedule stays a list
schedule with Graham's bound, and a hint that was wrong costs a copy.
"""

from __future__ import annotations

import math
import pickle
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch.multiprocessing

from harness.method import Step
from methods._scheduler import key_of, lower_bound
from methods._turns import Task
from methods._units import FORWARD, Result, Unit
from methods._worker import Worker


class Turned(NamedTuple):
    """One unit as it ran: seconds since the first began."""

    model: int
    shard: int
    kind: str
    device: int
    start: float
    end: float


class Here:
    """The device of this process. `waits`: a unit is done when start() returns, not only queued. `catches`: reply() is
    the traceback of one that failed; else that is raised."""

    connection = None

    def __init__(self, worker: Worker, *, waits: bool = True, catches: bool = False) -> None:
        self.worker, self.waits, self.catches = worker, waits, catches

    def start(self, unit: Unit, following: Unit | None) -> None:
        started = time.perf_counter()
        if self.catches:
            left: Result | str = run_unit(self.worker, unit, following)
        else:
            left = self.worker.run(unit, following)
            left = self.worker.finished(left) if self.waits else left
        self.done = left, time.perf_counter() - started

    def reply(self) -> tuple[Result | str, float]:
        return self.done


class Elsewhere:
    """A device in a process of its own. `make_worker` makes its worker there, from `given`."""

    def __init__(self, make_worker: Callable[..., Any], *given: Any) -> None:
        # New processes are forked from one that has imported all that they will and started no thread.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([make_worker.__module__, "torch._dynamo"])
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, make_worker, *given), daemon=True)
        self.process.start()
        other.close()

    def ready(self) -> None:
        """Wait until it has made its worker. Raises RuntimeError with the traceback where it could not."""
        text, _ = self.reply()
        if text:
            raise RuntimeError(text)

    def start(self, unit: Unit, following: Unit | None) -> None:
        # By value: boundaries are small beside weights, which are shared.
        self.connection.send_bytes(pickle.dumps((unit, following)))

    def reply(self) -> tuple[Result | str, float]:
        """What the unit left, or its traceback; and its seconds. Raises EOFError where the process has died."""
        return pickle.loads(self.connection.recv_bytes())

    def close(self) -> None:
        self.connection.close()
        self.process.join()


def serve(connection: Any, make_worker: Callable[..., Any], *given: Any) -> None:
    """The process of a device: unit after unit, until nobody sends any."""
    torch.set_num_threads(1)
    try:
        worker = make_worker(*given)
    except Exception:
        connection.send_bytes(pickle.dumps((traceback.format_exc(), 0.0)))
        return
    connection.send_bytes(pickle.dumps(("", 0.0)))
    while True:
        try:
            unit, following = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        started = time.perf_counter()
        left = run_unit(worker, unit, following)
        connection.send_bytes(pickle.dumps((left, time.perf_counter() - started)))


def run_unit(worker: Any, unit: Unit, following: Unit | None) -> Result | str:
    """A unit to its end: what it left, or its traceback."""
    try:
        return worker.finished(worker.run(unit, following))
    except Exception:
        worker.forget(unit)
        return traceback.format_exc()


class Dispatcher:
    """Tasks, devices, a rule; and what has run."""

    def __init__(
        self, tasks: Sequence[Task], devices: Sequence[Any], policy: str = "lrtf", *, most_ahead: float = math.inf,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.tasks, self.devices, self.key = tasks, list(devices), key_of(policy)
        self.most_ahead = most_ahead  # rounds that a model may have finished before the slowest one has
        self.held: list[Task] = []  # those that have stepped, and have not been asked for their next minibatch
        self.numbers = {device: number for number, device in enumerate(devices)}
        self.draw, self.arrivals = random.Random(seed).random, count()
        self.waiting: dict[Task, tuple[int, float]] = {}
        self.running: dict[Any, tuple[Task, float]] = {}
        self.hints: dict[Any, Task] = {}
        self.timeline: list[Turned] = []

    def run(self) -> Iterator[tuple[Task, Step]]:
        """Every task to its end; yields each step as its last unit is done. A unit that fails elsewhere ends its task
        alone, one that fails here is raised."""
        idle, self.began = list(self.devices), time.perf_counter()
        for task in self.tasks:
            task.start()
            self._wait(task)
        while self.waiting or self.running:
            for device in list(idle):
                if self._start(device):
                    idle.remove(device)
            if not self.running:
                for task in list(self.waiting):
                    task.fail("no device is left to run it")
                return
            for device in self._ready():
                task, started = self.running.pop(device)
                step = self._take(device, task, started)
                if device in self.devices:
                    idle.append(device)
                if step is None:
                    self._wait(task)
                    continue
                self.held.append(task)
                yield task, step
            self._release()

    @property
    def rounds(self) -> int:
        """That every model has finished which has not failed."""
        return min((task.rounds for task in self.tasks if not task.failure), default=0)

    def _release(self) -> None:
        """Let those go on that are not too far ahead. Of data that all share, nobody asks for more than there is until
        all have had it: its end is the training's."""
        slowest = self.rounds
        for task in list(self.held):
            may_ask = task.batches_left > 0 or math.isinf(self.most_ahead)
            if task.rounds - slowest <= (self.most_ahead if may_ask else 0):
                self.held.remove(task)
                task.start()
                self._wait(task)

    def _wait(self, task: Task) -> None:
        if task.next_unit is not None:
            self.waiting[task] = (next(self.arrivals), self.draw())

    def _first(self, device: Any, shunned: Sequence[Task] = ()) -> Task | None:
        fit = [task for task in self.waiting if task.device in (None, device) and task not in shunned]
        return min(fit, default=None, key=lambda t: (self.key(t.remaining, *self.waiting[t]), self.waiting[t]))

    def _start(self, device: Any) -> bool:
        task = self._first(device)
        if task is None:
            return False
        unit = task.next_unit
        assert unit is not None
        del self.waiting[task]
        self.hints.pop(device, None)
        other = self._first(device, [*self.hints.values()])
        following = task.following()
        if other is not None:
            following, self.hints[device] = other.hint(), other
        if unit.kind == FORWARD and task.keeps_graphs:
            task.device = device
        self.running[device] = (task, time.perf_counter() - self.began)
        device.start(unit, following)
        return True

    def _ready(self) -> list[Any]:
        here = [device for device in self.running if device.connection is None]
        if here:
            return here
        connections = {device.connection: device for device in self.running}
        return [connections[connection] for connection in wait(list(connections))]  # type: ignore[index]

    def _take(self, device: Any, task: Task, started: float) -> Step | None:
        unit = task.next_unit
        assert unit is not None
        try:
            left, seconds = device.reply()
        except (EOFError, OSError):
            self.devices.remove(device)
            device.close()
            left, seconds = f"the process of its device ended with code {device.process.exitcode}", 0.0
        now = time.perf_counter() - self.began
        self.timeline.append(Turned(task.model, unit.shard, unit.kind, self.numbers[device], started, now))
        if isinstance(left, str):
            task.fail(left)
            return None
        return task.advance(left, seconds)

    def summary(self) -> dict[str, float]:
        """Makespan, the bound below which no schedule of these units can be, their ratio, and the devices' use; nothing
        of a single model, or where units were only queued."""
        if len({turned.model for turned in self.timeline}) < 2:
            return {}
        chains: dict[int, list[float]] = {}
        for turned in self.timeline:
            chains.setdefault(turned.model, []).append(turned.end - turned.start)
        makespan, num_devices = max(turned.end for turned in self.timeline), len(self.numbers)
        bound = lower_bound(list(chains.values()), num_devices)
        busy = sum(map(sum, chains.values()))
        return {
            "makespan_seconds": makespan,
            "lower_bound_seconds": bound,
            "ratio": makespan / bound,
            "utilization": busy / (num_devices * makespan),
        }

    def shares(self) -> list[float]:
        """Of the time of all devices until now what each model has had."""
        spent = [0.0] * len(self.tasks)
        for turned in self.timeline:
            spent[turned.model] += turned.end - turned.start
        end = max((turned.end for turned in self.timeline), default=0.0)
        return [seconds / (len(self.numbers) * end) if end else 0.0 for seconds in spent]
