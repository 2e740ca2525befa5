"""Chooses where to cut a model into shards: each shard is the longest run of layers that fits. Needs only the standard
library.

Each further layer of a run takes more memory, so taking the longest run that fits gives the fewest shards. A layer's
size is a dict, from a parameter's name to its bytes. By the names, a parameter that several layers of a run share is
counted once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import or_
from typing import NamedTuple

from harness.core.job import Workload
from methods.shared.memory_needs import ALIGNMENT, aligned

Sizes = dict[str, int]
MOMENTS = 2  # number of AdamW's moments, in fp32


def longest_runs(layers: Sequence[Sizes], room: int) -> list[int]:
    """Return the number of layers of each shard. No shard takes more than `room` bytes. Each layer alone must fit in
    `room`."""
    lengths: list[int] = []
    held: Sizes = {}
    for sizes in layers:
        held = {**held, **sizes}
        if lengths and sum(held.values()) <= room:
            lengths[-1] += 1
        else:
            lengths.append(1)
            held = sizes
    return lengths


def run_sizes(layers: Sequence[Sizes]) -> set[int]:
    """Return the bytes of every run of consecutive layers, each number once."""
    return {sum(held.values()) for start in range(len(layers)) for held in accumulate(layers[start:], or_)}


def adamw_bytes(numel: int, weight_bytes: int) -> int:
    """Return the bytes that a parameter of `numel` elements takes in a slot: weight, gradient, moments, step count and,
    in mixed precision, an fp32 master. `weight_bytes`: bytes of one element of the weight."""
    states = (MOMENTS + (weight_bytes < 4)) * aligned(4 * numel) + ALIGNMENT
    return 2 * aligned(weight_bytes * numel) + states


class ModelShard(NamedTuple):
    """A shard of a workload's model: a run of consecutive layers. Embedding, blocks and head are its layers; embedding
    and head may share a matrix."""

    has_embedding: bool
    num_blocks: int
    has_head: bool

    @property
    def num_layers(self) -> int:
        """Return the number of layers; embedding and head count as one each."""
        return self.has_embedding + self.num_blocks + self.has_head

    def num_bytes(self, workload: Workload, bytes_of: Callable[[int, int], int] = adamw_bytes) -> int:
        """Return the shard's bytes. `bytes_of`: returns the bytes of a parameter from its number of elements and the
        bytes of one element of its weight."""
        anatomy, size = workload.anatomy, workload.weight_bytes
        ends = (anatomy.embedding if self.has_embedding else {}) | (anatomy.head if self.has_head else {})
        blocks = self.num_blocks * sum(bytes_of(math.prod(shape), size) for shape in anatomy.layer.values())
        return blocks + sum(bytes_of(math.prod(shape), size) for shape in ends.values())


def model_shards(workload: Workload, num_blocks: int) -> list[tuple[int, ModelShard]]:
    """Return the shards into which longest_runs() cuts a workload's model, in order, as pairs: how many equal shards
    follow each other, and one of these shards. A shard may take the bytes of `num_blocks` blocks, or the bytes of the
    embedding or of the head if these are more."""
    block = ModelShard(False, 1, False).num_bytes(workload)
    ends = [ModelShard(*kind).num_bytes(workload) for kind in ((True, 0, False), (False, 0, True))]
    room = max(num_blocks * block, *ends)
    first = min(workload.num_layers, (room - ends[0]) // block)
    num_whole, rest = divmod(workload.num_layers - first, room // block)
    runs = [(1, ModelShard(True, first, False)), (num_whole, ModelShard(False, room // block, False))]
    runs = [
        (count, shard)
        for count, shard in (*runs, (1, ModelShard(False, rest, False)))
        if count * shard.num_layers
    ]
    count, last = runs.pop()
    joined = last._replace(has_head=True)
    if joined.num_bytes(workload) > room:
        return [*runs, (count, last), (1, ModelShard(False, 0, True))]
    return [*runs, *([(count - 1, last)] if count > 1 else []), (1, joined)]
