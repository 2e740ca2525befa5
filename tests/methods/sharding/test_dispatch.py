"""The dispatcher on devices that compute nothing: the schedule is the one that the simulation foresees."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.base.child_process import child_environment
from methods.sharding import device_process, dispatch
from methods.sharding.device_process import ProcessDevice, largest_peaks, serve
from methods.sharding.dispatch import Dispatcher
from methods.sharding.scheduler import simulate_policy
from methods.sharding.shard import Version
from methods.sharding.task import Task, TaskSettings
from methods.sharding.unit import FORWARD, LOSS, Result, Unit


class Idle:
    """The worker of a device whose units do nothing."""

    device = SimpleNamespace(moved_bytes=0, name=torch.device("cpu"))

    def run(self, unit: Unit, following: Unit | None) -> Result:
        return Result(recompute_inputs=[], loss=torch.zeros(()), norms=[])

    def finish(self, result: Result) -> Result:
        return result


class DispatchClock:
    """Seconds that pass while the dispatcher waits: up to the end of the first unit."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def wait(self, devices: list[TimedDevice]) -> list[TimedDevice]:
        self.now = min(device.end for device in devices)
        return [device for device in devices if device.end == self.now]


class TimedDevice:
    """A device, and its own connection, whose units take their seconds of the clock."""

    num_known_splits = 0

    def __init__(self, clock: DispatchClock, seconds: dict[tuple[int, str, int], float]) -> None:
        self.clock, self.seconds, self.connection = clock, seconds, self

    def start(self, unit: Unit, following: Unit | None, splits: Any) -> None:
        self.taken = self.seconds[unit.model, unit.kind, unit.shard]
        self.end = self.clock.now + self.taken

    def reply(self) -> tuple[Result, float]:
        return Idle().run(Unit(0, 0, FORWARD, Version(0, 0)), None), self.taken


class Nothing:
    """A shard without layers."""

    lenders: dict = {}  # noqa: RUF012
    trained_names: tuple = ()
    layers: tuple = ()

    def num_bytes(self, part: str) -> int:
        return 1


def timed_tasks() -> list[Task]:
    tasks = []
    for model in range(5):
        task = Task(
            model,
            [Nothing()] * (1 + model % 3),
            [],
            [(0, 0)] * 3,
            settings=TaskSettings(update="now", num_batches=3),
        )  # type: ignore[list-item]
        task.unit_seconds = {
            (kind, shard): 0.05 * (1 + shard) * {FORWARD: 1, LOSS: 3}.get(kind, 2)
            for kind, shard in task.unit_seconds
        }
        tasks.append(task)
    return tasks


def test_the_dispatchers_makespan_is_the_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is the one foretold by two rounds."""
    clock, chains = (
        DispatchClock(),
        [[task.unit_seconds[unit] for unit in task.script] * 3 for task in timed_tasks()],
    )
    monkeypatch.setattr(dispatch, "time", clock)
    monkeypatch.setattr(dispatch, "wait", clock.wait)
    seconds = {(task.model, *unit): task.unit_seconds[unit] for task in timed_tasks() for unit in task.script}
    dispatcher = Dispatcher(timed_tasks(), [TimedDevice(clock, seconds) for _ in range(3)])
    assert len(list(dispatcher.run())) == 5 * 3
    summary, simulated = dispatcher.summary(), simulate_policy(chains, 3).makespan
    assert summary["makespan_seconds"] == pytest.approx(simulated, rel=0.01)
    assert summary["predicted_makespan_seconds"] == pytest.approx(simulated, rel=0.01)


def test_a_device_of_its_own_tells_its_peaks_with_each_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([{"device_allocated": 5}, {"device_allocated": 7, "device_reserved": 9}])
    monkeypatch.setattr(device_process, "device_peaks", lambda device: next(peaks))
    ours, theirs = multiprocessing.Pipe()
    serving = threading.Thread(target=serve, args=(theirs, 1, Idle))
    serving.start()
    device = ProcessDevice.__new__(ProcessDevice)  # whose process is a thread here
    device.connection = ours
    device.ready()
    for told in ({"device_allocated": 5}, {"device_allocated": 7, "device_reserved": 9}):
        device.start(Unit(0, 0, FORWARD, Version(0, 0)), None, ())
        device.reply()
        assert device.peaks == told
    ours.close()
    serving.join()
    other = SimpleNamespace(peaks={"device_allocated": 8})
    assert largest_peaks([device, other]) == {"device_allocated": 8, "device_reserved": 9}  # type: ignore[list-item]


@pytest.mark.heavy
def test_a_script_without_a_guard_of_its_main_part_is_told_so(tmp_path: Path) -> None:
    """Its devices run it to find its classes, and would start devices of their own."""
    (tmp_path / "script.py").write_text(
        f"from {ProcessDevice.__module__} import ProcessDevice\nProcessDevice(print).ready()\n"
    )
    call = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(call, capture_output=True, text=True, env=child_environment())
    assert (
        done.returncode == 1
        and "before the\n        current process has finished its bootstrapping" in done.stderr
    )
