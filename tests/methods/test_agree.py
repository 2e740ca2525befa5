"""Every way to train is the same training: the very bits of resident training, which is itself a plain loop's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.core.job import Workload
from tests.support.training import STEPS, TrainingResult, plain_losses, tiny, train, train_resident

DEPTHS = (1, 2, 5)


def windows() -> list[tuple[int, int, int]]:
    """(num_layers, window_size, resident_layers): windows of 1, 2, 3, L - 1 and L."""
    return [
        (depth, window, resident)
        for depth in DEPTHS
        for window in sorted({1, 2, 3, depth - 1, depth})
        for resident in (0, 1)
        if 1 <= window <= depth
    ]


def difference(result: TrainingResult, reference: TrainingResult) -> str:
    """Where two trainings part first, in words; empty where they are the same to the last bit."""
    for name in ("losses", "grad_norms"):
        pairs = zip(getattr(result, name), getattr(reference, name), strict=True)
        for step, (ours, theirs) in enumerate(pairs, start=1):
            if ours != theirs and not (math.isnan(ours) and math.isnan(theirs)):
                return f"{name} at step {step}: {ours!r} instead of {theirs!r}"
    ours, theirs = ({state.name: state for state in each.trained.tensors} for each in (result, reference))
    if ours.keys() != theirs.keys():
        return f"tensors: {sorted(ours.keys() ^ theirs.keys())}"
    for name in theirs:
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            pair = [getattr(each[name], kind) for each in (ours, theirs)]
            if not torch.equal(*((tensor.abs() for tensor in pair) if kind == "exp_avg_sq" else pair)):
                return f"{kind} of {name}"
    return ""


def largest_difference(losses: list[float], reference: list[float]) -> float:
    """Relative, over all steps."""
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference, strict=True))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
@pytest.mark.parametrize("num_layers", DEPTHS)
def test_resident_training_is_that_of_a_plain_loop(num_layers: int, clip_norm: float) -> None:
    workload = tiny(num_layers=num_layers, clip_norm=clip_norm)
    assert largest_difference(train_resident(workload).losses, plain_losses(workload, STEPS)) < 1e-6


def test_clipping_changes_the_training_so_that_it_is_seen() -> None:
    clipped, free = train_resident(tiny()), train_resident(tiny(clip_norm=0.0))
    assert min(clipped.grad_norms) > 1
    assert largest_difference(clipped.losses, free.losses) > 1e-3


def test_one_stale_step_would_be_seen() -> None:
    losses = train_resident(tiny()).losses
    late = train_resident(tiny(learning_rate=0.9)).losses
    assert largest_difference(losses, late) > 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
@pytest.mark.parametrize("num_layers", DEPTHS)
@pytest.mark.cover(2)
def test_l2l_has_the_very_bits_of_resident_training(
    num_layers: int, clip_norm: float, dropout: float
) -> None:
    workload = tiny(num_layers=num_layers, clip_norm=clip_norm, dropout=dropout)
    assert difference(train("l2l", workload), train_resident(workload)) == ""


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
@pytest.mark.parametrize(("num_layers", "window_size", "resident_layers"), windows())
@pytest.mark.cover(2)
def test_stronghold_has_the_very_bits_of_resident_training(
    num_layers: int, window_size: int, resident_layers: int, clip_norm: float, dropout: float
) -> None:
    workload = tiny(num_layers=num_layers, clip_norm=clip_norm, dropout=dropout)
    result = train("stronghold", workload, window_size=window_size, resident_layers=resident_layers)
    assert difference(result, train_resident(workload)) == ""


@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}, {"clip_norm": 0.0}, {"num_layers": 5}])
@pytest.mark.parametrize(("method", "options"), [("l2l", {}), ("stronghold", {"window_size": 1})])
def test_bf16_has_the_very_bits_of_resident_training(
    method: str, options: dict[str, int], changes: dict[str, Any]
) -> None:
    # More than a method promises; kept because it has held for every size and instruction set that was tried.
    workload = tiny(dtype="bf16", **changes)
    assert difference(train(method, workload, **options), train_resident(workload)) == ""


@pytest.mark.parametrize("resident_layers", [2, 5])
def test_window_may_be_larger_than_what_is_streamed(resident_layers: int) -> None:
    workload = tiny(num_layers=5)
    result = train("stronghold", workload, window_size=5, resident_layers=resident_layers)
    assert difference(result, train_resident(workload)) == ""


@pytest.mark.parametrize(("method", "options"), [("l2l", {}), ("stronghold", {"window_size": 1})])
def test_same_bits_where_compute_has_more_threads_than_the_hosts_update(
    method: str, options: dict[str, int], two_threads: None
) -> None:
    workload = tiny(hidden_size=64, num_heads=2, seq_len=33)
    assert difference(train(method, workload, 4, **options), train("resident", workload, 4)) == ""


def micro_batched(**changes: Any) -> Workload:
    return tiny(**{"num_layers": 3, "batch_size": 6, **changes})


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_micro_batches_are_the_training_of_the_whole_batch(micro_batches: int) -> None:
    whole, parts = micro_batched(), micro_batched(micro_batches=micro_batches)
    assert largest_difference(train_resident(parts).losses, train_resident(whole).losses) < 1e-6


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.0}, {"dtype": "bf16"}], ids=str)
@pytest.mark.parametrize("micro_batches", [2, 3])
@pytest.mark.parametrize(("method", "options"), [("l2l", {}), ("stronghold", {"window_size": 2})])
@pytest.mark.cover(1)
def test_layer_by_layer_micro_batches_have_the_very_bits_of_one_after_the_other(
    method: str, options: dict[str, int], micro_batches: int, changes: dict[str, Any]
) -> None:
    workload = micro_batched(micro_batches=micro_batches, **changes)
    assert difference(train(method, workload, 5, **options), train_resident(workload, 5)) == ""
