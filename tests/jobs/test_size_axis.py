"""Sizes: each is another workload, larger than the one before, and is found again from its workload."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.job import Workload
from harness.jobs.size_axis import OF, SizeAxis

LOAD = Workload(num_layers=3, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)


@given(
    of=st.sampled_from(OF),
    seq_len=st.integers(1, 300),
    parts=st.integers(1, 6),
    power=st.integers(0, 6),
    number=st.integers(1, 500),
)
def test_each_size_is_larger_than_the_one_before_and_is_that_of_its_workload(
    of: str, seq_len: int, parts: int, power: int, number: int
) -> None:
    axis = SizeAxis(of, dataclasses.replace(LOAD, seq_len=seq_len, batch_size=parts), parts, step=2**power)
    assert axis.amount(number + 1) > axis.amount(number) > 0
    assert axis.number(axis.grown(number)) == number
    assert axis.grown(number).batch_size % parts == 0


@pytest.mark.parametrize(
    ("of", "sizes"),
    [
        ("layers", [(8, 2, 16), (16, 2, 16), (24, 2, 16), (32, 2, 16)]),
        ("batch", [(3, 2, 16), (3, 4, 16), (3, 6, 16), (3, 8, 16)]),
        ("seq", [(3, 2, 8), (3, 2, 16), (3, 2, 24), (3, 2, 32)]),
        # one sample of each part, then more of them
        ("tokens", [(3, 2, 8), (3, 2, 16), (3, 4, 16), (3, 6, 16)]),
    ],
)
def test_what_grows_grows_alone(of: str, sizes: list[tuple[int, int, int]]) -> None:
    """Layers, samples and tokens of the first four sizes, in two parts and steps of 8 layers or tokens."""
    loads = [SizeAxis(of, LOAD, 2, 8).grown(number) for number in range(1, 5)]
    assert [(load.num_layers, load.batch_size, load.seq_len) for load in loads] == sizes


@pytest.mark.parametrize(
    ("number", "step"), [(0, 1), (31, 1), (32, 1), (63, 1), (64, 2), (4096, 128), (131_072, 4096)]
)
def test_a_step_of_tokens_is_at_most_a_32nd_of_what_should_fit(number: int, step: int) -> None:
    assert SizeAxis("seq", LOAD).fitting(number).step == step
