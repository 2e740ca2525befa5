"""One division of a GPU's budget: plans, refusals and the allocator's cap agree, and nothing exceeds the budget."""

from __future__ import annotations

import dataclasses
import re

import pytest

from harness.core.job import GIB, Budget, Job, Workload, gib
from harness.core.record import Record
from harness.devices import budgets, cuda_budget, machine, named_machines, room
from harness.jobs.progress import job_result_line
from harness.plan.advise import named_place
from harness.plan.fit import resolve
from tests.cli.test_doctor import entry
from tests.support.fake_gpu import FakeGpu

MIB = 2**20
HEADLINE = Budget(32 * GIB, 90 * GIB)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(80 * GIB, 450 * MIB, 500 * MIB).install(monkeypatch)


@pytest.mark.parametrize("fills", [1, 31, 32, MIB, 361 * MIB + 1, 31 * GIB])
def test_the_smallest_budget_for_so_many_bytes_is_sharp(fills: int) -> None:
    budget = cuda_budget.budget_bytes(fills)
    assert cuda_budget.tensor_bytes(budget) >= fills
    assert fills == 1 or cuda_budget.tensor_bytes(budget - 2) < fills


def test_context_reserve_and_tensors_are_the_budget() -> None:
    """32 GiB less 768 MiB are 32,000 MiB for the allocator; less 256 MiB, 31 of 32 parts of them are a plan's."""
    assert cuda_budget.allocator_bytes(32 * GIB) == 32_000 * MIB
    assert cuda_budget.tensor_bytes(32 * GIB) == 31_744 * 31 // 32 * MIB


@pytest.mark.parametrize("num_layers", [48, 78, 100])
def test_a_plan_that_fills_the_device_leaves_the_reserve_below_the_cap(gpu: FakeGpu, num_layers: int) -> None:
    job = Job("stronghold", Workload(num_layers=num_layers), budget=HEADLINE, device="cuda")
    _, plan, shortfall = resolve(job)
    budgets._cap_device(job.budget.device_bytes)
    assert shortfall is None
    assert (
        plan.device_bytes + cuda_budget.RESERVE_BYTES
        < gpu.cap_bytes
        < HEADLINE.device_bytes - gpu.context_bytes
    )


def test_the_budget_that_a_refusal_names_suffices_and_less_does_not(gpu: FakeGpu) -> None:
    job = Job("resident", Workload(num_layers=48), budget=HEADLINE, device="cuda")
    refused = resolve(job)[2]
    named = int(re.findall(r"--device-memory (\d+)KiB", refused or "")[0]) * 1024

    def at(device_bytes: int) -> str | None:
        return resolve(dataclasses.replace(job, budget=Budget(device_bytes, 90 * GIB)))[2]

    assert at(named) is None and at(named - 1024 - 2) is not None


def test_the_cap_and_what_was_measured_are_on_record(gpu: FakeGpu) -> None:
    limits = budgets._cap_device(4 * GIB)
    cap = 4 * GIB - cuda_budget.CONTEXT_BYTES
    assert gpu.cap_bytes == pytest.approx(cap, abs=1)
    assert (
        f"at {cap} bytes" in limits["device"]
        and f"fill {cuda_budget.tensor_bytes(4 * GIB)}" in limits["device"]
    )
    assert limits["device_context"] == f"{768 * MIB} bytes planned, {500 * MIB} measured"


def test_the_cap_ends_with_training_because_the_inspection_takes_memory_of_its_own(gpu: FakeGpu) -> None:
    job = Job("resident", Workload(num_layers=1), budget=Budget(4 * GIB), device="cuda")
    budgets._cap_device(job.budget.device_bytes)
    assert budgets.lift(job)["device_total_bytes"] == gpu.cap_bytes == 80 * GIB - 450 * MIB


def test_a_measured_context_takes_the_place_of_the_stated_one(gpu: FakeGpu) -> None:
    machine.keep_calibration(
        {**entry(Workload(), 1e12), "device": "cuda", "measured": {"context_bytes": 600 * MIB}}
    )
    fills = room.room_within(Budget(4 * GIB), "cuda").device_bytes
    assert fills == cuda_budget.tensor_bytes(4 * GIB, 600 * MIB) > cuda_budget.tensor_bytes(4 * GIB)
    budgets._cap_device(4 * GIB)
    assert gpu.cap_bytes == pytest.approx(4 * GIB - 600 * MIB, abs=1)


def test_a_machine_by_name_has_one_room_whatever_the_context_here(gpu: FakeGpu) -> None:
    v100 = named_machines.load("v100-vm")
    before = room.room_within(v100.budget_on("cuda"), "cuda").device_bytes
    machine.keep_calibration(
        {**entry(Workload(), 1e12), "device": "cuda", "measured": {"context_bytes": 600 * MIB}}
    )
    assert room.room_within(v100.budget_on("cuda"), "cuda").device_bytes == before == v100.room.device_bytes


def test_jobs_for_a_gpu_elsewhere_have_no_limit_where_no_gpu_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu", dict)
    job = Job("resident", Workload(num_layers=1), device="cuda")
    assert (
        room.room_of(job, counts_imports=False).device_bytes is None and room.device_limit_bytes(job) is None
    )
    assert resolve(job)[2] is None


