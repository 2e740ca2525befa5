"""Boundaries on the host: the very bits of resident training, both memories' peaks by arithmetic, and who chooses
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.core.job import GIB, Budget, Job, Room, Workload
from harness.core.method import create, largest_depth
from harness.core.rates import Rates
from harness.devices.memory_account import Tracker
from harness.devices.memory_rehearsal import predict
from harness.plan.fit import resolve
from methods.offload import adamw_kernel
from tests.methods.test_agree import difference
from tests.support.races import find_races
from tests.support.training import small_bytes, tiny, train, train_resident

SMALL = {"num_layers": 5, "hidden_size": 32, "num_heads": 2}
STEPS = 4
CHANGES: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.0},
    {"dtype": "bf16"},
    {"dtype": "bf16", "clip_norm": 0.0},
    {"batch_size": 6, "micro_batches": 3},
    {"batch_size": 6, "micro_batches": 2, "dtype": "bf16"},
    {"dropout": 0.1},
]
# large boundaries, small ends
LONG = Workload(num_layers=6, hidden_size=64, num_heads=2, seq_len=256, vocab_size=512)
LARGE = Workload(num_layers=6, hidden_size=256, seq_len=64, vocab_size=512)


def on_host(placement: str, **options: Any) -> dict[str, Any]:
    return {"placement": placement, "window_size": 2, "activations": "host", **options}


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("placement", ["R5", "W5", "R1P1W2S1", "D4R1"])
@pytest.mark.cover(1)
def test_boundaries_on_the_host_have_the_very_bits_of_resident_training(
    placement: str, changes: dict
) -> None:
    workload = tiny(**SMALL, **changes)
    trained = train("stronghold", workload, STEPS, **on_host(placement))
    assert difference(trained, train_resident(workload, STEPS)) == ""


@pytest.mark.parametrize("changes", [{}, {"batch_size": 6, "micro_batches": 3, "dtype": "bf16"}], ids=str)
def test_so_has_l2l(changes: dict) -> None:
    workload = tiny(**SMALL, **changes)
    assert (
        difference(train("l2l", workload, STEPS, activations="host"), train_resident(workload, STEPS)) == ""
    )
    assert find_races(create("l2l", {"activations": "host"}), workload) == []


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_few_layers_have_the_same_bits(num_layers: int) -> None:
    workload = tiny(num_layers=num_layers)
    trained = train("stronghold", workload, STEPS, activations="host")
    assert difference(trained, train_resident(workload, STEPS)) == ""


@pytest.mark.parametrize("changes", [{}, {"batch_size": 6, "micro_batches": 3, "dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("placement", ["R5", "W5", "S2W1P1R1"])
def test_no_race_where_boundaries_travel(placement: str, changes: dict) -> None:
    assert find_races(create("stronghold", on_host(placement)), tiny(**SMALL, **changes)) == []


@pytest.mark.parametrize("changes", [{}, {"batch_size": 6, "micro_batches": 3, "dtype": "bf16"}], ids=str)
def test_the_plan_counts_the_bytes_of_boundaries_that_travel(changes: dict) -> None:
    """All but the two of the top layers, there and back."""
    workload = tiny(**SMALL, **changes)
    one, two = (train("stronghold", workload, steps, **on_host("W5")).trained.moved_bytes for steps in (1, 2))
    on_the_host, on_device = (
        create("stronghold", {**on_host("W5"), "activations": memory}) for memory in ("host", "device")
    )
    assert two - one == on_the_host.plan(workload, Room()).moved_bytes
    assert two - one - on_device.plan(workload, Room()).moved_bytes == 2 * 3 * workload.boundary_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [{}, {"batch_size": 4, "micro_batches": 2}], ids=str)
@pytest.mark.parametrize(
    ("method", "placement"), [("stronghold", "W4"), ("stronghold", "R1P1W1S1"), ("l2l", None)], ids=str
)
@pytest.mark.cover(1)
def test_the_plan_is_the_peak_of_both_memories(
    method: str, placement: str | None, batch: dict, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(num_layers=4, hidden_size=256, seq_len=64, vocab_size=512, dtype=dtype, **batch)
    trained = create(method, {"activations": "host"} | ({"placement": placement} if placement else {}))
    # a plan has room for an update without it
    monkeypatch.setattr(adamw_kernel, "compiled_library", lambda: None)
    predicted, planned = predict(trained, workload), trained.plan(workload, Room())
    assert predicted.device_bytes <= planned.device_bytes <= predicted.device_bytes + small_bytes(workload)
    drawn = 2**20  # starting values of resident layers on their way through the host
    assert planned.host_bytes - 1024 <= predicted.host_bytes <= planned.host_bytes + drawn


def test_a_deeper_model_takes_no_more_activations_on_the_device_and_each_its_own_on_the_host() -> None:
    plans = [create("stronghold", on_host("W")).plan(LARGE.at_depth(depth), Room()) for depth in (8, 20)]
    small = [small_bytes(LARGE.at_depth(depth)) for depth in (8, 20)]
    assert plans[1].device["activations"] - plans[0].device["activations"] == small[1] - small[0]
    assert [plan.host["activations"] for plan in plans] == [
        6 * LARGE.boundary_bytes,
        18 * LARGE.boundary_bytes,
    ]


def test_sims_peak_is_less_by_the_boundaries_that_left() -> None:
    """Without them it is at the bottom layer, beside the norms of all others' gradients."""
    workload = tiny(num_layers=5, seq_len=64)
    peaks = {}
    for memory in ("device", "host"):
        options = {**on_host("W5"), "activations": memory}
        with Tracker() as tracker:
            train("stronghold", workload, 2, device="sim", **options)
        peaks[memory] = tracker.stats()["device_peak"]
    norms = 4 * 12 * 512  # of four layers, each norm in a unit of memory
    assert peaks["device"] - peaks["host"] == 3 * workload.boundary_bytes - norms


