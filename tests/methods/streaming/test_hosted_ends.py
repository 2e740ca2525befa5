"""Ends at home on the host train as resident ones do; their bytes, copies and seconds; who chooses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.core.job import GIB, Room, Workload
from harness.core.method import create
from harness.devices import named_machines
from harness.devices.memory_rehearsal import predict
from harness.models import named_models
from harness.plan.resources import compute_seconds, host_update_seconds
from methods.offload import adamw_kernel
from methods.streaming.placement.placed_layers import PlacedLayers
from methods.streaming.placement.planner import StepCosts
from tests.methods.test_agree import difference
from tests.support.bugs import COMMITTED, overflow
from tests.support.configured import configured
from tests.support.planting import planted
from tests.support.races import find_races
from tests.support.training import (
    losses_free_and_at_the_peak,
    overflowing,
    small_bytes,
    tiny,
    train,
    train_resident,
)

STEPS = 6
SIZES = {"num_layers": 3, "hidden_size": 32, "num_heads": 2}
TRAINED: list[tuple[str, dict[str, Any]]] = [
    ("l2l", {}),
    ("stronghold", {"placement": "W3", "window_size": 2}),
    ("stronghold", {"placement": "P1S1R1", "clipping": "speculate"}),
]
CHANGES: list[dict[str, Any]] = [
    {},
    {"clip_norm": 0.0},
    {"dtype": "bf16"},
    {"dtype": "bf16", "clip_norm": 0.0},
    {"dtype": "fp16"},
    {"micro_batches": 2},
    {"clip_norm": COMMITTED},
]
TIED = {"gpt": True, "llama": False, "qwen2": True}  # families, each with one state for both ends or two
methods = pytest.mark.parametrize(("method", "options"), TRAINED, ids=["l2l", "windowed", "mixed"])


def model(family: str, **changes: Any) -> Workload:
    """A small model; the slabs of these sizes have no padding, which plans do not count."""
    return tiny(**SIZES, **changes) if family == "gpt" else configured(family, **changes)


@methods
@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("family", TIED)
@pytest.mark.cover(1)
def test_training_has_the_very_bits_of_resident(
    family: str, changes: dict[str, Any], method: str, options: dict[str, Any]
) -> None:
    workload = model(family, **changes)
    assert workload.anatomy.is_tied == TIED[family]
    hosted = train(method, workload, STEPS, ends="host", **options)
    assert difference(hosted, train_resident(workload, STEPS)) == ""


@methods
def test_steps_that_overflow_are_skipped_with_the_same_bits(method: str, options: dict[str, Any]) -> None:
    workload = overflowing(num_layers=3)
    hosted = train(method, workload, STEPS, ends="host", **options)
    assert difference(hosted, train_resident(workload, STEPS)) == ""


@methods
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.cover(0)
def test_copies_and_updates_wait_for_what_they_need(
    family: str, method: str, options: dict[str, Any]
) -> None:
    assert find_races(create(method, {**options, "ends": "host"}), model(family)) == []


@methods
def test_so_they_do_where_steps_overflow(
    method: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    overflow(monkeypatch)
    assert find_races(create(method, {**options, "ends": "host"}), overflowing(num_layers=3), steps=4) == []


@pytest.mark.parametrize(
    "wait",
    ["        self.slot.arrive()\n        self.gradients", "            self.gradients.await_room()\n"],
)
def test_a_wait_that_is_left_out_is_a_race(wait: str) -> None:
    """Before the head is used, for its weights; before the embedding's gradient, for the head's, which leaves. Resident
    layers wait for nothing, by which these copies would be waited for, too."""
    without = wait.replace("self.slot.arrive()", "pass").replace("self.gradients.await_room()", "pass")
    with planted("methods/streaming/embedding_and_head.py", wait, without):
        assert find_races(create("stronghold", {"placement": "R3", "ends": "host"}), model("llama")) != []


@methods
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", TIED)
@pytest.mark.cover(1)
def test_the_plan_foretells_what_one_more_step_moves(
    family: str, dtype: str, method: str, options: dict[str, Any]
) -> None:
    workload, options = model(family, dtype=dtype), {**options, "ends": "host", "clipping": "deferred"}
    options = options if method == "stronghold" else {"ends": "host"}
    one, two = (train(method, workload, steps, **options).trained.moved_bytes for steps in (1, 2))
    assert create(method, options).plan(workload, Room()).moved_bytes == two - one


@pytest.mark.parametrize(
    ("method", "placement"), [("l2l", None), ("stronghold", "R3"), ("stronghold", "S1P1R1")], ids=str
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", TIED)
@pytest.mark.cover(1)
def test_the_plan_is_the_rehearsals_peak_and_room_for_small_numbers_in_both_memories(
    family: str, dtype: str, method: str, placement: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = model(family, dtype=dtype)
    trained = create(method, {"ends": "host"} | ({"placement": placement} if placement else {}))
    # a plan has room for an update without it
    monkeypatch.setattr(adamw_kernel, "compiled_library", lambda: None)
    planned, predicted = trained.plan(workload, Room()), predict(trained, workload)
    room = small_bytes(workload) + workload.given_bytes
    assert predicted.device_bytes <= planned.device_bytes <= predicted.device_bytes + room
    drawn = 2**20  # starting values of resident layers on their way through the host
    assert planned.host_bytes == pytest.approx(predicted.host_bytes, rel=0.01, abs=drawn)


@pytest.mark.parametrize("placement", ["R3", "S1P1R1"])
def test_an_update_by_the_kernel_stays_within_the_plan(placement: str) -> None:
    stronghold, workload = (
        create("stronghold", {"ends": "host", "placement": placement}),
        model("gpt", dtype="bf16"),
    )
    assert predict(stronghold, workload).device_bytes <= stronghold.plan(workload, Room()).device_bytes


@pytest.mark.parametrize("ends", ["device", "host"])
def test_a_head_in_several_blocks_of_logits_stays_within_the_plan(ends: str) -> None:
    """Of GPT-2's vocabulary, 667 tokens at once; in fp32 no block has a gradient beside that of all tokens."""
    workload = Workload(1, 256, seq_len=1024, batch_size=2, vocab_size=50304)
    trained = create("stronghold", {"placement": "W1", "window_size": 1, "ends": ends})
    planned, predicted = trained.plan(workload, Room()), predict(trained, workload)
    assert 0 <= planned.device_bytes - predicted.device_bytes <= small_bytes(workload)


