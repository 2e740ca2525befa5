"""A profile of the published GPT from a machine's rates alone, in place of one that was measured; torch is not
imported."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from harness.core.job import Workload
from harness.core.rates import Rates
from harness.forecast.resources import device_update_seconds
from methods.pipeline.partition import SAVED_BOUNDARIES, GptStage, passes_of
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
    count, costs = stage.num_params(workload), []
    for size in sizes:
        part = replace(workload, batch_size=size, micro_batches=1)
        forward, recompute, backward = passes_of(workload, stage, size, rates).values()
        saved = 0 if stage.is_last else math.ceil(SAVED_BOUNDARIES) * part.boundary_bytes
        peak = part.head_bytes if stage.is_last else max(saved, part.layer_bytes)
        sent = 0 if stage.is_last else part.boundary_bytes
        # The head's gradients come with its loss, which the last stage computes in its only forward pass.
        costs.append(SectionCost(size, forward, recompute or forward, backward, 0.0, saved, peak, sent))
    return Section(count, device_update_seconds(count, workload, rates), costs)
