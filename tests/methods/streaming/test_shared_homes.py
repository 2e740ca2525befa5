"""Homes that several ranks share: their parts together are one rank's home, and they train as the reference does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.core.job import Job, Room, Workload
from harness.core.method import create
from harness.devices.exchange import Ranks
from harness.devices.memory_rehearsal import predict
from harness.devices.streams import Device
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from methods.offload import adamw_kernel
from methods.offload.adamw import Piece, published_settings
from methods.offload.layout import cut_pieces
from methods.streaming.layer_state import LayerState
from methods.streaming.starting_values import draw_states
from tests.support.configured import configured
from tests.support.training import small_bytes, tiny

SMALL = Workload(
    num_layers=4, hidden_size=64, num_heads=4, seq_len=32, batch_size=4, vocab_size=512, learning_rate=0.003
)
NUM_RANKS = 4
SHARED = [
    ("l2l", {"world_size": 2}, {}),
    ("l2l", {"world_size": 4}, {"dtype": "bf16"}),
    ("stronghold", {"world_size": 2}, {}),
    ("stronghold", {"world_size": 4}, {}),
    ("stronghold", {"world_size": 2}, {"dtype": "bf16"}),
    ("stronghold", {"world_size": 2, "activations": "host"}, {"micro_batches": 2}),
    ("stronghold", {"world_size": 2, "placement": "R1W3", "window_size": 1}, {"dtype": "fp16"}),
    ("stronghold", {"world_size": 2, "placement": "R1W3", "window_size": 2}, {}),
    (
        "stronghold",
        {"world_size": 4, "placement": "R1W3", "window_size": 2},
        {"dtype": "bf16", "clip_norm": 0.0},
    ),
    ("stronghold", {"world_size": 2}, {"clip_norm": 0.0}),
    ("stronghold", {"world_size": 2, "placement": "R4"}, {}),
    ("stronghold", {"world_size": 4}, {"hidden_size": 36, "vocab_size": 97}),  # parts that end in padding
]


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "options", "changes"), SHARED, ids=str)
def test_ranks_train_as_the_reference_does_on_the_whole_batch(
    name: str, options: dict[str, Any], changes: dict[str, Any], shared_results: Path
) -> None:
    job = Job(name, Workload(**{**vars(SMALL), **changes}), options, steps=10, warmup=2)
    (record,) = Sweep(shared_results).run([resolve(job)])
    assert record.gate and record.gate.passed, (record.reason, record.gate)
    assert len(record.machine["ranks"]) == options["world_size"]
    assert len(record.tensors) == 52 and all(
        tensor["exp_avg"] and tensor["exp_avg_sq"] for tensor in record.tensors.values()
    )
    if record.job.workload.dtype == "fp32":
        assert record.gate.evidence["loss_difference"] <= 1e-6


@pytest.mark.heavy
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_ranks_train_a_model_by_its_config_as_the_reference_does(family: str, shared_results: Path) -> None:
    job = Job(
        "stronghold",
        configured(family, batch_size=4),
        {"world_size": 2, "placement": "R1W2"},
        steps=5,
        warmup=1,
    )
    (record,) = Sweep(shared_results).run([resolve(job)])
    assert record.gate and record.gate.passed, (record.reason, record.gate)
    assert record.gate.evidence["loss_difference"] <= 1e-6


@contextmanager
def home_of(rank: int, num_ranks: int, workload: Workload) -> Iterator[LayerState]:
    """The home of one of several ranks that exchange nothing, drawn."""
    with Device("cpu") as cpu:
        cpu.ranks = Ranks("sim", num_ranks)
        cpu.ranks.rank = rank
        state = LayerState.of_model(cpu, workload, 1, host=True)
        draw_states([state], workload)
        yield state


def slabs_of(num_ranks: int, workload: Workload) -> list[torch.Tensor]:
    """The slabs of all ranks' homes of a layer, joined, after two updates by the same whole gradient."""
    parts: list[list[torch.Tensor]] = []
    for rank in range(num_ranks):
        with home_of(rank, num_ranks, workload) as state:
            grads = torch.randn(state.whole_numel, generator=torch.Generator().manual_seed(1))
            state.grads.copy_(grads[state.first : state.first + len(state.grads)])
            for step in (1, 2):
                state.update(published_settings(0.01 * step), 0.5)
            parts.append([slab for slab in state.current if slab is not None])
    return [torch.cat(slabs) for slabs in zip(*parts, strict=True)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("hidden_size", [32, 36])
def test_parts_are_drawn_and_updated_to_the_bits_of_the_whole(dtype: str, hidden_size: int) -> None:
    workload = tiny(hidden_size=hidden_size, num_heads=4, dtype=dtype)
    with home_of(0, 1, workload) as alone:
        # the rest is padding
        inside = torch.cat([torch.arange(start, stop) for start, stop, _ in alone.pieces])
    for whole, joined in zip(slabs_of(1, workload), slabs_of(NUM_RANKS, workload), strict=True):
        assert torch.equal(whole[inside], joined[inside])


def test_a_part_has_the_pieces_that_lie_in_it() -> None:
    pieces = [Piece(0, 10, 0), Piece(16, 40, 1), Piece(48, 64, 0)]
    assert cut_pieces(pieces, 0, 32) == [Piece(0, 10, 0), Piece(16, 32, 1)]
    assert cut_pieces(pieces, 32, 64) == [Piece(0, 8, 1), Piece(16, 32, 0)]


def test_a_rank_plans_its_part_of_what_ranks_share() -> None:
    """By hand: of 16 bytes a parameter of a windowed layer on the host half; of a resident one all on the device."""
    load = Workload(num_layers=8, hidden_size=64, num_heads=4, seq_len=32, batch_size=4, vocab_size=512)
    one, two = (
        create("stronghold", {"placement": "R2W6", "world_size": n}).plan(load, Room()) for n in (1, 2)
    )
    numbers, copies = 512 + 4 * 6, 2 * 4 * load.layer_params
    assert one.host_bytes == numbers + 6 * 16 * load.layer_params
    assert two.host_bytes == numbers + 6 * 16 * load.layer_params // 2 + copies
    assert {**two.device, "activations": 0} == {**one.device, "activations": 0}
    assert two.moved_bytes * 2 == one.moved_bytes and two.options == {**one.options, "world_size": 2}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "options"), [("stronghold", {"placement": "R1W3"}), ("l2l", {})])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_plan_is_the_rehearsals_peak_of_a_rank(
    name: str, options: dict[str, Any], dtype: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Workload(
        num_layers=4, hidden_size=256, num_heads=16, seq_len=64, batch_size=4, vocab_size=512, dtype=dtype
    )
    trained = create(name, {"world_size": num_ranks, **options})
    # a plan has room for an update without it
    monkeypatch.setattr(adamw_kernel, "compiled_library", lambda: None)
    planned, predicted = trained.plan(load, Room()), predict(trained, load)
    assert predicted.device_bytes <= planned.device_bytes <= predicted.device_bytes + small_bytes(load)
    host_bytes = planned.host_bytes - planned.host["buffers"]  # gloo's, which a rehearsal does without
    assert host_bytes == pytest.approx(predicted.host_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        (
            {"world_size": 64},
            {"batch_size": 64},
            "--ranks: expected at most 31 for layers of 16020 parameters, got 64",
        ),
        (
            {"placement": "R1P1W1S1D1"},
            {},
            "placement: expected only layers R and W with --ranks 2, got D, P, S; try --placement R1W4",
        ),
        ({"clipping": "speculate"}, {}, "clipping: expected deferred with --ranks 2, got speculate; try"),
        ({"disk": "/tmp"}, {}, "disk: expected none with --ranks 2, got /tmp; try without --disk"),
        ({}, {"dropout": 0.1}, "dropout and --ranks exclude each other"),
        ({}, {"batch_size": 3}, "a batch of 3 samples splits over 1, 3 ranks, not over 2"),
        ({}, {"micro_batches": 4}, "expected a divisor of the 2 samples"),
    ],
    ids=str,
)
def test_what_ranks_do_not_share_is_one_line(
    options: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    stronghold = create("stronghold", {"world_size": 2, **options})
    with pytest.raises(ValueError, match=reason) as error:
        stronghold.plan(tiny(**{"num_layers": 5, "batch_size": 4, **changes}), Room())
    assert "\n" not in str(error.value)


def test_a_plan_without_a_placement_has_none_that_ranks_do_not_share() -> None:
    load = tiny(num_layers=5, batch_size=4, clip_norm=0.0)
    for device_bytes in (None, 300_000, 10**6):
        plan = create("stronghold", {"world_size": 2}).plan(load, Room(device_bytes, 10**6))
        assert set(plan.options["placement"]) <= {*"RW0123456789"}
