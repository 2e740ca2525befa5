"""The planner's bound against another program's for three machines, and what it does with the layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.job import Plan, Room, Workload
from harness.core.method import create
from harness.core.rates import Rates
from harness.plan.resources import compute_seconds
from methods.streaming.placement.placement import parse, placement_text
from methods.streaming.placement.planner import StepCosts, arrange_kinds, choose_counts

GB = 1e9
# Models of machines, not measured: a V100's virtual machine with a slow host, an H200, an RTX 4090 desktop.
MACHINES = {
    "v100": (
        "fp32",
        Rates(
            10.8996e12,
            0.21736,
            800 * GB,
            10.69 * GB,
            10.69 * GB,
            0.9,
            75 * GB,
            0.41067e9,
            disk_read_bytes_per_second=1.5 * GB,
            disk_write_bytes_per_second=1.5 * GB,
        ),
    ),
    "h200": (
        "bf16",
        Rates(
            489.8e12,
            0.25,
            3600 * GB,
            52 * GB,
            52 * GB,
            0.85,
            120 * GB,
            10e9,
            disk_read_bytes_per_second=1.5 * GB,
            disk_write_bytes_per_second=1.5 * GB,
        ),
    ),
    "4090": (
        "bf16",
        Rates(
            118.8e12,
            0.25,
            920 * GB,
            25 * GB,
            25 * GB,
            0.85,
            55 * GB,
            8e9,
            disk_read_bytes_per_second=6 * GB,
            disk_write_bytes_per_second=5 * GB,
        ),
    ),
}
# Milliseconds of the least step, worked out by an independent program (a linear program over parameters instead of
# layers, with its own account of memory): without clipping, and with exact clipping by a deferred update.
BOUNDS = {
    "v100": {
        16: (2753.6, 2772.9),
        32: (5279.8, 5319.1),
        48: (7806.0, 7865.3),
        78: (12542.6, 12639.4),
        100: (16016.0, 16140.4),
    },
    "h200": {
        16: (66.0, 67.2),
        32: (126.2, 128.6),
        48: (186.4, 190.7),
        78: (314.9, 607.0),
        100: (562.7, 913.4),
    },
    "4090": {
        16: (264.7, 273.8),
        32: (506.3, 523.7),
        48: (748.0, 957.4),
        78: (1211.3, 2019.6),
        100: (1584.7, 2798.6),
    },
}
# The same at 100 layers with 30 GB of the host and 50 GB of the disk, where moments and master lie, but no weights.
BOUNDS_WITH_DISK = {"v100": (16034.7, 28593.9), "h200": (686.1, 7807.6), "4090": (1930.4, 5080.8)}
# The same program's room for layers: bytes on the device at 16 layers (a layer's input less for each layer more), and
# on the host. A layer whose update is deferred keeps its gradient.
ROOM = {
    "v100": (30256183705, 91536064512),
    "h200": (31078533529, 124151185408),
    "4090": (22488598937, 55302166528),
}


def bound(
    machine: str, num_layers: int, clipping: str | None, kinds: str, smaller: dict[str, float] | None = None
) -> tuple[float, dict[str, float]] | None:
    dtype, rates = MACHINES[machine]
    workload = Workload(num_layers=num_layers, dtype=dtype)
    size, gradient = workload.weight_bytes, workload.weight_bytes if clipping else 0
    whole, params = 12 + gradient, workload.layer_params
    device, host = ROOM[machine]
    needs = {
        "device": {"R": whole * params, "P": size * params, "Q": size * params},
        "host": dict.fromkeys("PWS", whole * params)
        | {"Q": (whole - size) * params, "D": (size + gradient) * params},
        "disk": {"D": (12 - size) * params},
    }
    room = {
        "device": device - num_layers * workload.boundary_bytes - gradient * workload.end_params,
        "host": host,
    }
    return StepCosts(workload, rates, clipping).least_seconds(needs, room | (smaller or {}), kinds)


@pytest.mark.parametrize("num_layers", [16, 32, 48, 78, 100])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_bound_is_the_other_programs(machine: str, num_layers: int) -> None:
    for clipping, milliseconds in zip((None, "deferred"), BOUNDS[machine][num_layers], strict=True):
        least = bound(machine, num_layers, clipping, "RPWSQ")
        assert least is not None and 1e3 * least[0] == pytest.approx(milliseconds, rel=0.005)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_bound_with_a_disk_is_the_other_programs(machine: str) -> None:
    for clipping, milliseconds in zip((None, "deferred"), BOUNDS_WITH_DISK[machine], strict=True):
        least = bound(machine, 100, clipping, "RPWSDQ", {"host": 30 * GB, "disk": 50 * GB})
        assert least is not None and 1e3 * least[0] == pytest.approx(milliseconds, rel=0.005)


def plan_of(workload: Workload, counts: dict[str, int]) -> Plan:
    """Fewer rules than any method's: what is on the device takes 16 bytes a parameter there, what is not on the host;
    a parked layer's weights are on the device."""
    params = workload.layer_params
    outside = sum(counts.values()) - counts["R"]
    return Plan(
        {"weights": (16 * counts["R"] + 4 * counts["P"]) * params, "buffers": 24 * params},
        {"optimizer": 16 * outside * params},
        moved_bytes=(8 * counts["P"] + 12 * outside) * params,
    )


