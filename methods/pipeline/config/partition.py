"""Divides a model into stages by predicted time, and computes the bytes that each stage needs. Needs only the standard
library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from harness.core.job import Workload
from harness.core.rates import Rates
from harness.plan.resources import OPTIMIZER_BYTES, pass_seconds
from methods.shared.memory_needs import saved_boundary_ratio

# most messages of one kind that a rank sends or receives at once, as in the original Varuna
MOST_MESSAGES_IN_FLIGHT = 4
BUCKET_BYTES = 2**25  # bytes of gradients that replicas sum at once


@dataclass(frozen=True)
class GptStage:
    """A stage: a run of consecutive layers. The first stage also has the embedding. The last stage also has the head,
    which may be tied to the embedding."""

    first_layer: int
    num_layers: int
    is_first: bool
    is_last: bool

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    def num_params(self, workload: Workload) -> int:
        anatomy = workload.anatomy
        ends = (anatomy.embedding if self.is_first else {}) | (anatomy.head if self.is_last else {})
        of_layers = sum(count * kind.num_params for kind, count in anatomy.counts(self.layers))
        return of_layers + sum(map(math.prod, ends.values()))

    def __str__(self) -> str:
        names = ["embedding"] * self.is_first
        if self.num_layers:
            last_layer = self.first_layer + self.num_layers - 1
            names.append(
                f"layers {self.first_layer} to {last_layer}" if self.num_layers > 1 else f"layer {last_layer}"
            )
        return " and ".join([*names, *["head"] * self.is_last])


class PipelineShape(NamedTuple):
    """How many stages and replicas share a batch, and how. `chunk_size`: samples of a micro-batch."""

    num_stages: int
    num_replicas: int
    chunk_size: int
    schedule: str


@functools.lru_cache(maxsize=256)
def gpt_stages(workload: Workload, num_stages: int) -> tuple[GptStage, ...]:
    """Return the model's stages, in order, cut so that the longest stage takes as little time as possible. Each stage
    has at least one layer, except that the last stage may have only the head."""
    if workload.anatomy.order:
        return _unequal_stages(workload, num_stages)
    flops = [_flops_of_layer_and_others(workload, stage, num_stages) for stage in range(num_stages)]
    least_layers = [int(stage < num_stages - 1 or num_stages == 1) for stage in range(num_stages)]

    def counts(bound: float) -> list[int]:
        pairs = zip(flops, least_layers, strict=True)
        return [
            max(least_of_stage, math.floor((bound - other_flops) / layer_flops))
            for (layer_flops, other_flops), least_of_stage in pairs
        ]

    low_bound = 0.0
    high_bound = sum(layer_flops for layer_flops, _ in flops) * workload.num_layers + sum(
        other_flops for _, other_flops in flops
    )
    for _ in range(64):
        middle_bound = (low_bound + high_bound) / 2
        if sum(counts(middle_bound)) >= workload.num_layers:
            high_bound = middle_bound
        else:
            low_bound = middle_bound
    num_layers_of = counts(high_bound)
    for _ in range(sum(num_layers_of) - workload.num_layers):
        movable = [stage for stage in range(num_stages) if num_layers_of[stage] > least_layers[stage]]
        longest_stage = max(
            movable, key=lambda stage: num_layers_of[stage] * flops[stage][0] + flops[stage][1]
        )
        num_layers_of[longest_stage] -= 1
    stages, first_layer = [], 0
    for stage, num_layers in enumerate(num_layers_of):
        stages.append(GptStage(first_layer, num_layers, stage == 0, stage == num_stages - 1))
        first_layer += num_layers
    return tuple(stages)


def _unequal_stages(workload: Workload, num_stages: int) -> tuple[GptStage, ...]:
    """Return gpt_stages() of a model whose layers are of several kinds."""
    layers = range(workload.num_layers)
    flops = [pass_flops(workload, GptStage(layer, 1, False, False)) for layer in layers]
    head_flops = _head_flops(workload, GptStage(workload.num_layers, 0, False, True))
    costs_below = [*(sum(of_layer.values()) for of_layer in flops), head_flops]
    costs_of_last = [*(of_layer["F"] + of_layer["B"] for of_layer in flops), head_flops]
    cuts = group_sections(costs_below, costs_of_last, [True for _ in costs_below])[num_stages - 1]
    assert cuts is not None  # each section has parameters
    starts, stops = [0, *(cut + 1 for cut in cuts)], [*(cut + 1 for cut in cuts), workload.num_layers]
    return tuple(
        GptStage(start, stop - start, stage == 0, stage == num_stages - 1)
        for stage, (start, stop) in enumerate(zip(starts, stops, strict=True))
    )


def pass_flops(workload: Workload, stage: GptStage) -> dict[str, float]:
    """Return the FLOPs of the stage's passes F, R and B for one sample. On the last stage F includes the head's
    gradients, which are computed together with the loss."""
    one_sample = replace(workload, batch_size=1, micro_batches=1)
    counts = workload.anatomy.counts(stage.layers)
    layer_flops = sum(one_sample.flops_of(kind) * count for kind, count in counts)
    repeated_flops = sum(one_sample.repeated_flops_of(kind) * count for kind, count in counts)
    forward_flops = layer_flops + _head_flops(workload, stage)
    return {"F": forward_flops, "R": layer_flops + repeated_flops, "B": 2 * layer_flops}


def _head_flops(workload: Workload, stage: GptStage) -> float:
    """Return the FLOPs of the stage's head for one sample; 0 without a head. The forward pass computes both the loss
    and the loss's gradients."""
    return replace(workload, batch_size=1, micro_batches=1).head_flops_per_step * stage.is_last


