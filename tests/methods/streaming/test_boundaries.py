"""Boundaries on the host: the very bits of resident training, and both memories' peaks by arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from harness.core.job import Room, Workload
from harness.core.method import create
from harness.devices.memory_account import Tracker
from harness.devices.memory_rehearsal import predict
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
LARGE = Workload(num_layers=6, hidden_size=256, seq_len=64, vocab_size=512)


def on_host(placement: str, **options: Any) -> dict[str, Any]:
    return {"placement": placement, "window_size": 2, "activations": "host", **options}


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("placement", ["R5", "W5", "R1P1W2S1", "D4R1"])
@pytest.mark.cover(1)
def test_boundaries_on_the_host_have_the_very_bits_of_resident_training(placement: str, changes: dict) -> None:
    workload = tiny(**SMALL, **changes)
    trained = train("stronghold", workload, STEPS, **on_host(placement))
    assert difference(trained, train_resident(workload, STEPS)) == ""


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
    there, here = (create("stronghold", {**on_host("W5"), "activations": each}) for each in ("host", "device"))
    assert two - one == there.plan(workload, Room()).moved_bytes
    assert two - one - here.plan(workload, Room()).moved_bytes == 2 * 3 * workload.boundary_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("batch", [{}, {"batch_size": 8, "micro_batches": 4}], ids=str)
@pytest.mark.parametrize("placement", ["W6", "R1P1W2S2"])
@pytest.mark.cover(1)
def test_the_plan_is_the_peak_of_both_memories(
    placement: str, batch: dict, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload(num_layers=6, hidden_size=256, seq_len=64, vocab_size=512, dtype=dtype, **batch)
    stronghold = create("stronghold", {"placement": placement, "activations": "host"})
    monkeypatch.setattr(adamw_kernel, "load", lambda: None)  # a plan has room for an update without it
    predicted, planned = predict(stronghold, workload), stronghold.plan(workload, Room())
    assert predicted.device_bytes <= planned.device_bytes <= predicted.device_bytes + small_bytes(workload)
    drawn = 2**20  # starting values of resident layers on their way through the host
    assert planned.host_bytes - 1024 <= predicted.host_bytes <= planned.host_bytes + drawn


def test_a_deeper_model_takes_no_more_activations_on_the_device_and_each_its_own_on_the_host() -> None:
    plans = [create("stronghold", on_host("W")).plan(LARGE.at_depth(depth), Room()) for depth in (8, 20)]
    small = [small_bytes(LARGE.at_depth(depth)) for depth in (8, 20)]
    assert plans[1].device["activations"] - plans[0].device["activations"] == small[1] - small[0]
    assert [plan.host["activations"] for plan in plans] == [6 * LARGE.boundary_bytes, 18 * LARGE.boundary_bytes]


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


def test_another_memory_than_the_two_is_one_line() -> None:
    with pytest.raises(ValueError, match="activations: expected device or host, got 'disk'; try"):
        create("stronghold", {"activations": "disk"}).plan(tiny(), Room())
