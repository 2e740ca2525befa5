"""What is known of this machine's GPUs: those of a job, and who else is on them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from cli import doctor, job_options
from harness.core.job import GIB, Budget, Job
from harness.core.record import Record
from harness.devices import device_lock, machine
from harness.run import launch, place
from tests.devices.test_budgets import with_gpus
from tests.support.fake_gpu import MIB, FakeGpu
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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine one with a GPU, with these versions of torch and of the driver's CUDA."""
    FakeGpu(24 * GIB, 450 * MIB, 500 * MIB).install_nvml(monkeypatch)

    def install(torch: str, cuda: int | None, requires: list[str] | None = None) -> None:
        def version() -> int:
            if cuda is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
            return cuda

        software = {**machine.software(), "torch": torch}
        monkeypatch.setattr(machine, "software", lambda: software)
        monkeypatch.setattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", version)
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)

    return install


def of(number: int, option: str = "num_devices") -> Job:
    return Job("some", TINY, {option: number}, device="cuda")


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-a", "GPU-b"]),
        ("2,1,0", ["GPU-c", "GPU-b"]),
        ("GPU-d,GPU-a", ["GPU-d", "GPU-a"]),
        ("3", ["GPU-d"]),
    ],
)
@pytest.mark.parametrize("option", ["num_devices", "world_size"])
def test_the_gpus_of_a_job_are_the_first_visible_ones(
    four: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, uuids: list[str], option: str
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_uuids(of(2, option)) == uuids
    assert [path.stem for path in device_lock._paths(of(2, option))] == [
        f"harness-{uuid}" for uuid in sorted(uuids)
    ]


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


@pytest.mark.parametrize(
    ("number", "processes"), [(2, []), (3, [{"pid": 77, "device_bytes": 5, "gpu": "2"}])]
)
def test_a_process_on_any_of_a_jobs_gpus_is_noted(four: None, number: int, processes: list[dict]) -> None:
    assert machine.surroundings("cuda", number)["foreign_processes"] == processes
    assert "foreign_processes" not in machine.surroundings("cpu", number)


def test_a_process_on_a_jobs_second_gpu_is_told_and_on_record(
    four: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    surroundings, warnings = machine.surroundings, list[str]()
    monkeypatch.setattr(machine, "surroundings", lambda device, number: surroundings("cuda", number))
    job = Job("resident", TINY, {}, steps=2, warmup=1)
    monkeypatch.setattr(machine, "num_gpus", lambda job: 2)

    def report(event: dict) -> None:
        warnings.extend([event["text"]] if event["event"] == "warning" else [])

    record = Record.read(launch.launch(job, lambda: "key", tmp_path, report=report))
    assert record.status == "ok" and [process["pid"] for process in record.machine["foreign_processes"]] == [
        77
    ]
    assert warnings == ["process 77 is on GPU 2, too: on record"]


# What torch 2.13.0 and 2.9.1 from PyPI require, in part.
PYPI_13 = ["filelock", "cuda-bindings<14,>=13.0.3; platform_system == 'Linux'", "nvidia-nccl-cu13==2.29.7"]
PYPI_12 = ["filelock", "nvidia-cuda-nvrtc-cu12==12.8.93; platform_system == 'Linux'", "triton==3.5.1"]


@pytest.mark.parametrize(
    ("torch", "requires", "cuda", "best"),
    [
        ("2.13.0+cu130", None, 13000, "cuda"),
        ("2.13.0+cu130", None, 12080, "cpu"),
        ("2.13.0+cu128", None, 12020, "cuda"),  # of the same major version
        ("2.13.0+cu126", None, 13010, "cuda"),
        ("2.13.0+cu126", None, 11080, "cpu"),
        ("2.13.0", PYPI_13, 12090, "cpu"),
        ("2.13.0", PYPI_13, 13020, "cuda"),
        ("2.9.1", PYPI_12, 12000, "cuda"),
        ("2.9.1", PYPI_12, 11080, "cpu"),
        ("2.9.1", ["filelock"], 11080, "cuda"),  # of a build that tells no version
        ("2.9.1", None, 11080, "cuda"),
        ("2.13.0+cu130", None, None, "cuda"),  # the driver tells none
        ("2.13.0+cpu", None, 13000, "cpu"),
    ],
)
def test_a_driver_older_than_torchs_cuda_leaves_the_cpu(
    driver: Callable[..., None], torch: str, requires: list[str] | None, cuda: int | None, best: str
) -> None:
    driver(torch, cuda, requires)
    assert machine.devices()[0] == best and bool(machine.cuda_refused()) == (best == "cpu")


def test_doctor_says_what_an_old_driver_lacks(driver: Callable[..., None]) -> None:
    driver("2.13.0+cu130", 12040)
    text = dict(doctor.hardware_facts(Path()))["gpu"]
    assert "driver 1; torch is built for CUDA 13, the driver supports 12.4: update the driver until" in text
    assert (
        "or take a torch for CUDA 12 (docs/places.md, Without a set-up)" in text
        and len(text.splitlines()) == 1
    )


def test_doctor_says_where_to_look_for_an_index_of_cpu_builds(driver: Callable[..., None]) -> None:
    driver("2.13.0+cpu", 13000)
    text = dict(doctor.hardware_facts(Path()))["gpu"]
    assert (
        "pip config list or PIP_EXTRA_INDEX_URL names, remove .venv" in text and len(text.splitlines()) == 1
    )


def test_doctor_finds_nothing_wrong_with_a_driver_that_suffices(driver: Callable[..., None]) -> None:
    driver("2.13.0+cu130", 13000)
    assert dict(doctor.hardware_facts(Path()))["gpu"].endswith(", driver 1")


def test_an_old_driver_at_a_place_is_told_in_the_record(driver: Callable[..., None], tmp_path: Path) -> None:
    driver("2.13.0+cu130", 12040)
    place.perform(place.OrderedJob(Job("resident", TINY, device="cuda"), "key", tmp_path / "log").order(()))
    record = Record.read(tmp_path / "log.json")
    assert (record.status, "got cpu and sim: torch is built for CUDA 13" in record.reason) == (
        "unavailable",
        True,
    )


def test_a_gpu_that_is_asked_for_and_cannot_be_used_is_refused_with_the_reason(
    driver: Callable[..., None],
) -> None:
    driver("2.13.0+cu130", 12040)
    with pytest.raises(
        ValueError, match=r"expected cpu or sim on this machine, got cuda: torch is built for CUDA 13"
    ):
        job_options._device({"device": "cuda"}, Budget())
