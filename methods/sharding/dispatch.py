"""The dispatcher gives each free device the next unit of the waiting model that the policy picks, and a hint: the
unit that the device will probably run after this one.

A single device runs in this process; several devices run in processes that share the models' slabs in host memory. A
hint only makes the device prefetch: when the device is free, it still takes the waiting model that the policy picks
then. So the schedule is a list schedule, for which Graham's bound holds, and a wrong hint costs one useless copy.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import count
from multiprocessing.connection import wait
from typing import Any, NamedTuple

from harness.core.method import Step
from methods.sharding.device_process import UnitFailure
from methods.sharding.scheduler import lower_bound, policy_key, simulate_policy
from methods.sharding.task import Task
from methods.sharding.unit import FORWARD, Unit


class TimelineUnit(NamedTuple):
    """A unit that has run. `start` and `end`: seconds since the run began."""

    model: int
    shard: int
    kind: str
    device: int
    start: float
    end: float


class Dispatcher:
    """Runs tasks on devices by a policy, and keeps a timeline of all units.

    `most_ahead`: rounds that a model may be ahead of the slowest model. `splits`: shards that are halved already, as
    pairs of model and index of the shard.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        devices: Sequence[Any],
        policy: str = "lrtf",
        *,
        most_ahead: float = math.inf,
        splits: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.tasks = [*tasks, *(task.other_half for task in tasks if task.other_half)]
        self.devices, self.policy, self.priority_key = list(devices), policy, policy_key(policy)
        self.most_ahead = most_ahead
        # tasks that have ended a minibatch and not yet started the next one
        self.between_batches: list[Task] = []
        self.device_numbers = {device: number for number, device in enumerate(devices)}
        self.draw_number, self.arrival_numbers = random.Random(0).random, count()
        self.waiting_tasks: dict[Task, tuple[int, float]] = {}
        self.running_units: dict[Any, tuple[Task, Unit, float]] = {}
        self.hinted_tasks: dict[Any, Task] = {}
        self.timeline: list[TimelineUnit] = []
        self.chains: dict[Task, list[float]] = {}  # seconds of the units that each task has run, in order
        self.room_bytes = math.inf  # most bytes that a shard may take in a slot; larger shards are halved
        self.splits = list(splits)

    def run(self) -> Iterator[tuple[Task, Step]]:
        """Run every task to its end; yield a task's step when the step's last unit is done. A failed unit ends only its
        own task. On a device with is_alone, a failure other than a lack of device memory is raised."""
        idle_devices, self.between_batches = list(self.devices), list(self.tasks)
        self.start_seconds = time.perf_counter()
        while True:
            self._start_minibatches()
            idle_devices = [device for device in idle_devices if not self._start(device)]
            if not self.running_units:
                for task in self.waiting_tasks:
                    task.fail("no device is left to run this model")
                return
            for device in self._ready_devices():
                task, unit, unit_start = self.running_units.pop(device)
                step = self._take_reply(device, task, unit, unit_start)
                if device in self.devices:
                    idle_devices.append(device)
                if step is not None:
                    self.between_batches.append(task)
                    yield task, step

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds that every model has finished. Models that failed are left out."""
        return min((task.num_rounds for task in self.tasks if not task.failure), default=0)

    def _start_minibatches(self) -> None:
        """Start the next minibatch of every held task that is not too far ahead of the slowest task. Then make every
        task with a unit to run wait for a device.

        A task that has trained on all its batches asks for one more batch only when no other model is behind: the tasks
        share their data, and the training ends when the data ends.
        """
        slowest = self.num_rounds
        for task in list(self.between_batches):
            may_ask = task.batches_left > 0 or math.isinf(self.most_ahead)
            if task.num_rounds - slowest <= (self.most_ahead if may_ask else 0):
                self.between_batches.remove(task)
                task.start()
        running_tasks = [task for task, *_ in self.running_units.values()]
        for task in self.tasks:
            if task.failure:
                self.waiting_tasks.pop(task, None)
            elif task.next_unit is not None and task not in self.waiting_tasks and task not in running_tasks:
                self.waiting_tasks[task] = (next(self.arrival_numbers), self.draw_number())

    def _best_waiting(self, device: Any, hinted_tasks: Sequence[Task] = ()) -> Task | None:
        candidates = [
            task for task in self.waiting_tasks if task.device in (None, device) and task not in hinted_tasks
        ]

        def priority(task: Task) -> tuple[float, tuple[int, float]]:
            arrival_and_draw = self.waiting_tasks[task]
            return self.priority_key(task.remaining_seconds, *arrival_and_draw), arrival_and_draw

        return min(candidates, default=None, key=priority)

    def _start(self, device: Any) -> bool:
        task = self._best_waiting(device)
        if task is None:
            return False
        unit = task.next_unit
        assert unit is not None
        del self.waiting_tasks[task]
        self.hinted_tasks.pop(device, None)
        next_task = self._best_waiting(device, [*self.hinted_tasks.values()])
        next_unit = task.hinted_unit(ahead=1)
        if next_task is not None:
            next_unit, self.hinted_tasks[device] = next_task.hinted_unit(), next_task
        if unit.kind == FORWARD and task.keeps_graphs:
            task.device = device
        self.running_units[device] = (task, unit, time.perf_counter() - self.start_seconds)
        device.start(unit, next_unit, self.splits[device.num_known_splits :])
        device.num_known_splits = len(self.splits)
        return True

    def _ready_devices(self) -> list[Any]:
        local_devices = [device for device in self.running_units if device.connection is None]
        if local_devices:
            return local_devices
        device_of_connection = {device.connection: device for device in self.running_units}
        return [device_of_connection[connection] for connection in wait(list(device_of_connection))]  # type: ignore[index]

    def _take_reply(self, device: Any, task: Task, unit: Unit, unit_start: float) -> Step | None:
        try:
            outcome, seconds = device.reply()
        except (EOFError, OSError):
            self.devices.remove(device)
            device.close()
            code = device.process.wait()
            outcome, seconds = UnitFailure(f"the process of its device ended with code {code}"), 0.0
        now = time.perf_counter() - self.start_seconds
        self.timeline.append(
            TimelineUnit(task.model, unit.shard, unit.kind, self.device_numbers[device], unit_start, now)
        )
        if task.failure:  # the twin, which trains the other half, has failed while this unit ran
            return None
        self.chains.setdefault(task, []).append(now - unit_start)
        if not isinstance(outcome, UnitFailure):
            step = task.advance(outcome, seconds)
            if task.can_split:
                self._halve_larger(task)
            return step
        if not (outcome.lacks_memory and self._halve(task, unit)):
            task.fail(outcome.text)
            task.lacks_memory = outcome.lacks_memory
        return None

    def _halve(self, task: Task, unit: Unit) -> bool:
        """Handle a unit that ran out of memory: lower `room_bytes`, then halve the unit's shard and all shards that are
        larger than `room_bytes`. While another model's unit runs, that model's shards wait for the unit's end. Return
        False if no shard can be halved.
        """
        tasks = [other for other in self.tasks if other.can_split and not other.failure]
        if task not in tasks or not self._lower_room(tasks):
            return False
        if len(task.shards[unit.shard].layers) > 1:
            self._split(task, unit.shard)
        running_tasks = [other for other, *_ in self.running_units.values()]
        for other in tasks:
            if other not in running_tasks:
                self._halve_larger(other)
        return True

    def halve_all(self) -> bool:
        """Lower `room_bytes` and halve all shards that are larger than `room_bytes`. Call this only while no unit runs.
        Return False if no shard can be halved."""
        is_possible = self._lower_room(self.tasks)
        for task in self.tasks:
            self._halve_larger(task)
        return is_possible

    def _lower_room(self, tasks: Sequence[Task]) -> bool:
        """Lower `room_bytes` to half the bytes of the largest shard that can be halved. Return False if there is no
        such shard."""
        all_shards = [shard for task in tasks for shard in task.shards]
        divisible_bytes = [shard.slot_bytes for shard in all_shards if len(shard.layers) > 1]
        self.room_bytes = max(divisible_bytes, default=0) // 2
        return bool(divisible_bytes)

    def _halve_larger(self, task: Task) -> None:
        """Halve the task's shards until each takes at most `room_bytes` bytes or has a single layer."""
        index = 0
        while index < len(task.shards) and self.room_bytes < math.inf:
            if task.shards[index].slot_bytes > self.room_bytes and len(task.shards[index].layers) > 1:
                self._split(task, index)
            else:
                index += 1

    def _split(self, task: Task, index: int) -> None:
        task.split(index)
        self.splits.append((task.model, index))

    def summary(self) -> dict[str, float]:
        """Return figures of the whole run; an empty dict for a single model.

        predicted_makespan_seconds: the makespan that a simulation predicts from each model's first two rounds, see
        _predicted().
        makespan_seconds: the seconds from the run's begin to the end of its last unit.
        lower_bound_seconds: the seconds below which no order of these units can end.
        ratio: makespan_seconds / lower_bound_seconds.
        utilization: the share of the devices' time in which they computed units, from 0 to 1.
        """
        if len(self.chains) < 2:
            return {}
        makespan = max(timeline_unit.end for timeline_unit in self.timeline)
        num_devices = len(self.device_numbers)
        bound = lower_bound(list(self.chains.values()), num_devices)
        busy_seconds = sum(map(sum, self.chains.values()))
        return {
            **self._predicted(num_devices),
            "makespan_seconds": makespan,
            "lower_bound_seconds": bound,
            "ratio": makespan / bound,
            "utilization": busy_seconds / (num_devices * makespan),
        }

    def _predicted(self, num_devices: int) -> dict[str, float]:
        """Return the makespan that the simulation predicts from the first two rounds: the first is a warm-up, and all
        later rounds are assumed to take as long as the second. Return an empty dict if a shard was halved, a model
        failed, or a model had fewer than three rounds.
        """
        chains = []
        for task, seconds in self.chains.items():
            per_round, remainder = divmod(len(seconds), max(1, task.num_rounds))
            if remainder or task.failure or task.num_rounds < 3 or self.splits:
                return {}
            chains.append(seconds[:per_round] + seconds[per_round : 2 * per_round] * (task.num_rounds - 1))
        return {"predicted_makespan_seconds": simulate_policy(chains, num_devices, self.policy).makespan}

    def shares(self) -> list[float]:
        """Return, for each model, the time of its units as a share of all devices' time since the run began."""
        unit_seconds = [0.0] * len({task.model for task in self.tasks})
        for timeline_unit in self.timeline:
            unit_seconds[timeline_unit.model] += timeline_unit.end - timeline_unit.start
        end = max((timeline_unit.end for timeline_unit in self.timeline), default=0.0)
        return [seconds / (len(self.device_numbers) * end) if end else 0.0 for seconds in unit_seconds]
