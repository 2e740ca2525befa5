"""The bytes that plans may fill: what imports, fragments and several devices leave of a host budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.job import Budget, Job
from harness.devices import room
from tests.support.tiny import TINY

MIB = 2**20


@pytest.mark.parametrize(
    ("device", "num_ranks", "expected"),
    [("cpu", 1, 600), ("cpu", 2, 200), ("sim", 1, 1200), ("cuda", 1, 900)],
)
def test_a_plan_leaves_room_for_the_imports_of_each_rank_and_on_a_cpu_for_fragments(
    device: str, num_ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of 1,200 MiB, in MiB: on a CPU two thirds of what 300 MiB leave; on sim tensors alone count."""
    monkeypatch.setattr(room, "baseline_bytes", lambda device: 300 * MIB)
    job = Job("stronghold", TINY, {"world_size": num_ranks}, Budget(2**30, 1200 * MIB), device=device)
    assert room.room_of(job).host_bytes == expected * MIB


@pytest.mark.parametrize(("device", "expected"), [("cpu", 600), ("cuda", 300)])
def test_several_devices_share_imports_on_a_cpu_and_have_contexts_of_their_own_on_gpus(
    device: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, of 1,500 MiB, in MiB: 2 times 300 MiB, and of the rest two thirds; with the leading process 4 times."""
    monkeypatch.setattr(room, "baseline_bytes", lambda device: 300 * MIB)
    job = Job("hydra", TINY, {"num_devices": 3}, Budget(2**30, 1500 * MIB), device=device)
    assert room.room_of(job).host_bytes == expected * MIB


def test_the_baseline_is_what_importing_torch_takes() -> None:
    """Between a bare interpreter and what any run has been seen to take."""
    assert 30 * MIB < room.baseline_bytes("cpu") < 400 * MIB
    room.check_budget(Budget(host_bytes=room.baseline_bytes("cpu") + 64 * MIB), "cpu")


def test_the_baseline_is_measured_once_for_a_set_up_not_in_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []
    monkeypatch.setattr(room, "BASELINES", tmp_path / "baselines.json")
    monkeypatch.setattr(room, "ask", lambda module, device: devices.append(device) or 100 * MIB)

    def call(device: str) -> int:
        room.baseline_bytes.cache_clear()  # as a new process
        return room.baseline_bytes(device)

    assert call("cpu") == call("cpu") == call("cuda") == 100 * MIB and devices == ["cpu", "cuda"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # of another set-up
    assert call("cpu") == 100 * MIB and devices == ["cpu", "cuda", "cpu"]
    for text in ("no JSON", "[1]", '{"cpu": null}'):
        (tmp_path / "baselines.json").write_text(text)
        assert call("cpu") == 100 * MIB
    room.baseline_bytes.cache_clear()


@pytest.mark.parametrize(("device", "expected"), [("cpu", 0), ("cuda", room.CUDA_BASELINE_BYTES)])
def test_where_no_gpu_is_here_a_plan_for_one_leaves_room_for_its_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, expected: int
) -> None:
    def fail(module: str, device: str) -> int:
        raise ValueError("no CUDA device here")

    monkeypatch.setattr(room, "BASELINES", tmp_path / "baselines.json")
    monkeypatch.setattr(room, "ask", fail)
    room.baseline_bytes.cache_clear()
    assert room.baseline_bytes(device) == expected
    room.baseline_bytes.cache_clear()
