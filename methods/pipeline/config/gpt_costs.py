"""Computes the costs of a workload's stages from a machine's rates, in place of a measured profile. Does not import
torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from harness.core.job import Workload
from harness.core.rates import Rates
from harness.plan.resources import copy_seconds, device_update_seconds
from methods.pipeline.config.partition import PipelineShape, gpt_stages, passes_of, stage_bytes
from methods.pipeline.config.profile import Message, StageCost, Sum
from methods.pipeline.schedule import SLOTS


@dataclass(frozen=True)
class GptCosts:
    """The costs of a workload's stages. `rates`: the machine's rates; None: no times are known. `device_bytes`: a
    device's memory; None: no limit. `network`: bytes per second of a link between stages. `sums`: times of all-reduces
    over replicas; if empty, all-reduces take no time. `num_sharing`: number of ranks that share a device."""

    workload: Workload
    rates: Rates | None
    sizes: Sequence[int]  # sizes of micro-batches
    device_bytes: int | None = None
    network: float = math.inf
    schedule: str = "varuna"
    num_sharing: int = 1

    sums: Sequence[Sum] = ()
    crowding, num_ranks, num_served = 1.0, 1, None

    @property
    def is_timed(self) -> bool:
        return self.rates is not None

    @property
    def messages(self) -> list[Message]:
        num_bytes = self._sent_bytes(1)
        return [Message(False, num_bytes, num_bytes / self.network)] if math.isfinite(self.network) else []

    def cuts(self, size: int, numbers: Collection[int]) -> dict[int, list[int]]:
        """Return, for each possible number of stages among `numbers`, the cuts that make the longest stage as short as
        possible. Cut n is after layer n."""
        # at most one stage for each layer, and one for the head
        possible = range(1, self.workload.num_layers + 2)
        cuts = {}
        for number in numbers:
            if number in possible:
                stages = gpt_stages(self.workload, number)
                cuts[number] = [stage.layers.stop - 1 for stage in stages[:-1]]
        return cuts

    def stages(self, size: int, cuts: Sequence[int], batch_size: int, num_replicas: int) -> list[StageCost]:
        """Return the costs of each stage between these cuts. `size`: samples of a micro-batch. `batch_size`: samples of
        all replicas."""
        whole = replace(self.workload, batch_size=batch_size, micro_batches=1)
        stages, costs = gpt_stages(self.workload, len(cuts) + 1), []
        shape = PipelineShape(len(stages), num_replicas, size, self.schedule)
        for number, stage in enumerate(stages):
            needs = stage_bytes(whole, stage, number, shape)
            count, update, passes = stage.num_params(self.workload), 0.0, dict.fromkeys(SLOTS, 0.0)
            if self.rates:
                passes = passes_of(self.workload, stage, size, self.rates, self.num_sharing)
                update = self.num_sharing * device_update_seconds(count, self.workload, self.rates)
            if stage.is_last and self.schedule == "varuna":
                # the last stage does not recompute: its forward pass keeps what backward needs
                passes["R"] = 0.0
            sent = 0 if stage.is_last else self._sent_bytes(size)
            copied = 0.0
            if self.schedule == "varuna" and self.rates and not self.rates.is_host:
                # elsewhere NCCL needs no copies
                copied = copy_seconds(2 * sent, self.rates)
            costs.append(StageCost(passes, count, update, sum(needs.values()), sent, copied))
        return costs

    def _sent_bytes(self, size: int) -> int:
        return replace(self.workload, batch_size=size, micro_batches=1).boundary_bytes