@pytest.mark.parametrize(
    ("device", "budget_gib", "limit_gib"), [("cuda", 8, 7.25), ("cuda", None, 79.560546875), ("cpu", 8, 8)]
)
def test_a_peak_is_compared_with_what_the_allocator_may_reserve(
    gpu: FakeGpu, device: str, budget_gib: int | None, limit_gib: float
) -> None:
    """By hand: 768 MiB less than 8 GiB, or all 80 GiB less 450 MiB. An allocator that fills its cap is not over it."""
    job = Job(
        "resident", Workload(num_layers=1), budget=Budget(budget_gib and budget_gib * GIB), device=device
    )
    record = Record(job, "", peaks={"device_reserved": int(limit_gib * GIB)}, status="ok")
    assert room.device_limit_bytes(job) == limit_gib * GIB
    size = gib(int(limit_gib * GIB))
    assert f"device peak {size} of {size}" in job_result_line(record)


def test_each_of_several_ranks_leaves_room_for_nccl(gpu: FakeGpu) -> None:
    """By hand: 512 MiB, in the plan, on a machine by name, in the cap and in the least budget."""
    job = Job("stronghold", Workload(num_layers=48), {"world_size": 2}, HEADLINE, device="cuda")
    assert room.room_of(job, counts_imports=False).device_bytes == cuda_budget.tensor_bytes(
        32 * GIB - 512 * MIB
    )
    place = named_place("h100", Budget(host_bytes=90 * GIB))
    one, two = (place.room_for(job.workload, num_ranks) for num_ranks in (1, 2))
    assert (one.device_bytes - two.device_bytes, two.host_bytes) == (512 * MIB, 45 * GIB)
    assert room.room_of(job, counts_imports=False).host_bytes == 45 * GIB
    budgets._cap_device(32 * GIB, 2)
    assert gpu.cap_bytes == pytest.approx(32 * GIB - 512 * MIB - cuda_budget.CONTEXT_BYTES, abs=1)
    with pytest.raises(ValueError, match="at least 1801MiB, because the GPU"):
        room.check_budget(Budget(1289 * MIB), "cuda", world_size=2)


def test_a_budget_that_the_context_nearly_fills_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(
        ValueError, match=r"device-memory of at least 1289MiB, because the GPU.* got 361.0 MiB"
    ):
        room.check_budget(Budget(361 * MIB), "cuda")
    room.check_budget(Budget(1289 * MIB), "cuda")


def test_a_budget_beyond_the_gpu_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(ValueError, match="at most 81470MiB"):
        room.check_budget(Budget(80 * GIB), "cuda")


@pytest.mark.parametrize(
    ("taken", "budget", "named"),
    [
        (200 * MIB, None, None),
        (1200 * MIB, None, 80270),
        (1200 * MIB, 78 * GIB, None),
        (3 * GIB, 78 * GIB, 78398),
    ],
)
def test_memory_that_other_programs_take_of_the_gpu_is_told_with_the_budget_that_is_left(
    gpu: FakeGpu, taken: int, budget: int | None, named: int | None
) -> None:
    """A display's memory, of which NVML names no process. Of 80 GiB the driver takes 450 MiB."""
    gpu.reserved_bytes = taken
    warnings = room.warnings_beside(Job("stronghold", Workload(), budget=Budget(budget), device="cuda"), {})
    assert [re.search(r"--device-memory (\d+)MiB", text)[1] for text in warnings] == [str(named)] * (
        named is not None
    )  # type: ignore[index]


@pytest.mark.parametrize(("has_v2", "total"), [(True, 80 * GIB - 450 * MIB), (False, 80 * GIB)])
def test_the_drivers_own_part_is_no_part_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, has_v2: bool, total: int
) -> None:
    FakeGpu(80 * GIB, 450 * MIB, 0, has_v2=has_v2).install(monkeypatch)
    assert machine.gpu()["gpu_bytes"] == total


@pytest.mark.parametrize("method", ["resident", "stronghold"])
def test_below_the_context_a_job_is_refused_by_the_least_budget_not_by_its_plan(
    gpu: FakeGpu, method: str
) -> None:
    with pytest.raises(ValueError, match="expected --device-memory of at least 1289MiB, because the GPU"):
        resolve(Job(method, Workload(num_layers=2), budget=Budget(500 * MIB, 90 * GIB), device="cuda"))


@pytest.mark.parametrize("name", named_machines.names())
def test_plans_and_advice_fill_one_number_of_a_named_machine(gpu: FakeGpu, name: str) -> None:
    """What the file says is beside the context; on a GPU, simulated, and in advice all of it but the reserve."""
    named = named_machines.load(name)
    fills = {
        device: room.room_within(named.budget_on(device), device).device_bytes
        for device in ("cuda", "sim", "cpu")
    }
    fills["advice"] = named_place(name, Budget()).room_for(Workload()).device_bytes
    size = re.fullmatch(r"([\d.]+)(MiB|GiB)", str(named.device_memory))
    assert size
    whole = int(float(size[1]) * {"MiB": MIB, "GiB": GIB}[size[2]])
    assert set(fills.values()) == {(whole - 256 * MIB) * 31 // 32}


@pytest.mark.parametrize(("total", "expected"), [(32_510 * MIB, 32_510 * MIB), (24_000 * MIB, 32_668 * MIB)])
def test_a_named_machines_budget_is_a_like_cards_and_never_a_smaller_ones(
    monkeypatch: pytest.MonkeyPatch, total: int, expected: int
) -> None:
    """31,900 MiB beside a context of 768; a card with as much may have less for its context. A smaller one is not that
    machine: a plan is still about the machine, and a run is refused."""
    FakeGpu(total + 258 * MIB, 258 * MIB, 500 * MIB).install(monkeypatch)
    budget = named_machines.load("v100-vm").budget_on("cuda")
    assert budget.device_bytes == expected
    if expected > total:
        with pytest.raises(ValueError, match="expected --device-memory of at most"):
            room.check_budget(Budget(budget.device_bytes), "cuda")
