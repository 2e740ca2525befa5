"""A profile of the published GPT from a machine's rates alone, in place of one that was measured; torch is not
imported."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from harness.core.job import Workload
from harness.core.rates import ADAM_BYTES, Rates
from methods.pipeline.partition import SAVED_BOUNDARIES, GptStage, gpt_stages, pass_flops
from methods.pipeline.profile import Message, Profile, Section, SectionCost


def by_flops(
    workload: Workload, rates: Rates, sizes: Iterable[int], device_bytes: int | None, network_bytes_per_second: float
) -> Profile:
    """Each layer is a section, and the head is one. Messages take their bytes on the network; sums count as none."""
    last = workload.num_layers
    stages = [GptStage(layer, 1, layer == 0, is_last=False) for layer in range(last)]
    sections = [_section(workload, stage, rates, sizes) for stage in [*stages, GptStage(last, 0, False, is_last=True)]]
    num_bytes = replace(workload, batch_size=1, micro_batches=1).boundary_bytes
    known = math.isfinite(network_bytes_per_second)
    messages = [Message(False, num_bytes, num_bytes / network_bytes_per_second)] if known else []
    return Profile(workload.dtype != "fp32", device_bytes, sections, messages, [])


def _section(workload: Workload, stage: GptStage, rates: Rates, sizes: Iterable[int]) -> Section:
    flops, count, costs = pass_flops(workload, stage), stage.num_params(workload), []
    for size in sizes:
        part = replace(workload, batch_size=size, micro_batches=1)
        forward, recompute, backward = (size * flops[kind] / rates.device_flops_per_second for kind in "FRB")
        saved = 0 if stage.is_last else math.ceil(SAVED_BOUNDARIES) * part.boundary_bytes
        peak = part.head_bytes if stage.is_last else max(saved, part.layer_bytes)
        sent = 0 if stage.is_last else part.boundary_bytes
        # The head's gradients come with its loss, which the last stage computes in its only forward pass.
        costs.append(SectionCost(size, forward, recompute or forward, backward, 0.0, saved, peak, sent))
    return Section(count, count * ADAM_BYTES[workload.dtype] / rates.device_bytes_per_second, costs)


def stage_passes(workload: Workload, num_stages: int, chunk_size: int, rates: Rates) -> list[dict[str, float]]:
    """Seconds of each stage's passes of a micro-batch."""
    return [
        {
            kind: chunk_size * flops / rates.device_flops_per_second
            for kind, flops in pass_flops(workload, stage).items()
        }
        for stage in gpt_stages(workload, num_stages)
    ]
