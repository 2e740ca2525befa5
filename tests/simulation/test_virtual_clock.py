"""The clock by hand, and what it says of the methods: what hides behind compute, and what does not.

Where a method is timed, one layer's forward pass takes one virtual second.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from bench import virtual
from harness.core.job import Room, Workload
from harness.core.method import create
from harness.simulation.fake_streams import watch_streams
from harness.simulation.virtual_clock import (
    AgentSpans,
    DeviceLink,
    VirtualMachine,
    VirtualRun,
    VirtualTime,
    VirtualWorkers,
    virtual_run,
)
from methods.streaming.placement.virtual_schedule import scale_model
from tests.support.training import tiny

WORKLOAD = tiny(num_layers=8, hidden_size=64, num_heads=2, seq_len=32, batch_size=4)
TOKENS = WORKLOAD.batch_size * WORKLOAD.seq_len
FORWARD_FLOPS = 24 * TOKENS * WORKLOAD.hidden_size**2 + 2 * TOKENS * WORKLOAD.seq_len * WORKLOAD.hidden_size
STEPS = 3
UPDATE_BYTES = 40  # per parameter: the gradient scaled, AdamW's four slabs read and written


def machine(transfer_seconds: float, update_seconds: float, num_workers: int = 1) -> VirtualMachine:
    """One layer takes a second to compute forward, so long over the link, and so long to update."""
    return VirtualMachine(
        device_flops_per_second=FORWARD_FLOPS,
        link_bytes_per_second=4 * WORKLOAD.layer_params / transfer_seconds if transfer_seconds else math.inf,
        host_bytes_per_second=UPDATE_BYTES * WORKLOAD.layer_params / update_seconds
        if update_seconds
        else math.inf,
        num_workers=num_workers,
    )


@functools.cache
def run(method: str, machine: VirtualMachine, **options: Any) -> VirtualRun:
    return virtual_run(create(method, options), WORKLOAD, machine, STEPS)


@pytest.mark.parametrize("transfer_seconds", [0.5, 1.0])
def test_stronghold_is_faster_than_l2l_over_a_slow_link(transfer_seconds: float) -> None:
    slow = machine(transfer_seconds, update_seconds=0.5)
    assert run("stronghold", slow, window_size=3).step_seconds < 0.75 * run("l2l", slow).step_seconds


def test_window_of_four_is_faster_than_window_of_one() -> None:
    slow = machine(transfer_seconds=0.5, update_seconds=0.5)
    four, one = (run("stronghold", slow, window_size=window).step_seconds for window in (4, 1))
    assert four < 0.9 * one


def test_free_link_and_host_cost_stronghold_nothing() -> None:
    free = machine(transfer_seconds=0, update_seconds=0)
    resident = run("resident", free).step_seconds
    assert run("stronghold", free, window_size=3).step_seconds == pytest.approx(resident, rel=0.001)


def test_copies_and_updates_hide_behind_compute() -> None:
    free, slow = (
        machine(transfer_seconds=0, update_seconds=0),
        machine(transfer_seconds=0.5, update_seconds=0.5),
    )
    options = {"window_size": 3, "resident_layers": 2}
    assert run("stronghold", slow, **options).step_seconds == pytest.approx(
        run("stronghold", free, **options).step_seconds, rel=0.01
    )


def test_boundaries_that_travel_hide_behind_compute_beside_weights() -> None:
    free, slow = (
        machine(transfer_seconds=0, update_seconds=0),
        machine(transfer_seconds=0.5, update_seconds=0.5),
    )
    options = {"window_size": 3, "resident_layers": 2}
    assert run("stronghold", slow, **options, activations="host").step_seconds == pytest.approx(
        run("stronghold", free, **options).step_seconds, rel=0.01
    )


def test_l2l_hides_nothing() -> None:
    """Two fetches, one copy home and one update of every layer come on top of compute."""
    free, slow = (
        machine(transfer_seconds=0, update_seconds=0),
        machine(transfer_seconds=0.5, update_seconds=0.5),
    )
    on_top = WORKLOAD.num_layers * (3 * 0.5 + 0.5)
    assert run("l2l", slow).step_seconds - run("l2l", free).step_seconds == pytest.approx(on_top, rel=0.02)


@pytest.mark.heavy
def test_more_resident_layers_are_never_slower_over_a_slow_link() -> None:
    slow = machine(transfer_seconds=2.0, update_seconds=0.5)
    seconds = [
        round(run("stronghold", slow, window_size=2, resident_layers=resident).step_seconds, 6)
        for resident in range(WORKLOAD.num_layers + 1)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.heavy
def test_more_update_threads_help_a_slow_host() -> None:
    one, four = (machine(transfer_seconds=0.5, update_seconds=4.0, num_workers=workers) for workers in (1, 4))
    assert (
        run("stronghold", four, window_size=3).step_seconds
        < 0.75 * run("stronghold", one, window_size=3).step_seconds
    )


@pytest.mark.heavy
def test_speculation_hides_a_slow_hosts_updates_behind_the_backward_pass_too() -> None:
    """Nothing is clipped here. Ahead of the norm an update moves 56 bytes a parameter, 16 more, from state to state."""
    slow, workload = (
        machine(transfer_seconds=0.25, update_seconds=2.0),
        dataclasses.replace(WORKLOAD, clip_norm=1e3),
    )
    deferred, ahead = (
        virtual_run(create("stronghold", {"window_size": 3, "clipping": clipping}), workload, slow, STEPS)
        for clipping in ("deferred", "speculate")
    )
    assert ahead.last_step_seconds < 0.9 * deferred.last_step_seconds  # the first step waits for its norm


def test_l2l_moves_every_layer_in_twice_and_home_once() -> None:
    busy = run("l2l", machine(transfer_seconds=0.5, update_seconds=0.5)).busy_seconds
    per_direction = STEPS * WORKLOAD.num_layers * 0.5
    assert (busy["inbound"], busy["outbound"]) == pytest.approx((2 * per_direction, per_direction), rel=0.001)


def test_device_flops_are_those_of_the_arithmetic() -> None:
    flops = run("stronghold", machine(transfer_seconds=0, update_seconds=0), window_size=3).device_flops
    tokens = WORKLOAD.batch_size * WORKLOAD.seq_len
    # The recompute stops before the MLP's second product, whose result no gradient needs.
    not_recomputed = WORKLOAD.num_layers * 8 * tokens * WORKLOAD.hidden_size**2
    assert flops / STEPS == pytest.approx(WORKLOAD.flops_per_step - not_recomputed, rel=0.01)


def of_two(method: str, machine: VirtualMachine, exchange_seconds: float, **options: Any) -> VirtualRun:
    """One of two ranks on a machine where half of a layer's weights take so long from device to device."""
    rate = 2 * WORKLOAD.layer_params / exchange_seconds if exchange_seconds else math.inf
    linked = dataclasses.replace(machine, exchange_bytes_per_second=rate)
    return run(method, linked, world_size=2, **options)