@pytest.mark.parametrize("method", ["stronghold", "l2l"])
def test_another_memory_than_the_two_is_one_line(method: str) -> None:
    with pytest.raises(ValueError, match="activations: expected device or host, got 'disk'; try"):
        create(method, {"activations": "disk"}).plan(tiny(), Room())


# ---- Who chooses them

HOMES = [  # each needs less of the device than those before it
    {"ends": "device", "activations": "device"},
    {"ends": "host", "activations": "device"},
    {"ends": "device", "activations": "host"},
    {"ends": "host", "activations": "host"},
]


def least_of(method: str, homes: dict[str, str]) -> int:
    return create(method, homes).plan(LONG, Room(1, GIB)).device_bytes


@pytest.mark.parametrize("method", ["stronghold", "l2l"])
def test_a_home_on_the_host_is_chosen_only_where_nothing_else_fits(method: str) -> None:
    sizes = [least_of(method, homes) for homes in HOMES]
    assert sizes == sorted(sizes, reverse=True)
    for size, homes in zip(sizes, HOMES, strict=True):
        room = Room(size, GIB)
        planned = create(method, {}).plan(LONG, room)
        assert planned.shortfall(room) is None and not planned.tried
        chosen = {name: planned.options.get(name, "device") for name in homes}
        assert chosen == homes


@pytest.mark.parametrize("rate", ["inbound_bytes_per_second", "host_adam_params_per_second"])
def test_of_those_that_fit_the_fastest_is_chosen(rate: str) -> None:
    """Boundaries are many bytes over a slow link; ends are many updates of a slow host."""
    rates = replace(
        Rates(1e12, inbound_bytes_per_second=1e10, host_adam_params_per_second=1e9), **{rate: 1e6}
    )
    room = Room(least_of("stronghold", HOMES[1]), GIB, rates=rates)
    seconds = [create("stronghold", homes).plan(LONG, room).step_seconds for homes in HOMES[1:]]
    planned = create("stronghold", {}).plan(LONG, room)
    assert planned.step_seconds == min(seconds)
    assert planned.options.get("activations") == (None if rate.startswith("inbound") else "host")


def test_a_home_that_was_asked_for_is_kept() -> None:
    planned = create("stronghold", {"activations": "device"}).plan(LONG, Room(1, GIB))
    assert planned.options["activations"] == "device" and planned.options["ends"] == "host"


def test_deeper_models_and_longer_samples_fit_by_it() -> None:
    room = Room(least_of("stronghold", HOMES[2]), GIB)

    def most(change: Callable[[int], Workload], activations: str | None) -> int:
        trained = create("stronghold", {"activations": activations})
        return largest_depth(lambda size: trained.plan(change(size), room).shortfall(room) is None)

    for change in (LONG.at_depth, lambda batch: replace(LONG, batch_size=batch)):
        assert most(change, "device") < most(change, "host") == most(change, None)


def test_a_refusal_names_what_was_tried() -> None:
    job = Job("stronghold", LONG, budget=Budget(2**20, GIB), device="sim")
    refusal = "there is 1.0 MiB; tried, too: all on the device, ends=host, activations=host; "
    resolved, _, refused = resolve(job)
    assert refusal in str(refused) and resolve(resolved)[2] == refused
    kept_on_device = replace(job, options={"activations": "device"})
    assert "there is 1.0 MiB; tried, too: all on the device; " in str(resolve(kept_on_device)[2])
