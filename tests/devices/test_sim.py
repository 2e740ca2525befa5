"""The device sim: memories whose budgets bind to the byte, the CPU's very bits, and a link that takes its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core.job import Budget, Job, Room, Workload
from harness.core.method import create
from harness.core.record import Record
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from tests.support import on_sim
from tests.support.on_sim import MIB, call, digest
from tests.support.training import small_bytes, tiny, train
from tests.support.until import until

pytestmark = pytest.mark.usefixtures("compiled_sim", "forked")

SMALL = Workload(num_layers=3, hidden_size=64, num_heads=4, seq_len=32, batch_size=2, vocab_size=512)
METHODS: dict[str, dict[str, Any]] = {
    "resident": {},
    "l2l": {},
    "stronghold": {"window_size": 1, "resident_layers": 0},
}
CHANGES: list[dict[str, Any]] = [{}, {"dtype": "bf16"}, {"dtype": "fp16"}, {"dropout": 0.1}]
CASES = [[method, changes, options] for changes in CHANGES for method, options in METHODS.items()]


@pytest.fixture(scope="module")
def trained_on_sim(compiled_sim: None) -> list[Any]:
    return call(on_sim.train_all, CASES)


@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda number: f"{CASES[number][0]}-{CASES[number][1]}"
)
def test_training_has_the_very_bits_of_the_cpus(number: int, trained_on_sim: list[Any]) -> None:
    method, changes, options = CASES[number]
    assert trained_on_sim[number] == digest(train(method, tiny(**changes), 4, **options))


def test_the_smallest_budget_that_trains_less_one_unit_does_not() -> None:
    peak = call(on_sim.peak_of_training)
    assert peak % 512 == 0
    assert call(on_sim.peak_of_training, device_bytes=peak) == peak
    text = rf"^sim device out of memory: tried to allocate \d+ bytes, \d+ of {peak - 512} bytes in use$"
    with pytest.raises(torch.OutOfMemoryError, match=text):
        call(on_sim.peak_of_training, device_bytes=peak - 512)


def test_the_hosts_budget_binds_to_the_byte() -> None:
    text = "OutOfMemoryError: sim host out of memory: tried to allocate 1 bytes, 1001 of 1001 bytes in use"
    assert call(on_sim.copies_of_host_memory, 1001, host_bytes=1001) == [1001, text, 0]


def test_page_locked_memory_comes_in_powers_of_two_and_is_the_hosts() -> None:
    message = "OutOfMemoryError: sim {} out of memory: tried to allocate 4096 bytes, {} of {} bytes in use"
    by_pinned = call(on_sim.pinned, pinned_bytes=16384)
    assert by_pinned == [16384, 16384, True, message.format("pinned", 16384, 16384)]
    by_host = call(on_sim.pinned, host_bytes=16384 + 4096)
    assert by_host == [16384, 16384, True, message.format("host", 16384 + 4096, 16384 + 4096)]


def test_freed_memory_comes_back() -> None:
    assert call(on_sim.freed) == [4096, 0, 8192, 0]


def test_running_out_in_a_backward_pass_is_an_exception_that_leaves_nothing_behind() -> None:
    text, left, gradient = call(on_sim.refused_in_backward, device_bytes=3 * MIB)
    assert text.startswith("OutOfMemoryError: sim device out of memory: tried to allocate 1048576 bytes")
    assert (left, gradient) == (MIB + MIB + MIB // 2, 512.0 * 512)


def test_an_operation_on_both_memories_is_an_error() -> None:
    assert "Expected all tensors to be on the same device" in call(on_sim.mixed_operation)


def test_a_number_of_the_host_may_take_part() -> None:
    assert call(on_sim.number_of_the_host) == [3.0, 3.0]


def test_a_copy_takes_its_bytes_over_the_link() -> None:
    took = call(on_sim.time_of_copies, MIB, link_bytes_per_second=4 * MIB)
    assert took["in"] >= 0.25 and took["out"] >= 0.25


def test_work_goes_on_while_a_copy_on_another_stream_is_under_way() -> None:
    """In one of many tries, because a busy machine may end the copy first: else this waits for ever."""
    call(on_sim.work_beside_a_copy, MIB, link_bytes_per_second=4 * MIB)


def test_an_operation_waits_for_the_copy_before_it_on_its_stream() -> None:
    assert call(on_sim.order_on_one_stream, MIB, link_bytes_per_second=4 * MIB) >= 0.25


@pytest.mark.heavy
def test_stronghold_hides_copies_that_l2l_waits_for() -> None:
    """In one of many tries, because a busy machine may let a copy's thread wait for a core."""
    link = {"link_bytes_per_second": 20e6}
    alone = call(on_sim.step_seconds, "l2l", {}, **link)
    # three copies of each of six layers' weights, one after the other
    assert alone > 18 * 4 * 12 * 64**2 / 20e6
    options = {"window_size": 2, "resident_layers": 0}
    until(lambda: call(on_sim.step_seconds, "stronghold", options, **link) < 0.8 * alone)