def chosen(num_layers: int, device_layers: float, host_layers: float) -> dict[str, int] | None:
    """On the V100's machine with room for so many whole layers."""
    workload = Workload(num_layers=num_layers)
    layer = 16 * workload.layer_params
    free = (int((device_layers + 1.5) * layer), int(host_layers * layer))
    rates = MACHINES["v100"][1]
    return choose_counts(StepCosts(workload, rates, "deferred"), Room(*free, rates=rates), plan_of, "RPW")


def test_all_layers_are_resident_where_they_fit() -> None:
    assert chosen(8, device_layers=8, host_layers=8) == {"R": 8, "P": 0, "W": 0}


def test_no_placement_is_chosen_where_none_fits() -> None:
    assert chosen(8, device_layers=2, host_layers=5) is None


def test_layers_beyond_the_device_are_chosen_to_fit_both_memories() -> None:
    counts = chosen(40, device_layers=20, host_layers=20)
    assert counts is not None and sum(counts.values()) == 40
    assert 16 * counts["R"] + 4 * counts["P"] <= 16 * 20 and counts["P"] + counts["W"] <= 20


def test_no_placement_of_few_layers_is_faster_than_the_chosen_one() -> None:
    """All of them by hand: 10 layers, room for 3 on the device."""
    dtype, rates = MACHINES["h200"]
    workload = Workload(num_layers=10, dtype=dtype)
    layer = 16 * workload.layer_params
    room = Room(int(4.5 * layer), 10 * layer, rates=rates)
    for clipping in (None, "deferred"):
        costs = StepCosts(workload, rates, clipping)
        counts = choose_counts(costs, room, plan_of, "RPW")
        assert counts is not None
        every = [{"R": r, "P": p, "W": 10 - r - p} for r in range(11) for p in range(11 - r)]
        fitting = [numbers for numbers in every if plan_of(workload, numbers).shortfall(room) is None]
        least = min(costs.forecast(numbers).seconds for numbers in fitting)
        assert costs.forecast(counts).seconds <= 1.01 * least


def test_what_binds_is_named_with_its_time() -> None:
    """By hand: 50 layers of which all are windowed update 50 * 50.36 M parameters at 0.41067 G a second."""
    dtype, rates = MACHINES["v100"]
    workload = Workload(num_layers=50, dtype=dtype)
    backward = (1 - rates.forward_share) * workload.flops_per_step / rates.device_flops_per_second
    bound = StepCosts(workload, rates, "deferred").forecast({"W": 50})
    assert bound.binds == "compute then host cores"
    assert bound.seconds == pytest.approx(backward + 50 * workload.layer_params / 0.41067e9)


