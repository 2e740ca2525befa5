"""The costs of a model's stages, from which a configuration is chosen. They are measured, and then lie in a
profile: a JSON file with the costs of the model's sections, of messages and of all-reduces on a kind of machine. Or
they are computed for a workload from a machine's rates. Does not import torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.foreign_file import checked, read_json
from harness.base.whole_file import write_whole
from harness.core.job import Workload
from harness.core.rates import Rates
from harness.plan.resources import OPTIMIZER_BYTES, copy_seconds, device_update_seconds
from methods.pipeline.config.partition import (
    BUCKET_BYTES,
    PipelineShape,
    gpt_stages,
    group_sections,
    passes_of,
    stage_bytes,
)
from methods.pipeline.schedule import SLOTS

PROFILE_FILE = "profile.json"
GRADIENT_BYTES = 4  # bytes per parameter of the gradients that replicas sum
# Bytes per parameter, by dtype: weight, gradient and Adam's state.
STATE_BYTES = {
    dtype: weight_bytes + GRADIENT_BYTES + OPTIMIZER_BYTES[dtype]
    for dtype, weight_bytes in (("fp32", 4), ("fp16", 2))
}


class StageCost(NamedTuple):
    """The cost of one stage with micro-batches of one size."""

    passes: dict[str, float]  # seconds of the forward pass F, the recompute R and the backward pass B
    num_params: int
    update_seconds: float
    device_bytes: int
    sent_bytes: int  # bytes of the tensors that a micro-batch sends to the next stage
    copy_seconds: float  # seconds to copy these tensors to the host and back


class NotNegative:
    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{name}: expected at least 0, got {value}")


@dataclass(frozen=True)
class SectionCost(NotNegative):
    """The cost of one section's passes for a micro-batch of `size` samples."""

    size: int
    forward_seconds: float
    recompute_seconds: float  # seconds of a forward pass that keeps what the backward pass needs
    backward_seconds: float
    copy_seconds: float  # seconds to copy the section's output to the host and back
    saved_bytes: int  # bytes that the section keeps between recompute and backward pass
    peak_bytes: int  # memory peak, without weights, their gradients and the section's input
    activation_bytes: int  # bytes of the section's output


@dataclass(frozen=True)
class Section(NotNegative):
    num_params: int
    update_seconds: float  # seconds of the optimizer's update of the section's parameters
    costs: list[SectionCost]  # costs for each size of micro-batch below the size at which memory ran out