def run(results: Path, name: str, budget: Budget, **options: Any) -> Record:
    job = resolve(Job(name, SMALL, options, budget, "sim", steps=5, warmup=1))[0]
    return Sweep(results).run([resolve(job)])[0]


@pytest.mark.heavy
def test_a_record_names_clock_limits_and_the_peaks_of_both_memories(shared_results: Path) -> None:
    budget = Budget(device_bytes=4 * MIB, host_bytes=16 * MIB)
    record = run(shared_results, "l2l", budget)
    assert (record.status, record.clock, record.gate.verdict) == ("ok", "sim", "exact"), record.reason
    assert set(record.limits) >= {"device", "host"}
    at_home = 16 * SMALL.num_layers * SMALL.layer_params  # weights, gradient, two moments
    assert at_home <= record.peaks["host_accounted"] < at_home + 2 * MIB
    assert record.peaks["device_allocated"] <= 4 * MIB
    assert record.peaks["host_pinned"] < 100  # losses on their way home


@pytest.mark.heavy
def test_the_reference_is_the_cpus_without_a_budget(shared_results: Path) -> None:
    record = run(shared_results, "resident", Budget(device_bytes=4 * MIB, host_bytes=16 * MIB))
    assert record.gate.text.startswith("5 steps and all weights bit-equal to resident"), record.gate.text


def test_running_out_is_a_result_by_memory(shared_results: Path) -> None:
    # Plans count no activations of the sizes' rounding: these fit on paper, and not in the device.
    need = resolve(Job("megatron-lm", SMALL, device="sim"))[1].device_bytes
    record = run(shared_results, "megatron-lm", Budget(device_bytes=need))
    assert record.status == "oom-device" and "sim device out of memory" in record.reason


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["zero-offload", "zero-infinity"])
def test_deepspeed_trains_within_both_budgets(shared_results: Path, name: str) -> None:
    budget = Budget(device_bytes=4 * MIB, host_bytes=16 * MIB)
    record = run(shared_results, name, budget, adam="fused")
    assert record.status == "ok" and record.gate.passed, (record.reason, record.gate.text)
    # an fp32 master and two moments
    assert 12 * SMALL.num_params <= record.peaks["host_accounted"] <= 16 * MIB
    assert record.peaks["device_allocated"] <= 4 * MIB


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["megatron-lm", "fsdp2-offload", "hf-trainer"])
def test_other_engines_train_on_sim(shared_results: Path, name: str) -> None:
    record = run(shared_results, name, Budget(device_bytes=16 * MIB, host_bytes=16 * MIB))
    assert record.status == "ok" and record.gate.passed, (record.reason, record.gate.text)


@pytest.mark.heavy
def test_the_plan_of_fsdp2_has_room_for_its_sums_in_fp32() -> None:
    """Of a layer, and of an embedding larger than all layers; most of it where activations are few."""
    sizes = [{"hidden_size": 128, "vocab_size": 16}, {"hidden_size": 32, "vocab_size": 8192}]
    loads = [
        tiny(**size, num_heads=4, batch_size=4, micro_batches=parts, dtype=dtype)
        for size in sizes
        for parts in (1, 4)
        for dtype in ("fp32", "bf16")
    ]
    peaks = call(on_sim.peaks, [("fsdp2-offload", load, {}) for load in loads])
    for load, (peak, _) in zip(loads, peaks, strict=True):
        planned = create("fsdp2-offload", {}).plan(load, Room()).device_bytes
        assert 0.7 * planned < peak <= planned + small_bytes(load), load


@pytest.mark.heavy
def test_deepspeed_is_refused_what_the_host_has_not(shared_results: Path) -> None:
    """Run in spite of its plan, which knows as much."""
    budget = Budget(device_bytes=4 * MIB, host_bytes=3 * MIB)
    job = Job("zero-offload", SMALL, {"adam": "fused"}, budget, "sim", steps=5, warmup=1)
    record = Sweep(shared_results).attempt(resolve(job), 1, {"role": "probe"})
    assert record.status == "oom-host" and "sim host out of memory" in record.reason, record.reason


@pytest.mark.parametrize("name", ["stronghold", "l2l"])
@pytest.mark.parametrize(
    "workload",
    [
        Workload(num_layers=4, hidden_size=64, num_heads=4, seq_len=32, batch_size=2, vocab_size=512),
        Workload(num_layers=2, hidden_size=256, num_heads=4, seq_len=32, batch_size=2, vocab_size=50304),
    ],
    ids=["small", "large ends"],
)
@pytest.mark.cover(0)
def test_memories_as_large_as_planned_are_enough(tmp_path: Path, name: str, workload: Workload) -> None:
    planned = create(name, {}).plan(workload, Room(1, 1))
    budget = Budget(planned.device_bytes, planned.host_bytes)
    (record,) = Sweep(tmp_path).run(
        [resolve(Job(name, workload, budget=budget, device="sim", steps=3, warmup=1))]
    )
    assert record.status == "ok", record.reason