@pytest.mark.parametrize(
    ("name", "options"), [("l2l", {}), ("stronghold", {"placement": "R2W6", "window_size": 3})]
)
def test_the_link_between_devices_carries_what_the_plan_counts(name: str, options: dict[str, Any]) -> None:
    """Where nothing else takes time, a step is that; but for the bytes of the norm, and of the first step's window."""
    training = of_two(name, VirtualMachine(), 1.0, **options)
    plan = create(name, {"world_size": 2, **options}).plan(WORKLOAD, Room())
    seconds = sum(plan.exchanged.values()) / (2 * WORKLOAD.layer_params)
    assert training.last_step_seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(("name", "options"), [("l2l", {}), ("stronghold", {"window_size": 3})])
def test_ranks_over_an_infinitely_fast_link_train_as_one_with_a_part_of_the_batch(
    name: str, options: dict[str, Any]
) -> None:
    free, half = machine(transfer_seconds=0, update_seconds=0), dataclasses.replace(WORKLOAD, batch_size=2)
    alone = virtual_run(create(name, options), half, free, STEPS)
    assert of_two(name, free, 0, **options).step_seconds == pytest.approx(alone.step_seconds, rel=1e-6)


def test_gathers_hide_behind_compute_and_sums_do_not() -> None:
    """A layer of half the batch takes half a second forward; its gather takes a quarter, and so does its sum. Only the
    first gather of a step waits for the update. L2L waits for both gathers of each layer, too."""
    free, layers = machine(transfer_seconds=0, update_seconds=0), WORKLOAD.num_layers
    ends = 2 * 0.25 * WORKLOAD.end_params / WORKLOAD.layer_params
    for name, waited, options in (("stronghold", layers + 1, {"window_size": 3}), ("l2l", 3 * layers, {})):
        slow, fast = (of_two(name, free, seconds, **options).last_step_seconds for seconds in (0.25, 0))
        assert slow - fast == pytest.approx(0.25 * waited + ends, rel=0.001)


def test_an_exchange_takes_the_first_gap_of_the_link() -> None:
    link = DeviceLink()
    assert [link.carry(*exchange) for exchange in ((10, 5), (0, 4), (3, 7), (3, 6))] == [15, 4, 22, 10]


