"""Attention with grouped heads: where torch has no kernel for it, it gets a head of keys for each head of queries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.models import model
from harness.models.gpt import DTYPES
from harness.models.grouped_heads import repeated
from tests.support.configured import configured


@pytest.mark.parametrize(("dtype", "key_heads"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_a_layer_repeats_its_keys_in_fp32_alone(
    dtype: str, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, attention = set(), torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **settings: object) -> Tensor:
        seen.add((query.shape[1], key.shape[1], value.shape[1]))
        return attention(query, key, value, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    workload = configured("llama", dtype=dtype)
    layer = model.new_layer(workload, 0).to_empty(device="cpu")
    layer(torch.zeros(1, 8, workload.hidden_size, dtype=DTYPES[dtype]))
    assert seen == {(4, key_heads, key_heads)}


def test_repeated_heads_attend_as_grouped_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (6, 2, 2))
    attention = torch.nn.functional.scaled_dot_product_attention
    grouped = attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(attention(query, repeated(key, 6), repeated(value, 6), is_causal=True), grouped)
