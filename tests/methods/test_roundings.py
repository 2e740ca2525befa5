"""Other roundings: each computes the reference's gradients, to rounding, in other bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness.core import data
from harness.core.method import create
from harness.gate import probe
from methods.resident import ReferenceModel
from methods.shared.roundings import ROUNDINGS, rounding_of
from tests.support.tiny import TINY

SIZE = dataclasses.replace(TINY, batch_size=3, vocab_size=512, seq_len=64)


def gradients(rounding: str | None) -> dict[str, torch.Tensor]:
    """By the names of the model's tensors, of the first step, as its first moments tell them."""
    load = dataclasses.replace(SIZE, clip_norm=0.0)
    tokens = torch.from_numpy(data.batches(load, 1))[0]
    model = ReferenceModel(load, "cpu", rounding_of(rounding) if rounding else None)
    model.step(1, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return {state.name: state.exp_avg for state in model.tensors() if state.exp_avg is not None}


@pytest.fixture(scope="module")
def plain_gradients() -> dict[str, torch.Tensor]:
    return gradients(None)


@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounding_computes_the_same_gradients_in_other_bits(
    name: str, plain_gradients: dict[str, torch.Tensor]
) -> None:
    rounded_gradients = gradients(name)
    for tensor, right in plain_gradients.items():
        assert torch.dist(rounded_gradients[tensor], right) <= 1e-4 * right.norm() + 1e-9, tensor
    assert any(not torch.equal(rounded_gradients[tensor], right) for tensor, right in plain_gradients.items())


def test_the_probe_s_roundings_are_some_of_them_and_others_are_left_to_try_it_by() -> None:
    of_floor = {name for names in probe.ROUNDINGS for name in names}
    assert of_floor < set(ROUNDINGS) and len(ROUNDINGS) - len(of_floor) >= 8


def test_an_unknown_rounding_is_told_with_the_others() -> None:
    with pytest.raises(ValueError, match="no rounding 'split-product': did you mean split-products"):
        rounding_of("split-product")


def test_the_probe_alone_finds_the_reference_by_other_roundings() -> None:
    with pytest.raises(ValueError, match="no method 'rounded'"):
        create("rounded", {"names": "split-products"})
    assert create("rounded", {"names": "split-products"}, (probe.METHODS,)).label