def passes_of(
    workload: Workload, stage: GptStage, chunk_size: int, rates: Rates, num_sharing: int = 1
) -> dict[str, float]:
    """Return the seconds of the stage's passes F, R and B for a micro-batch of `chunk_size` samples. `num_sharing`:
    number of ranks that share the device."""
    heads = {"F": _head_flops(workload, stage), "R": 0.0, "B": 0.0}
    return {
        kind: pass_seconds(chunk_size * (flops - heads[kind]), chunk_size * heads[kind], rates, num_sharing)
        for kind, flops in pass_flops(workload, stage).items()
    }


def _flops_of_layer_and_others(workload: Workload, stage: int, num_stages: int) -> tuple[float, float]:
    """Return the FLOPs of one layer of this stage, over all its passes, and the FLOPs of everything beside the layers.
    The last stage is counted without a recompute, as in Varuna."""
    is_last = stage == num_stages - 1
    layer = pass_flops(workload, GptStage(0, 1, stage == 0, is_last=False))
    flops_beside = pass_flops(workload, GptStage(0, 0, stage == 0, is_last))["F"]
    return layer["F"] + layer["B"] + layer["R"] * (not is_last), flops_beside


def stage_bytes(
    workload: Workload, stage: GptStage, stage_number: int, shape: PipelineShape
) -> dict[str, int]:
    """Return the bytes that a rank with this stage needs, by kind. `stage_number`: the stage's number."""
    num_micro_batches = -(-workload.batch_size // shape.num_replicas // shape.chunk_size)
    micro_batch = replace(workload, batch_size=shape.chunk_size, micro_batches=1)
    num_params = stage.num_params(workload)
    if shape.schedule == "varuna" or shape.num_stages == 1:
        moment_bytes = _moments_of_recompute(
            micro_batch, stage, num_micro_batches, is_alone=shape.num_stages == 1
        )
        message_bytes = (
            0 if shape.num_stages == 1 else 2 * MOST_MESSAGES_IN_FLIGHT * micro_batch.boundary_bytes
        )
    else:
        num_under_way = num_micro_batches
        if shape.schedule != "gpipe":
            num_under_way = min(shape.num_stages - stage_number, num_micro_batches)
        moment_bytes = _moments_of_graphs(micro_batch, stage, num_under_way)
        # For each micro-batch torch has a buffer for the input from the stage below, and one for the gradient from the
        # stage above.
        message_bytes = (
            num_micro_batches * micro_batch.boundary_bytes * ((not stage.is_first) + (not stage.is_last))
        )
    # gradients that replicas sum
    moment_bytes.append(0 if shape.num_replicas == 1 else min(4 * num_params, BUCKET_BYTES))
    return {
        "weights": workload.weight_bytes * num_params,
        "gradients": 4 * num_params,
        "optimizer": OPTIMIZER_BYTES[workload.dtype] * num_params,
        "activations": max(moment_bytes) + micro_batch.given_bytes,
        "buffers": message_bytes,
    }


def _moments_of_recompute(
    micro_batch: Workload, stage: GptStage, num_micro_batches: int, *, is_alone: bool
) -> list[int]:
    """Return the bytes of activations at moments of a step of Varuna. A stage keeps its inputs for all micro-batches,
    and all that the backward pass of a single micro-batch needs. `micro_batch`: the workload of one micro-batch.
    `is_alone`: True: the pipeline has no other stage."""
    boundary_bytes, embedding_bytes = micro_batch.boundary_bytes, _embedding_bytes(micro_batch)
    boundaries_per_layer = saved_boundary_ratio(micro_batch)
    saved_bytes = math.ceil(boundaries_per_layer * stage.num_layers) * boundary_bytes
    input_bytes = 0 if stage.is_first or stage.is_last else num_micro_batches * boundary_bytes
    layer_bytes = (
        micro_batch.layer_bytes - math.floor(boundaries_per_layer) * boundary_bytes if stage.num_layers else 0
    )
    head_bytes = micro_batch.head_bytes if stage.is_last else 0
    # A tied head's gradient is kept until the gradient of the embedding's look-up is added to it.
    tied_bytes = embedding_bytes if is_alone and micro_batch.anatomy.is_tied else 0
    return [
        input_bytes + saved_bytes + max(layer_bytes + tied_bytes, head_bytes),
        (embedding_bytes + tied_bytes + 4 * boundary_bytes) * stage.is_first,
    ]


def _moments_of_graphs(micro_batch: Workload, stage: GptStage, num_under_way: int) -> list[int]:
    """Return the bytes of activations at moments of a step of torch's schedules. A stage keeps each layer's input for
    every micro-batch under way; the last stage also keeps the head's gradients, which are computed with the loss.
    `micro_batch`: the workload of one micro-batch. `num_under_way`: most micro-batches under way."""
    boundary_bytes, embedding_bytes = micro_batch.boundary_bytes, _embedding_bytes(micro_batch)
    kept_bytes = (
        num_under_way * (stage.num_layers + 1) * boundary_bytes
        + (num_under_way - 1) * (embedding_bytes + boundary_bytes) * stage.is_last
    )
    layer_bytes = micro_batch.layer_bytes if stage.num_layers else 0
    head_bytes = micro_batch.head_bytes if stage.is_last else 0
    return [
        kept_bytes + max(layer_bytes, head_bytes),
        (kept_bytes + embedding_bytes + 2 * boundary_bytes) * stage.is_first,
    ]


def _embedding_bytes(workload: Workload) -> int:
    return workload.weight_bytes * max(map(math.prod, workload.anatomy.embedding.values()))


def group_sections(
    costs_below: Sequence[float], costs_of_last: Sequence[float], has_parameters: Sequence[bool]
) -> list[list[int] | None]:
    """Return, for 1, 2, ... stages, the active cuts that make the longest stage as short as possible. Cuts are counted
    from 0. An entry is None if a stage would have no parameters.

    `costs_below`: each section's cost in a stage that is not the last. `costs_of_last`: each section's cost in the last
    stage.
    """
    num_sections = len(costs_below)
    sums_below, sums_of_last = [0, *accumulate(costs_below)], [0, *accumulate(costs_of_last)]
    num_weighing = [0, *accumulate(map(int, has_parameters))]  # sections with parameters before each section
    # best[end]: for the sections before `end`, grouped into as many stages as the loop has reached: the cost of the
    # longest stage, and the first section of each stage
    best_groupings: list[tuple[float, list[int]]] = [(0.0, []), *[(math.inf, [])] * num_sections]
    cuts: list[list[int] | None] = []

    def shortest(end: int, cost_sums: Sequence[float]) -> tuple[float, list[int]]:
        choices = (
            (max(best_groupings[start][0], cost_sums[end] - cost_sums[start]), start)
            for start in range(end)
            if num_weighing[end] > num_weighing[start]
        )
        longest, start = min(choices, default=(math.inf, 0))
        return longest, [*best_groupings[start][1], start]

    for _ in range(num_sections):
        longest, starts = shortest(num_sections, sums_of_last)
        cuts.append([start - 1 for start in starts[1:]] if longest < math.inf else None)
        best_groupings = [(math.inf, []), *(shortest(end, sums_below) for end in range(1, num_sections + 1))]
    return cuts
