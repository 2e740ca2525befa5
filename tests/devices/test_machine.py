"""What is known of this machine's GPUs: those of a job, and who else is on them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from harness.core.job import Job
from harness.core.record import Record
from harness.devices import device_lock, machine
from harness.run import launch
from tests.devices.test_budgets import with_gpus
from tests.support.tiny import TINY


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs, of which a process has the third."""
    with_gpus(monkeypatch, "GPU-a", "GPU-b", "GPU-c", "GPU-d")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    others = {2: [SimpleNamespace(pid=77, usedGpuMemory=5)]}
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: others.get(handle, []), raising=False
    )


def of(number: int, option: str = "num_devices") -> Job:
    return Job("some", TINY, {option: number}, device="cuda")


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [(None, ["GPU-a", "GPU-b"]), ("2,1,0", ["GPU-c", "GPU-b"]), ("GPU-d,GPU-a", ["GPU-d", "GPU-a"]), ("3", ["GPU-d"])],
)
@pytest.mark.parametrize("option", ["num_devices", "world_size"])
def test_the_gpus_of_a_job_are_the_first_visible_ones(
    four: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, uuids: list[str], option: str
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_uuids(of(2, option)) == uuids
    assert [path.stem for path in device_lock._paths(of(2, option))] == [f"harness-{uuid}" for uuid in sorted(uuids)]


@pytest.mark.parametrize(("visible", "names"), [(None, ["0", "1"]), ("3,1", ["3", "1"]), ("GPU-x", ["0"])])
def test_gpus_that_no_driver_here_knows_go_by_their_index(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    """As where the container engine is on another machine."""

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_uuids(of(2)) == names


@pytest.mark.parametrize(("number", "found"), [(2, []), (3, [{"pid": 77, "device_bytes": 5, "gpu": "2"}])])
def test_a_process_on_any_of_a_jobs_gpus_is_noted(four: None, number: int, found: list[dict]) -> None:
    assert machine.surroundings("cuda", number)["foreign_processes"] == found
    assert "foreign_processes" not in machine.surroundings("cpu", number)


def test_a_process_on_a_jobs_second_gpu_is_told_and_on_record(
    four: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    asked, warnings = machine.surroundings, list[str]()
    monkeypatch.setattr(machine, "surroundings", lambda device, number: asked("cuda", number))
    job = Job("resident", TINY, {}, steps=2, warmup=1)
    monkeypatch.setattr(machine, "num_gpus", lambda job: 2)

    def report(event: dict) -> None:
        warnings.extend([event["text"]] if event["event"] == "warning" else [])

    record = Record.read(launch.launch(job, "key", tmp_path, report=report))
    assert record.status == "ok" and [each["pid"] for each in record.machine["foreign_processes"]] == [77]
    assert warnings == ["process 77 is on GPU 2, too: on record"]
