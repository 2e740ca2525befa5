"""Shards by arithmetic are those that taking layer after layer finds."""

from __future__ import annotations

import math

import pytest

from harness.core.job import Workload
from methods.sharding.partition import adamw_bytes, longest_runs, model_shards


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 12, 40])
@pytest.mark.parametrize("vocab_size", [64, 512, 4096])
def test_shards_of_the_gpt_by_arithmetic_are_the_longest_runs(num_layers: int, vocab_size: int) -> None:
    workload = Workload(num_layers=num_layers, hidden_size=32, num_heads=2, seq_len=16, vocab_size=vocab_size)
    anatomy = workload.anatomy
    blocks = [{f"{i}.{name}": shape for name, shape in anatomy.layer.items()} for i in range(num_layers)]
    parts = (anatomy.embedding, *blocks, anatomy.head)
    layers = [{name: adamw_bytes(math.prod(shape), 4) for name, shape in part.items()} for part in parts]
    for num_blocks in (1, 2, 3, 5, 40):
        room = max(num_blocks * sum(layers[1].values()), *(sum(layer.values()) for layer in layers))
        found = model_shards(workload, num_blocks)
        lengths = [shard.num_layers for count, shard in found for _ in range(count)]
        assert lengths == longest_runs(layers, room)