def test_a_head_that_is_known_apart_is_forward_work_at_its_own_rate() -> None:
    """By hand: all layers at 1e12 take as long as their FLOPs say, a fifth of it forward; the head at half the rate."""
    workload = Workload(num_layers=3)
    layers, head = workload.flops_per_step - workload.head_flops_per_step, workload.head_flops_per_step
    forward, backward = compute_seconds(workload, Rates(1e12, 0.2, head_flops_per_second=0.5e12))
    assert (forward, backward) == pytest.approx((0.2 * layers / 1e12 + head / 0.5e12, 0.8 * layers / 1e12))


@pytest.mark.parametrize(
    ("text", "kinds"),
    [("R2W4~S2", "RRSWWSWW"), ("P1W1~S4", "SSPSSW"), ("R1S2", "RSS"), ("R1W2~S2~R4", "RRSRWRSRW")],
)
def test_layers_are_spread_evenly_among_the_others(text: str, kinds: str) -> None:
    assert parse(text, len(kinds)) == kinds and placement_text(kinds) == text


def test_resident_layers_are_spread_where_the_link_carries_states_all_the_time() -> None:
    counts = {"R": 4, "W": 2, "S": 2}
    assert [
        placement_text(arrange_kinds(counts, clipping)) for clipping in (None, "speculate", "deferred")
    ] == [
        "R1W2~S2~R3",
        "R1W2~S2~R3",
        "R4W2~S2",
    ]
    assert placement_text(arrange_kinds({"R": 4, "W": 2}, None)) == "R4W2"
    assert placement_text(arrange_kinds({"R": 46, "P": 2, "W": 12, "S": 18}, None)) == "R11P2W12~S18~R35"


def test_rates_decide_where_layers_live_and_how_long_a_step_takes() -> None:
    """The host's Adam cannot keep up with this device, so some layers bring their states along."""
    dtype, rates = MACHINES["h200"]
    workload = Workload(num_layers=60, dtype=dtype, clip_norm=0.0)
    room = Room(20 * 2**30, 100 * 2**30, rates=rates)
    planned = create("stronghold", {}).plan(workload, room)
    kinds = Counter(parse(planned.options["placement"], 60))
    bound = StepCosts(workload, rates, None).forecast(kinds)
    assert planned.shortfall(room) is None and kinds["S"] > 0
    assert (planned.step_seconds, planned.binds) == (bound.seconds, "host memory")
    ruled = create("stronghold", {}).plan(workload, replace(room, rates=None))
    without = Counter(parse(ruled.options["placement"], 60))
    assert set(without) == {"R", "W"} and ruled.step_seconds is None
    assert bound.seconds < 0.95 * StepCosts(workload, rates, None).forecast(without).seconds


def test_no_more_layers_than_need_be_are_on_the_disk(tmp_path: Path) -> None:
    """By hand: a W takes 16 bytes a parameter of the host, a D half of them, three buffers half a layer each; with
    two D less the host would not suffice."""
    rates = MACHINES["v100"][1]
    workload = Workload(num_layers=60)
    host_bytes, layer = 40 * 2**30, 16 * workload.layer_params
    room = Room(8 * 2**30, host_bytes, disk_bytes=30 * 2**30, rates=rates)
    planned = create("stronghold", {"disk": str(tmp_path)}).plan(workload, room)
    kinds = Counter(parse(planned.options["placement"], 60))
    assert planned.shortfall(room) is None and planned.disk_bytes == 8 * kinds["D"] * workload.layer_params
    outside = 60 - kinds["R"] - kinds["D"]
    assert outside * layer + kinds["D"] * layer // 2 + 3 * layer // 2 <= host_bytes
    assert (outside + 2) * layer + (kinds["D"] - 2) * layer // 2 + 3 * layer // 2 > host_bytes
    seconds = 8 * kinds["D"] * workload.layer_params / (1.5 * GB)
    backward = (1 - rates.forward_share) * workload.flops_per_step / rates.device_flops_per_second
    assert (
        planned.step_seconds == pytest.approx(backward + seconds)
        and planned.binds == "compute then disk reads"
    )


