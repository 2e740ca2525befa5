"""The dispatcher on devices that only sleep: the schedule is the one that the simulation foresees."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.base.child_process import child_environment
from methods.sharding import device_process
from methods.sharding.device_process import Elsewhere, largest_peaks, serve
from methods.sharding.dispatch import Dispatcher
from methods.sharding.scheduler import simulate
from methods.sharding.shard import Version
from methods.sharding.task import Task
from methods.sharding.unit import FORWARD, LOSS, Result, Unit


class Sleeper:
    """A device whose units take a time and do nothing."""

    device = SimpleNamespace(moved_bytes=0, name=torch.device("cpu"))

    def __init__(self, seconds: dict[tuple[int, str, int], float]) -> None:
        self.seconds = seconds

    def run(self, unit: Unit, following: Unit | None) -> Result:
        time.sleep(self.seconds[unit.model, unit.kind, unit.shard])
        return Result(kept=[], loss=torch.zeros(()), norms=[])

    def finished(self, result: Result) -> Result:
        return result


class Nothing:
    """A shard without layers."""

    lenders: dict = {}  # noqa: RUF012
    trained: tuple = ()
    layers: tuple = ()

    def num_bytes(self, part: str) -> int:
        return 1


def sleeping_tasks() -> list[Task]:
    found = []
    for model in range(5):
        task = Task(model, [Nothing()] * (1 + model % 3), [], [(0, 0)] * 3, 3, update="now")  # type: ignore[list-item]
        task.seconds = {
            (kind, shard): 0.05 * (1 + shard) * {FORWARD: 1, LOSS: 3}.get(kind, 2) for kind, shard in task.seconds
        }
        found.append(task)
    return found


@pytest.mark.heavy
def test_the_dispatchers_makespan_is_the_simulations() -> None:
    """Within 5 %, at the best of ten: a busy machine wakes a sleeper late. So is the one foretold by two rounds."""
    chains = [[task.seconds[each] for each in task.script] * 3 for task in sleeping_tasks()]
    seconds = {(task.model, *each): task.seconds[each] for task in sleeping_tasks() for each in task.script}
    devices = [Elsewhere(Sleeper, seconds) for _ in range(3)]
    simulated, ratios, foretold = simulate(chains, len(devices)).makespan, [], 0.0
    for device in devices:
        device.ready()
    while len(ratios) < 10 and (not ratios or ratios[-1] > 1.05):
        dispatcher = Dispatcher(sleeping_tasks(), devices)
        assert len(list(dispatcher.run())) == 5 * 3
        summary = dispatcher.summary()
        ratios.append(summary["makespan_seconds"] / simulated)
        foretold = summary["predicted_makespan_seconds"] / simulated
    for device in devices:
        device.close()
    assert 0.99 <= ratios[-1] <= 1.05
    assert 0.99 <= foretold <= 1.05


def test_a_device_of_its_own_tells_its_peaks_with_each_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([{"device_allocated": 5}, {"device_allocated": 7, "device_reserved": 9}])
    monkeypatch.setattr(device_process, "device_peaks", lambda device: next(peaks))
    ours, theirs = multiprocessing.Pipe()
    serving = threading.Thread(target=serve, args=(theirs, 1, Sleeper, {(0, FORWARD, 0): 0.0}))
    serving.start()
    device = Elsewhere.__new__(Elsewhere)  # whose process is a thread here
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
    (tmp_path / "script.py").write_text(f"from {Elsewhere.__module__} import Elsewhere\nElsewhere(print).ready()\n")
    call = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, env=child_environment())
    assert done.returncode == 1 and "before the\n        current process has finished its bootstrapping" in done.stderr