def on_device(num_bytes: int) -> torch.Tensor:
    """A buffer that takes its number of bytes in seconds to overwrite at a byte per second."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def test_two_streams_run_side_by_side() -> None:
    with watch_streams(VirtualTime(VirtualMachine(device_bytes_per_second=1.0))) as streams:
        other = streams.stream()
        on_device(100).zero_()
        with streams.use(other):
            on_device(30).zero_()
        assert (streams.compute.now, other.now, streams.thread.now) == (100, 30, 0)


def test_event_makes_the_second_stream_wait() -> None:
    with watch_streams(VirtualTime(VirtualMachine(device_bytes_per_second=1.0))) as streams:
        other = streams.stream()
        on_device(100).zero_()
        other.wait_event(streams.compute.record_event())
        on_device(5).zero_()
        with streams.use(other):
            on_device(30).zero_()
        assert (streams.compute.now, other.now) == (105, 130)


def test_launches_hold_up_a_stream_that_has_little_to_do() -> None:
    """Launched at 4, 8 and 12; each takes a second."""
    with watch_streams(
        VirtualTime(VirtualMachine(device_bytes_per_second=1.0, launch_seconds=4.0))
    ) as streams:
        for _ in range(3):
            on_device(1).zero_()
        assert (streams.thread.now, streams.compute.now) == (12, 13)


@pytest.mark.parametrize(("non_blocking", "thread_seconds"), [(True, 0), (False, 12)])
def test_copy_takes_latency_and_bytes_over_the_link(non_blocking: bool, thread_seconds: float) -> None:
    with watch_streams(
        VirtualTime(VirtualMachine(link_bytes_per_second=10.0, link_latency_seconds=2.0))
    ) as streams:
        on_device(100).to("cpu", non_blocking=non_blocking)
        assert (streams.compute.now, streams.thread.now) == (12, thread_seconds)


def test_matrix_product_takes_its_flops() -> None:
    with watch_streams(VirtualTime(VirtualMachine(device_flops_per_second=10.0))) as streams:
        torch.empty(3, 4) @ torch.empty(4, 5)
        assert streams.compute.now == 2 * 3 * 4 * 5 / 10


@pytest.mark.parametrize(("is_causal", "share"), [(False, 1), (True, 0.5)])
def test_causal_attention_takes_half_its_two_products(is_causal: bool, share: float) -> None:
    batch, heads, tokens, head_size = 2, 3, 16, 8
    query = torch.randn(batch, heads, tokens, head_size)
    with watch_streams(VirtualTime(VirtualMachine(device_flops_per_second=1.0))) as streams:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=is_causal)
        assert streams.compute.now == share * 2 * (2 * batch * heads * tokens * tokens * head_size)


def test_third_task_of_two_threads_waits_for_the_first() -> None:
    with watch_streams(VirtualTime(VirtualMachine(host_bytes_per_second=1.0))) as streams:
        home, pool = on_device(10).to("cpu"), streams.pool(2)
        tasks = [pool.submit(home.zero_) for _ in range(3)]
        ends = []
        for task in tasks:
            task.result()
            ends.append(streams.thread.now)
        assert ends == [10, 10, 20]


def test_a_scale_model_has_the_proportions_of_what_it_stands_for() -> None:
    """Compute of layers and head, parameters of layers and ends: in the same ratio, but for biases."""
    whole = Workload(num_layers=48)
    small = scale_model(whole)
    for of in (
        lambda load: load.flops_per_step / load.model_flops_per_step,
        lambda load: load.end_params / load.layer_params,
    ):
        assert of(small) == pytest.approx(of(whole), rel=0.04)


@pytest.mark.parametrize(
    ("machine_name", "num_layers", "clipping", "least"),
    [("rtx4090", 78, None, 0.95), ("h200", 78, "speculate", 0.95), ("v100-vm", 78, "deferred", 0.95)],
)
@pytest.mark.cover(0)
def test_the_schedule_is_near_its_bound(
    machine_name: str, num_layers: int, clipping: str | None, least: float
) -> None:
    """The host's memory binds the first two, compute the last."""
    step = virtual.schedule_step(machine_name, num_layers, clipping)
    assert not isinstance(step, str) and least <= step.bound_share <= 1.0


@pytest.mark.heavy
def test_fp16_waits_no_longer_where_it_updates_ahead_of_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(virtual.DTYPES, "h200", "fp16")
    step = virtual.schedule_step("h200", 48, "speculate")
    assert not isinstance(step, str) and step.bound_share >= 0.95


def test_the_update_that_is_needed_first_goes_first() -> None:
    """Two updates of ten seconds, the later deadline first: it is under way when the other lands at five."""
    with watch_streams(VirtualTime(VirtualMachine(host_bytes_per_second=1.0))) as streams:
        clock = streams.clock
        assert isinstance(clock, VirtualTime)
        workers, home, landing = (
            VirtualWorkers(streams, clock, 1, AgentSpans(streams)),
            on_device(10).to("cpu"),
            streams.stream(),
        )
        late = workers.update(2, None, 1, lambda first, last: home.zero_())
        landing.now = 5.0
        landed = landing.record_event()
        soon = workers.update(1, None, 1, lambda first, last: (landed.synchronize(), home.zero_()))
        ends = []
        for due in (soon, late):
            due.result()
            ends.append(streams.thread.now)
        assert ends == [15, 20]