def test_without_a_folder_on_the_disk_nothing_is_placed_there() -> None:
    room = Room(8 * 2**30, 40 * 2**30, rates=MACHINES["v100"][1])
    assert create("stronghold", {}).plan(Workload(num_layers=60), room).shortfall(room)


def test_a_placement_that_is_given_is_kept_and_timed() -> None:
    room = Room(20 * 2**30, 100 * 2**30, rates=MACHINES["h200"][1])
    for options in ({"placement": "R4W20"}, {"resident_layers": 4}):
        planned = create("stronghold", options).plan(Workload(num_layers=24, dtype="bf16"), room)
        assert planned.options["placement"] == "R4W20" and planned.step_seconds


def test_updates_wait_for_the_norm_unless_asked_and_the_forecast_counts_that() -> None:
    """The host binds, and has room for a second state: nobody knows how often it would be adopted."""
    workload, room = (
        Workload(num_layers=60, dtype="bf16"),
        Room(20 * 2**30, 200 * 2**30, rates=MACHINES["h200"][1]),
    )
    plans = {
        clipping: create("stronghold", {"clipping": clipping}).plan(workload, room)
        for clipping in (None, "deferred", "speculate")
    }
    assert plans[None] == plans["deferred"] and plans[None].options["clipping"] == "deferred"
    assert plans["speculate"].options["clipping"] == "speculate"
    assert plans["speculate"].host_bytes > plans[None].host_bytes
    assert plans["speculate"].step_seconds < plans[None].step_seconds


def test_an_update_ahead_counts_what_it_costs() -> None:
    rates = replace(MACHINES["v100"][1], ahead_cost=1.5, host_bytes_per_second=float("inf"))
    seconds = {
        clipping: StepCosts(Workload(num_layers=50), rates, clipping).forecast({"W": 50}).seconds
        for clipping in (None, "speculate")
    }
    assert seconds["speculate"] == pytest.approx(1.5 * 50 * Workload().layer_params / 0.41067e9)
    assert seconds[None] < seconds["speculate"]


def test_a_streamed_layers_update_counts_what_it_costs() -> None:
    """The device's memory binds: of four updates there two count as three."""
    rates = replace(MACHINES["v100"][1], device_bytes_per_second=1e6, streamed_cost=1.5)
    seconds = StepCosts(Workload(num_layers=4), rates, None).forecast({"R": 2, "S": 2}).seconds
    ends = Workload().end_params / Workload().layer_params
    assert seconds == pytest.approx((2 + 2 * 1.5 + ends) * 28 * Workload().layer_params / 1e6, rel=1e-3)


def test_where_nothing_fits_the_plan_says_what_is_short() -> None:
    room = Room(4 * 2**30, 2**30, rates=MACHINES["h200"][1])
    planned = create("stronghold", {}).plan(Workload(num_layers=60, dtype="bf16"), room)
    assert "host memory" in str(planned.shortfall(replace(room, device_bytes=2**50)))


def test_boundaries_on_the_host_are_bytes_of_the_link_in_the_forecast() -> None:
    """All but two go out under the forward pass and come back under the backward pass."""
    workload, rates = Workload(num_layers=20), MACHINES["v100"][1]
    rates = replace(rates, inbound_bytes_per_second=1.0, outbound_bytes_per_second=1.0)
    on_host, on_device = (
        create("stronghold", {"placement": "R20", "activations": memory}).plan(workload, Room(rates=rates))
        for memory in ("host", "device")
    )
    assert on_host.step_seconds == 2 * 18 * workload.boundary_bytes
    assert on_device.step_seconds is not None and on_device.step_seconds < 100
