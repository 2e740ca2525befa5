"""Memory predicted without memory: against real bytes, the published log, and the plans' arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import psutil
import pytest
import torch

from harness.core.data import batches
from harness.core.job import Budget, Room, Workload
from harness.core.method import Unavailable, create
from harness.devices import room
from harness.devices.memory_account import Tracker
from harness.devices.memory_rehearsal import predict
from tests.support.configured import configured
from tests.support.published_megatron import published_megatron
from tests.support.training import settled, small_bytes, tiny

MIB = 2**20
PUBLISHED = Workload(num_layers=32, dropout=0.1)
OURS: list[tuple[str, dict[str, Any]]] = [
    ("resident", {}),
    ("l2l", {}),
    ("stronghold", {"window_size": 3, "resident_layers": 0}),
    ("stronghold", {"window_size": 1, "resident_layers": 1}),
    ("stronghold", {"window_size": 2, "resident_layers": 0, "activations": "host"}),
]
SIZES: list[Any] = [
    {"hidden_size": 512, "num_layers": 3, "vocab_size": 12576},  # a layer is several blocks of an update
    {"hidden_size": 512, "num_layers": 3, "vocab_size": 256},  # a layer's transient is larger than the loss's
    {"hidden_size": 128, "num_layers": 4, "seq_len": 64, "vocab_size": 512},
    {
        "hidden_size": 256,
        "num_layers": 3,
        "seq_len": 256,
        "vocab_size": 512,
        "batch_size": 6,
        "micro_batches": 3,
    },
    pytest.param(
        {"hidden_size": 256, "num_layers": 3, "seq_len": 1024, "vocab_size": 512}, marks=pytest.mark.heavy
    ),
    pytest.param({"hidden_size": 1024, "num_layers": 3, "vocab_size": 1024}, marks=pytest.mark.heavy),
    pytest.param(  # fewer tokens than hidden units
        {"hidden_size": 1024, "num_layers": 3, "seq_len": 32, "batch_size": 1, "vocab_size": 4096},
        marks=pytest.mark.heavy,
    ),
]
# The loss's transient is larger, or, in bf16, that of the ends' update.
MANY_PARTS = {
    "hidden_size": 128,
    "num_layers": 3,
    "seq_len": 64,
    "vocab_size": 8192,
    "batch_size": 6,
    "micro_batches": 6,
}

# A block of the loss has 220 tokens: 129,000 logits fewer than it may have.
MANY_WORDS = {"hidden_size": 128, "num_layers": 3, "seq_len": 512, "batch_size": 1, "vocab_size": 151_936}


def in_turns(sizes: list[Any]) -> list[Any]:
    """Each size with one dtype: a plan's terms are those of sizes, at the bytes of a dtype's numbers."""
    return [
        pytest.param(size.values[0], dtype, marks=size.marks)
        if hasattr(size, "marks")
        else pytest.param(size, dtype)
        for size, dtype in zip(sizes, itertools.cycle(["fp32", "bf16"]), strict=False)
    ]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("method", "options"), OURS)
def test_the_rehearsal_is_a_real_runs_device_peak_to_the_byte(method: str, options: dict, dtype: str) -> None:
    workload, steps = tiny(num_layers=3, dtype=dtype), 3
    with Tracker() as tracker:
        tokens = torch.from_numpy(batches(workload, steps)).to("sim")
        inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        for _ in settled(method, options, workload).train(workload, zip(inputs, targets, strict=True), "sim"):
            pass
        measured = tracker.stats()["device_peak"]
    assert predict(create(method, options), workload, steps).device_bytes == measured


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [*SIZES, MANY_PARTS, MANY_WORDS])
@pytest.mark.parametrize(("method", "options"), OURS[1:])
@pytest.mark.cover(1)
def test_the_plan_is_the_rehearsals_peak_and_room_for_small_numbers(
    method: str, options: dict, size: dict, dtype: str
) -> None:
    workload = Workload(**size, dtype=dtype)
    trained = create(method, options)
    planned, peak = trained.plan(workload, Room()).device_bytes, predict(trained, workload).device_bytes
    assert peak <= planned <= peak + small_bytes(workload)


@pytest.mark.parametrize(("size", "dtype"), in_turns(SIZES))
def test_the_plan_of_resident_training_is_within_a_tenth_of_the_rehearsal(size: dict, dtype: str) -> None:
    workload, trained = Workload(**size, dtype=dtype), create("resident", {})
    assert trained.plan(workload, Room()).device_bytes == pytest.approx(
        predict(trained, workload).device_bytes, rel=0.1
    )


@pytest.mark.parametrize(("size", "dtype"), in_turns([*SIZES[::2], MANY_PARTS]))
def test_the_plan_of_megatron_core_is_within_a_tenth_of_the_rehearsal(size: dict, dtype: str) -> None:
    workload, trained = Workload(**size, dtype=dtype), create("megatron-lm", {})
    assert trained.plan(workload, Room()).device_bytes == pytest.approx(
        predict(trained, workload).device_bytes, rel=0.1
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_so_is_its_plan_of_a_model_by_its_config(dtype: str) -> None:
    workload = configured("qwen3", seq_len=64, batch_size=8, dtype=dtype)
    trained = create("megatron-lm", {})
    assert trained.plan(workload, Room()).device_bytes == pytest.approx(
        predict(trained, workload).device_bytes, rel=0.1
    )


def test_a_streamed_layer_adds_16_bytes_a_parameter_to_the_host_and_its_input_to_the_device() -> None:
    small = Workload(hidden_size=512, vocab_size=2048)
    shallow, deep = (predict(create("l2l", {}), small.at_depth(depth)) for depth in (4, 6))
    layer = small.layer_params
    assert deep.host_bytes - shallow.host_bytes == pytest.approx(2 * 16 * layer, rel=1e-3)
    # Fullest in the top layer's backward pass, before there is any gradient's norm.
    assert deep.device_bytes - shallow.device_bytes == 2 * small.boundary_bytes


@pytest.mark.heavy
def test_resident_training_is_fullest_where_the_tied_embeddings_gradients_are_summed() -> None:
    workload = Workload(num_layers=8)
    tied = 2 * 4 * workload.vocab_size * workload.hidden_size
    by_hand = 16 * workload.num_params + tied
    assert predict(create("resident", {}), workload).device_bytes == pytest.approx(by_hand, abs=MIB)


@pytest.mark.heavy
def test_the_published_megatron_needs_what_its_log_says() -> None:
    # Published log, megatron-lm, 32 layers: max allocated 29775.17 MB.
    assert published_megatron(PUBLISHED).device_bytes / MIB == pytest.approx(29_775.17, rel=0.005)


def test_a_layer_of_the_published_megatron_is_16_bytes_a_parameter_and_its_input() -> None:
    shallow, deep = (published_megatron(PUBLISHED.at_depth(depth)).device_bytes for depth in (2, 4))
    assert (deep - shallow) / 2 / MIB == pytest.approx(800.4, abs=0.1)


@pytest.mark.heavy
def test_a_prediction_takes_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    predicted = predict(
        create("stronghold", {"window_size": 3, "resident_layers": 0}), Workload(num_layers=8)
    )
    assert predicted.device_bytes + predicted.host_bytes > 9 * 2**30
    assert psutil.Process().memory_info().rss - before < 0.5 * 2**30


def test_a_method_without_a_rehearsal_says_so() -> None:
    with pytest.raises(Unavailable, match="has no memory rehearsal"):
        predict(create("zero-offload", {}), tiny())


@pytest.mark.parametrize(
    ("seq_len", "hidden_size", "num_heads", "dtype"), [(64, 128, 16, "fp32"), (128, 64, 4, "bf16")]
)
def test_what_is_set_aside_for_dropout_on_a_cpu_is_what_it_takes(
    seq_len: int, hidden_size: int, num_heads: int, dtype: str
) -> None:
    """At most a fifth more, by rehearsals with and without dropout; on a GPU nothing is set aside."""
    load = Workload(3, hidden_size, num_heads, seq_len, 2, vocab_size=64, dtype=dtype)
    dropping = dataclasses.replace(load, dropout=0.1)
    taken = predict(create("l2l", {}), dropping).device_bytes - predict(create("l2l", {}), load).device_bytes
    aside = dropping.dropout_bytes
    assert taken <= aside < 1.2 * taken
    rooms = [
        room.room_within(Budget(2**28, 2**29), "sim", workload).device_bytes for workload in (load, dropping)
    ]
    assert rooms == [2**28, 2**28 - aside]
