"""Sets up a rank's stage of a model: cuts the model, finds the parameters that two stages share, checks what crosses
the cuts, and gives the stage its memory.

Every process cuts the whole model and checks all cuts. If a value cannot be sent, all processes raise an error, so that
no process waits for another.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.base.console import counted
from methods.pipeline.batches import Inputs, cast_batch, resize_sample
from methods.pipeline.cut import (
    LOSS_SCALE,
    InitWeights,
    Part,
    choose_cuts,
    count_cuts,
    cut_into_parts,
    give_memory,
    run_without_memory,
    specs_of,
    trace_model,
)
from methods.pipeline.gradients import Masters, SharedWeight
from methods.pipeline.transport import TensorSpec


@dataclass(frozen=True)
class ModelToCut:
    """A user's model, and how it is to be cut. `sample`: a batch of one micro-batch. `shared_pairs`: pairs of names of
    parameters that share one weight. `cuts`: the CutPoints to cut at; None: cuts that balance the stages' FLOPs.
    `dtype`: dtype of the computation; None: the model's. `init_weights`: fills tensors of a model on the meta
    device."""

    model: nn.Module
    sample: Inputs
    shared_pairs: Sequence[tuple[str, str]]
    cuts: Sequence[int] | None
    dtype: torch.dtype | None
    init_weights: InitWeights | None


@dataclass(frozen=True)
class StageSetup:
    """A rank's stage, ready to train. `micro_batch_sizes`: samples of each micro-batch. `active_cuts`: numbers of the
    CutPoints between the stages. `parts_by_mode`: the stage's part by mode, True for train(), because a trace fixes
    self.training. `weight_names`: all weights of the model, in its order, each shared weight once. `stage_of`: the
    first stage of each weight. `results_by_size`: what each stage returns, by the size of a micro-batch; tensors
    without memory."""

    stage: int
    num_stages: int
    micro_batch_sizes: list[int]
    device: torch.device
    active_cuts: list[int]
    parts_by_mode: Mapping[bool, Part]
    masters: Masters
    weight_names: list[str]
    stage_of: Mapping[str, int]
    shared_weights: Sequence[SharedWeight]
    results_by_size: Mapping[int, Sequence[Any]]

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def received(self, size: int) -> Sequence[Tensor]:
        """Return the tensors that a micro-batch of `size` samples brings from the stage below."""
        return self.results_by_size[size][self.stage - 1] if self.stage else []

    def sent(self, size: int) -> Sequence[Tensor]:
        """Return the tensors that a micro-batch of `size` samples sends to the stage above."""
        return [] if self.is_last else self.results_by_size[size][self.stage]

    def sent_specs(self) -> list[list[TensorSpec]]:
        """Return the shapes and dtypes of the tensors that each micro-batch sends."""
        return [specs_of(self.sent(size), self.stage) for size in self.micro_batch_sizes]


def set_up_stage(
    request: ModelToCut, num_stages: int, stage: int, micro_batch_sizes: list[int], device: torch.device
) -> StageSetup:
    """Cut the model, and give this process's stage its memory on the device. `micro_batch_sizes`: samples of each
    micro-batch. Raises ValueError if the model cannot be cut in this way."""
    model, sample, dtype = request.model, request.sample, request.dtype
    if LOSS_SCALE in inspect.signature(model.forward).parameters:
        sample = {**sample, LOSS_SCALE: 1.0}
    weight_names = counted_names(model, request.shared_pairs)
    parts, active_cuts = _cut_model(model, sample, request.cuts, num_stages)
    shared_weights = find_shared(model, parts, request.shared_pairs)
    stage_of = _first_stages(parts)  # before give_memory(), after which two names of a weight may differ
    starting_values = _starting_weights(parts[stage].module, dtype, request.init_weights, device)
    if dtype:
        model.to(dtype)
    results_by_size = _results_by_size(parts, cast_batch(sample, dtype), micro_batch_sizes)
    give_memory(model, starting_values)
    parts_by_mode = {}
    for is_training in (False, True):
        graph = trace_model(model.train(is_training), sample)
        parts_by_mode[is_training] = cut_into_parts(model, graph, active_cuts)[stage]
    move_modules([part.module for part in parts_by_mode.values()], device)
    unrounded_values = None
    if dtype:
        unrounded_values = {name: value.to(device) for name, value in starting_values.items()}
    masters = Masters(dict(parts_by_mode[True].module.named_parameters()), unrounded_values)
    return StageSetup(
        stage=stage,
        num_stages=num_stages,
        micro_batch_sizes=micro_batch_sizes,
        device=device,
        active_cuts=active_cuts,
        parts_by_mode=parts_by_mode,
        masters=masters,
        weight_names=weight_names,
        stage_of=stage_of,
        shared_weights=shared_weights,
        results_by_size=results_by_size,
    )


def _first_stages(parts: Sequence[Part]) -> dict[str, int]:
    """Return the number of the first stage that has each weight."""
    stages: dict[str, int] = {}
    for stage_number, part in enumerate(parts):
        for name, _ in part.module.named_parameters():
            stages.setdefault(name, stage_number)
    return stages


def _cut_model(
    model: nn.Module, sample: Inputs, cuts: Sequence[int] | None, num_stages: int
) -> tuple[list[Part], list[int]]:
    """Return the parts of all stages, and the numbers of the CutPoints between them."""
    for name, module in model.named_modules():
        if not module.training:
            raise ValueError(
                "expected a model in train() mode, which a stage would return to, got"
                f" {name or type(model).__name__} in eval(); try model.train(), or a module without modes"
            )
    graph = trace_model(model, sample)
    num_cutpoints = count_cuts(graph)
    if cuts is not None:
        active_cuts = sorted(set(cuts))
        if len(active_cuts) != num_stages - 1 or any(cut not in range(num_cutpoints) for cut in active_cuts):
            raise ValueError(
                f"cuts: expected {counted(num_stages - 1, 'number')} of CutPoints, from 0 to {num_cutpoints - 1}, for"
                f" {counted(num_stages, 'stage')}, got {list(cuts)}"
            )
        return cut_into_parts(model, graph, active_cuts), active_cuts
    sections = cut_into_parts(model, graph, range(num_cutpoints))
    flops = [flops for _, flops in run_without_memory(sections, sample)]
    has_parameters = [any(True for _ in section.module.parameters()) for section in sections]
    active_cuts = choose_cuts(flops, has_parameters, num_stages)
    return cut_into_parts(model, graph, active_cuts), active_cuts


def _starting_weights(
    module: nn.Module, dtype: torch.dtype | None, init_weights: InitWeights | None, device: torch.device
) -> dict[str, Tensor]:
    """Return the stage's weights in fp32, before they are rounded to `dtype`; {} if no weight is rounded. For a model
    on the meta device return instead all weights and buffers of the stage, filled by init_weights(). Raises ValueError
    if such a model comes without init_weights()."""
    weights: dict[str, Tensor] = dict(module.named_parameters())
    if not any(weight.is_meta for weight in weights.values()):
        if dtype is None:
            return {}
        return {name: weight.detach().float().clone() for name, weight in weights.items()}
    if init_weights is None:
        raise ValueError("expected a model with memory, got one on the meta device; try init_weights=...")
    starting_values = {}
    for name, tensor in {**weights, **dict(module.named_buffers())}.items():
        if tensor.is_meta:
            is_rounded = dtype is not None and tensor.is_floating_point()
            starting_values[name] = torch.empty_like(
                tensor, device=device, dtype=torch.float32 if is_rounded else tensor.dtype
            )
    init_weights(starting_values.items())
    return starting_values


def _results_by_size(
    parts: Sequence[Part], sample: Inputs, micro_batch_sizes: Sequence[int]
) -> dict[int, list[Any]]:
    """Return what each part returns, by the size of a micro-batch. Raises ValueError if a value cannot be sent, or if
    the last part returns no loss. `sample`: a batch of the largest size."""
    results_by_size = {
        size: [values for values, _ in run_without_memory(parts, resize_sample(sample, size))]
        for size in sorted(set(micro_batch_sizes))
    }
    *lower_results, last_results = results_by_size[micro_batch_sizes[0]]
    loss = last_results[0][0] if isinstance(last_results[0], tuple | list) else last_results[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"expected the model's forward pass to return a loss of one element, got {got}")
    for stage_number, values in enumerate(lower_results):
        specs_of(values, stage_number)
    return results_by_size


def move_modules(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move the modules to the device, in place. A tensor that several of them hold stays one tensor."""
    on_device = functools.cache(lambda tensor: tensor.to(device))
    for module in modules:
        module._apply(on_device)