@pytest.mark.parametrize("method", ["l2l", "stronghold"])
def test_a_home_that_was_asked_for_is_kept_in_the_planned_options(method: str) -> None:
    """A run plans again, from these options: on a device too small for them, it would take the other home."""
    planned = create(method, {"ends": "device"}).plan(model("llama"), Room())
    assert planned.options["ends"] == "device"


def test_a_budget_of_the_peak_is_enough() -> None:
    free, held = losses_free_and_at_the_peak(model("llama"), placement="R1P1W1", window_size=1, ends="host")
    assert held == free


def test_bytes_by_kind_are_those_of_the_hand() -> None:
    """An untied head and the embedding take turns in room for the larger one's weights and gradient."""
    workload = model("llama")
    embedding, head = workload.anatomy.end_parts
    assert (embedding, head) == (101 * 32, 101 * 32 + 32)
    plan = PlacedLayers(workload, "RRR", 1, hosted_ends=[embedding, head]).plan()
    assert plan.device["weights"] == plan.device["gradients"] == 4 * (head + 3 * workload.layer_params)
    assert plan.device["optimizer"] == 8 * 3 * workload.layer_params
    numbers = 512 + 2 * 4
    assert plan.host == {
        "weights": 4 * (embedding + head),
        "gradients": 4 * (embedding + head),
        "optimizer": 8 * (embedding + head) + numbers,
    }


@pytest.mark.parametrize("method", ["stronghold", "l2l"])
def test_ends_are_on_the_host_only_where_the_device_is_too_small_for_them(method: str) -> None:
    workload, options = model("llama"), {"activations": "device"}
    trained = create(method, options)
    device, host = (
        create(method, {"ends": home, **options}).plan(workload, Room(1, 1)) for home in ("device", "host")
    )
    least = {"device": device.device_bytes, "host": host.device_bytes}
    assert least["host"] < least["device"]
    chosen = {
        home: trained.plan(workload, Room(size, GIB)).options.get("ends") for home, size in least.items()
    }
    assert chosen == {"device": None, "host": "host"}
    assert trained.plan(workload, Room(least["host"] - 1, GIB)).shortfall(Room(least["host"] - 1, GIB))


@pytest.mark.parametrize("method", ["stronghold", "l2l"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ends": "disk"}, "ends: expected device or host, got 'disk'"),
        ({"ends": "host", "world_size": 2}, "ends: expected device with --ranks 2, got host"),
    ],
)
def test_a_home_that_there_is_not_is_one_line(method: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        create(method, options).plan(model("llama", hidden_size=64), Room())


def test_batches_of_32_samples_of_llama_3_8b_fit_an_rtx_4090() -> None:
    """With both ends and all boundaries on the device it takes 31.0 GiB there. The host is a larger one: it holds 13
    bytes a parameter."""
    workload = Workload(**named_models.load("Llama-3-8B").sizes, dtype="bf16", batch_size=32)
    room = replace(named_machines.load("rtx4090").room, host_bytes=120 * GIB)
    planned = create("stronghold", {}).plan(workload, room)
    assert planned.shortfall(room) is None and planned.options["ends"] == "host"
    on_device = create("stronghold", {"ends": "device", "activations": "device"}).plan(workload, room)
    assert on_device.device_bytes / GIB == pytest.approx(31.0, abs=0.05)


def test_a_forecast_counts_the_ends_copies_and_their_update_on_the_host() -> None:
    """By hand, with every layer on the device: after the backward pass the embedding's gradient goes home, is updated
    and returns, before the next forward pass may begin."""
    workload = model("llama", dtype="bf16")
    rates = named_machines.load("rtx4090").room.rates
    assert rates is not None
    embedding = workload.anatomy.end_parts[0]
    copied = 2 * embedding * (1 / rates.inbound_bytes_per_second + 1 / rates.outbound_bytes_per_second)
    expected = (
        sum(compute_seconds(workload, rates)) + copied + max(host_update_seconds(embedding, workload, rates))
    )
    hosted = StepCosts(workload, rates, None, ends="host")
    rows = {row.resource: row for row in hosted.rows()}
    assert rows["the embedding's way home"].seconds == pytest.approx(expected)
    both = workload.end_params
    assert rows["link inbound"].seconds == pytest.approx(2 * both / rates.inbound_bytes_per_second)
    assert rows["host cores"].seconds == pytest.approx(both / rates.host_adam_params_per_second)
    counts = {"R": workload.num_layers}
    assert hosted.forecast(counts).seconds > StepCosts(workload, rates, None).forecast(counts).seconds
