"""Chooses where to cut a model into shards: each shard is the longest run of layers that fits. Needs only the standard
library.

Each further layer of a run takes more memory, so taking the longest run that fits gives the fewest shards. A layer's
size is a dict, from a parameter's name to its bytes. By the names, a parameter that several layers of a run share is
counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from operator import or_
from typing import NamedTuple

from harness.core.anatomy import Shape
from harness.core.job import Workload
from methods.shared.memory_needs import ALIGNMENT_BYTES, round_up

Sizes = dict[str, int]
NUM_MOMENTS = 2  # number of AdamW's moments, in fp32


def longest_runs(layers: Sequence[Sizes], room_bytes: int) -> list[int]:
    """Return the number of layers of each shard. No shard takes more than `room_bytes` bytes. Each layer alone must
    fit in `room_bytes`."""
    lengths: list[int] = []
    sizes_of_run: Sizes = {}
    for sizes in layers:
        sizes_of_run = {**sizes_of_run, **sizes}
        if lengths and sum(sizes_of_run.values()) <= room_bytes:
            lengths[-1] += 1
        else:
            lengths.append(1)
            sizes_of_run = sizes
    return lengths


def run_sizes(layers: Sequence[Sizes]) -> set[int]:
    """Return the bytes of every run of consecutive layers, each number once."""
    run_bytes = set()
    for start in range(len(layers)):
        for sizes_of_run in accumulate(layers[start:], or_):
            run_bytes.add(sum(sizes_of_run.values()))
    return run_bytes


def adamw_bytes(numel: int, weight_bytes: int) -> int:
    """Return the bytes that a parameter of `numel` elements takes in a slot: weight, gradient, moments, step count and,
    in mixed precision, an fp32 master. `weight_bytes`: bytes of one element of the weight."""
    states = (NUM_MOMENTS + (weight_bytes < 4)) * round_up(4 * numel) + ALIGNMENT_BYTES
    return 2 * round_up(weight_bytes * numel) + states


class ModelShard(NamedTuple):
    """A shard of a workload's model: a run of consecutive layers. Embedding, blocks and head are its layers; embedding
    and head may share a matrix."""

    has_embedding: bool
    num_blocks: int
    has_head: bool
    first_block: int = 0  # 0 if all blocks are of one kind

    @property
    def num_layers(self) -> int:
        """Return the number of layers; embedding and head count as one each."""
        return self.has_embedding + self.num_blocks + self.has_head

    def num_bytes(self, workload: Workload, bytes_of: Callable[[int, int], int] = adamw_bytes) -> int:
        """Return the shard's bytes. `bytes_of`: returns the bytes of a parameter from its number of elements and the
        bytes of one element of its weight."""
        anatomy, size = workload.anatomy, workload.weight_bytes
        ends = (anatomy.embedding if self.has_embedding else {}) | (anatomy.head if self.has_head else {})
        blocks = range(self.first_block, self.first_block + self.num_blocks)
        block_bytes = [
            count * sum(bytes_of(math.prod(shape), size) for shape in kind.tensors.values())
            for kind, count in anatomy.counts(blocks)
        ]
        return sum(block_bytes) + sum(bytes_of(math.prod(shape), size) for shape in ends.values())


def model_shards(workload: Workload, num_blocks: int) -> list[tuple[int, ModelShard]]:
    """Return the shards into which longest_runs() cuts a workload's model, in order, as pairs: how many equal shards
    follow each other, and one of these shards. A shard may take the bytes of `num_blocks` blocks, or the bytes of the
    embedding or of the head if these are more. `num_blocks`: of the largest, if blocks are unequal."""
    if workload.anatomy.order:
        return _unequal_shards(workload, num_blocks)
    block_bytes = ModelShard(False, 1, False).num_bytes(workload)
    embedding_bytes = ModelShard(True, 0, False).num_bytes(workload)
    head_bytes = ModelShard(False, 0, True).num_bytes(workload)
    room_bytes = max(num_blocks * block_bytes, embedding_bytes, head_bytes)
    blocks_of_shard = room_bytes // block_bytes
    first_blocks = min(workload.num_layers, (room_bytes - embedding_bytes) // block_bytes)
    num_whole, last_blocks = divmod(workload.num_layers - first_blocks, blocks_of_shard)
    counted_shards = (
        (1, ModelShard(True, first_blocks, False)),
        (num_whole, ModelShard(False, blocks_of_shard, False)),
        (1, ModelShard(False, last_blocks, False)),
    )
    runs = [(count, shard) for count, shard in counted_shards if count * shard.num_layers]
    count, last_shard = runs.pop()
    with_head = last_shard._replace(has_head=True)
    if with_head.num_bytes(workload) > room_bytes:
        return [*runs, (count, last_shard), (1, ModelShard(False, 0, True))]
    if count > 1:
        runs.append((count - 1, last_shard))
    return [*runs, (1, with_head)]


def _unequal_shards(workload: Workload, num_blocks: int) -> list[tuple[int, ModelShard]]:
    """Return model_shards() of a model whose blocks are unequal, each shard by itself."""
    anatomy, size = workload.anatomy, workload.weight_bytes

    def sizes_of(tensors: Iterable[tuple[str, Shape]]) -> Sizes:
        return {name: adamw_bytes(math.prod(shape), size) for name, shape in tensors}

    blocks = [sizes_of(anatomy.layer_tensors([index])) for index in range(workload.num_layers)]
    layers = [sizes_of(anatomy.embedding.items()), *blocks, sizes_of(anatomy.head.items())]
    block_bytes = max(sum(sizes.values()) for sizes in blocks)
    ends_bytes = (sum(layers[0].values()), sum(layers[-1].values()))
    shards, start = [], 0
    for length in longest_runs(layers, max(num_blocks * block_bytes, *ends_bytes)):
        stop = start + length
        has_embedding, has_head = start == 0, stop == len(layers)
        shard = ModelShard(has_embedding, length - has_embedding - has_head, has_head, max(start - 1, 0))
        shards.append((1, shard))
        start = stop
    return shards