def counted_names(model: nn.Module, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names of all weights in the model's order, without the second name of a parameter with two names. The
    global norm is summed in this order, so that it has the bits of the norm of a whole model."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    second_names = {
        other_name
        for name, other_name in pairs
        if name != other_name and name in weights and weights[name] is weights.get(other_name)
    }
    return [name for name in weights if name not in second_names]


def find_shared(
    model: nn.Module, parts: Sequence[Part], pairs: Sequence[tuple[str, str]]
) -> list[SharedWeight]:
    """Return the given pairs of names with their stages. Raises ValueError if a name is unknown or used by no stage, if
    the two shapes differ, if a parameter is used on both sides of a cut but is in no pair, or if more than two stages
    use a parameter."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    stages: dict[str, list[int]] = {}
    for stage_number, part in enumerate(parts):
        for name, _ in part.module.named_parameters(remove_duplicate=False):
            stages.setdefault(name, []).append(stage_number)
    shared_weights = []
    for name, other_name in pairs:
        _check_pair(name, other_name, weights, stages)
        shared = SharedWeight(name, other_name, stages[name][0], stages[other_name][-1])
        if shared.stage != shared.other_stage or weights[name] is not weights[other_name]:
            shared_weights.append(shared)
    _check_all_paired(weights, stages, pairs)
    return shared_weights


def _check_pair(
    name: str, other_name: str, weights: Mapping[str, nn.Parameter], stages: Mapping[str, list[int]]
) -> None:
    for name_of_pair in (name, other_name):
        if name_of_pair not in weights:
            raise ValueError(
                f"shared_weights: the model has no parameter {name_of_pair}; try a name of named_parameters()"
            )
        if name_of_pair not in stages:
            raise ValueError(f"shared_weights: no stage uses {name_of_pair}")
    if weights[name].shape != weights[other_name].shape:
        raise ValueError(
            f"shared_weights: expected one shape, got {tuple(weights[name].shape)} of {name} and"
            f" {tuple(weights[other_name].shape)} of {other_name}"
        )


def _check_all_paired(
    weights: Mapping[str, nn.Parameter], stages: Mapping[str, list[int]], pairs: Sequence[tuple[str, str]]
) -> None:
    """Raise ValueError if a parameter is used on both sides of a cut but is in no pair, or is used by more than two
    stages."""
    paired_ids = {frozenset((id(weights[name]), id(weights[other_name]))) for name, other_name in pairs}
    for name, weight in weights.items():
        for other_name, other_weight in weights.items():
            if (
                other_weight is not weight
                or name > other_name
                or not stages.get(name)
                or not stages.get(other_name)
            ):
                continue
            stages_of_weight = sorted({*stages[name], *stages[other_name]})
            if len(stages_of_weight) > 1 and frozenset((id(weight), id(other_weight))) not in paired_ids:
                raise ValueError(
                    f"parameter {name} is used by stages {' and '.join(map(str, stages_of_weight))}, on both sides of a"
                    f" cut; try shared_weights=[({name!r}, {other_name!r})]"
                )
            if len(stages_of_weight) > 2:
                raise ValueError(
                    f"parameter {name}: expected at most two stages that use it, got {len(stages_of_weight)}"
                )
