"""Chooses the cuts of a model into shards: the longest runs of layers that fit; standard library only.

Memory grows with each layer of a run, so taking the longest run that fits gives the fewest shards. Sizes are in bytes,
by the parameter's name: a parameter that several layers of a run share is counted once.
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
    """Return the number of layers of each shard. No shard is larger than `room`, which must fit every single layer."""
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
    """Return the sizes of all runs of layers."""
    return {sum(held.values()) for start in range(len(layers)) for held in accumulate(layers[start:], or_)}


def adamw_bytes(numel: int, weight_bytes: int) -> int:
    """Return the bytes of a parameter in a slot: weight, gradient, moments, step count; in mixed precision an fp32
    master."""
    states = (MOMENTS + (weight_bytes < 4)) * aligned(4 * numel) + ALIGNMENT
    return 2 * aligned(weight_bytes * numel) + states


class ModelShard(NamedTuple):
    """A shard of a workload's model: a run of its layers; embedding and head may share a matrix."""

    has_embedding: bool
    num_blocks: int
    has_head: bool

    @property
    def num_layers(self) -> int:
        """Return the number of layers; embedding and head count as one each."""
        return self.has_embedding + self.num_blocks + self.has_head

    def num_bytes(self, workload: Workload, bytes_of: Callable[[int, int], int] = adamw_bytes) -> int:
        """Return the shard's bytes. `bytes_of`: bytes of a parameter by its number of elements and the bytes of a
        weight."""
        anatomy, size = workload.anatomy, workload.weight_bytes
        ends = (anatomy.embedding if self.has_embedding else {}) | (anatomy.head if self.has_head else {})
        blocks = self.num_blocks * sum(bytes_of(math.prod(shape), size) for shape in anatomy.layer.values())
        return blocks + sum(bytes_of(math.prod(shape), size) for shape in ends.values())


def model_shards(workload: Workload, num_blocks: int) -> list[tuple[int, ModelShard]]:
    """Return the number of each kind of shard, in order, as longest_runs() cuts a workload's model. The room of a shard
    is that of `num_blocks` blocks, or of the larger end if that is larger."""
    block = ModelShard(False, 1, False).num_bytes(workload)
    ends = [ModelShard(*kind).num_bytes(workload) for kind in ((True, 0, False), (False, 0, True))]
    room = max(num_blocks * block, *ends)
    first = min(workload.num_layers, (room - ends[0]) // block)
    num_whole, rest = divmod(workload.num_layers - first, room // block)
    found = [(1, ModelShard(True, first, False)), (num_whole, ModelShard(False, room // block, False))]
    found = [
        (count, shard) for count, shard in (*found, (1, ModelShard(False, rest, False))) if count * shard.num_layers
    ]
    count, last = found.pop()
    joined = last._replace(has_head=True)
    if joined.num_bytes(workload) > room:
        return [*found, (count, last), (1, ModelShard(False, 0, True))]
    return [*found, *([(count - 1, last)] if count > 1 else []), (1, joined)]