@dataclass(frozen=True)
class Message(NotNegative):
    """A message from a rank to its neighbor, timed while both ranks compute. `is_one_machine`: True: both ranks are on
    one machine."""

    is_one_machine: bool
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Sum(NotNegative):
    """An all-reduce over `num_ranks` ranks, timed while all other groups of `num_ranks` ranks run an all-reduce,
    too."""

    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    fp16: bool
    # bytes that tensors may fill on a device; None for a CPU, whose memory ranks share
    device_bytes: int | None
    sections: list[Section]  # the model's parts between neighboring CutPoints
    messages: list[Message]  # empty if one rank measured
    sums: list[Sum]
    # The seconds of passes do not include waits for a core. When `num_ranks` ranks of a machine compute at once, a pass
    # takes `crowding` times these seconds. `num_served`: number of ranks that the machine's cores serve at once; None:
    # each rank has its own device.
    crowding: float = 1.0
    num_ranks: int = 1
    num_served: float | None = None

    is_timed = True

    def __post_init__(self) -> None:
        if not self.sections:
            raise ValueError("sections: expected at least one, got none")
        for section in self.sections:
            sizes = [cost.size for cost in section.costs]
            if sizes != sorted({*sizes} - {0}):
                raise ValueError(f"sections: expected costs of ascending sizes from 1, got sizes {sizes}")

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of micro-batches, in samples, for which every section has a cost."""
        return sorted(set.intersection(*({cost.size for cost in section.costs} for section in self.sections)))

    def costs_at(self, chunk_size: int) -> list[SectionCost]:
        """Return each section's cost for micro-batches of `chunk_size` samples."""
        return [next(cost for cost in section.costs if cost.size == chunk_size) for section in self.sections]

    def cuts(self, chunk_size: int, stage_counts: Collection[int]) -> dict[int, list[int]]:
        """Return, for each number of stages in `stage_counts`, the cuts that make the longest stage as short as
        possible. A number for which there are no possible cuts is left out."""
        costs = self.costs_at(chunk_size)
        seconds_below = [
            cost.forward_seconds + cost.recompute_seconds + cost.backward_seconds for cost in costs
        ]
        seconds_of_last = [cost.recompute_seconds + cost.backward_seconds for cost in costs]
        has_parameters = [section.num_params > 0 for section in self.sections]
        groupings = enumerate(group_sections(seconds_below, seconds_of_last, has_parameters), start=1)
        cuts_by_stages = {num_stages: cuts for num_stages, cuts in groupings if cuts is not None}
        return {num_stages: cuts for num_stages, cuts in cuts_by_stages.items() if num_stages in stage_counts}

    def stages(
        self, chunk_size: int, cuts: Sequence[int], batch_size: int, num_replicas: int
    ) -> list[StageCost]:
        """Return the costs of each stage between these cuts. `chunk_size`: samples of a micro-batch. `batch_size`:
        samples of all replicas."""
        costs, num_micro_batches = self.costs_at(chunk_size), -(-batch_size // num_replicas // chunk_size)
        starts, stages = [0, *(cut + 1 for cut in cuts)], []
        for stage_number, (start, end) in enumerate(zip(starts, [*starts[1:], len(costs)], strict=True)):
            sections, stage_costs = self.sections[start:end], costs[start:end]
            num_params, is_last = sum(section.num_params for section in sections), end == len(costs)
            # A stage keeps the tensors that it has received for all micro-batches. The last stage completes each
            # micro-batch at once, so it keeps the tensors of a single one.
            num_kept = 1 if is_last else num_micro_batches
            received_bytes = costs[start - 1].activation_bytes * num_kept if stage_number else 0
            summed_bytes = min(BUCKET_BYTES, GRADIENT_BYTES * num_params) if num_replicas > 1 else 0
            state_bytes = STATE_BYTES["fp16" if self.fp16 else "fp32"] * num_params
            stages.append(
                StageCost(
                    _pass_seconds(stage_costs, is_last=is_last),
                    num_params,
                    sum(section.update_seconds for section in sections),
                    state_bytes + max(received_bytes + _graph_bytes(stage_costs), summed_bytes),
                    stage_costs[-1].activation_bytes,
                    stage_costs[-1].copy_seconds,
                )
            )
        return stages

    def write(self, folder: str | Path) -> Path:
        path = Path(folder) / PROFILE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        return path


def _pass_seconds(costs: Sequence[SectionCost], *, is_last: bool) -> dict[str, float]:
    forward_seconds = sum(cost.forward_seconds for cost in costs)
    recompute_seconds = sum(cost.recompute_seconds for cost in costs)
    backward_seconds = sum(cost.backward_seconds for cost in costs)
    if is_last:  # its forward pass keeps all that the backward pass needs, so it costs as much as a recompute
        return {"F": recompute_seconds, "R": 0.0, "B": backward_seconds}
    return {"F": forward_seconds, "R": recompute_seconds, "B": backward_seconds}


def _graph_bytes(costs: Sequence[SectionCost]) -> int:
    """Return the peak bytes of a micro-batch's passes through these sections. The peak is the largest sum of a
    section's own peak and the bytes that the sections before it keep."""
    kept_bytes, peak_bytes = 0, 0
    for cost in costs:
        peak_bytes = max(peak_bytes, kept_bytes + cost.peak_bytes)
        kept_bytes += cost.saved_bytes
    return peak_bytes


def read_profile(folder: str | Path) -> Profile:
    """Read the profile in this folder. Raises ValueError if there is no profile or it is not valid."""
    path = Path(folder) / PROFILE_FILE
    try:
        data: Any = read_json(path)
        return checked(Profile, data)
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: no such file; try Profiler(...).profile_all(..., out_folder={str(folder)!r})"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a profile: {error}") from error


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

    def cuts(self, chunk_size: int, stage_counts: Collection[int]) -> dict[int, list[int]]:
        """Return, for each possible number of stages among `stage_counts`, the cuts that make the longest stage as
        short as possible. Cut n is after layer n."""
        # at most one stage for each layer, and one for the head
        possible_numbers = range(1, self.workload.num_layers + 2)
        cuts = {}
        for num_stages in stage_counts:
            if num_stages in possible_numbers:
                stages = gpt_stages(self.workload, num_stages)
                cuts[num_stages] = [stage.layers.stop - 1 for stage in stages[:-1]]
        return cuts

    def stages(
        self, chunk_size: int, cuts: Sequence[int], batch_size: int, num_replicas: int
    ) -> list[StageCost]:
        """Return the costs of each stage between these cuts. `chunk_size`: samples of a micro-batch. `batch_size`:
        samples of all replicas."""
        batch_workload = replace(self.workload, batch_size=batch_size, micro_batches=1)
        stages, costs = gpt_stages(self.workload, len(cuts) + 1), []
        shape = PipelineShape(len(stages), num_replicas, chunk_size, self.schedule)
        for stage_number, stage in enumerate(stages):
            needed_bytes = stage_bytes(batch_workload, stage, stage_number, shape)
            num_params = stage.num_params(self.workload)
            passes, update_seconds = dict.fromkeys(SLOTS, 0.0), 0.0
            if self.rates:
                passes = passes_of(self.workload, stage, chunk_size, self.rates, self.num_sharing)
                update_seconds = device_update_seconds(num_params, self.workload, self.rates)
                update_seconds *= self.num_sharing
            if stage.is_last and self.schedule == "varuna":
                # the last stage does not recompute: its forward pass keeps what backward needs
                passes["R"] = 0.0
            sent_bytes = 0 if stage.is_last else self._sent_bytes(chunk_size)
            copied_seconds = 0.0
            if self.schedule == "varuna" and self.rates and not self.rates.is_host:
                # elsewhere NCCL needs no copies
                copied_seconds = copy_seconds(2 * sent_bytes, self.rates)
            costs.append(
                StageCost(
                    passes, num_params, update_seconds, sum(needed_bytes.values()), sent_bytes, copied_seconds
                )
            )
        return costs

    def _sent_bytes(self, chunk_size: int) -> int:
        return replace(self.workload, batch_size=chunk_size, micro_batches=1).boundary_bytes
