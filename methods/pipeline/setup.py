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

from harness.base.counted import counted
from methods.pipeline.batches import Inputs, cast, resized
from methods.pipeline.cut import (
    LOSS_SCALE,
    InitWeights,
    Part,
    choose_cuts,
    cut,
    give_memory,
    num_cuts,
    probe,
    specs_of,
    traced,
)
from methods.pipeline.gradients import Masters, Shared
from methods.pipeline.transport import Spec


@dataclass(frozen=True)
class ModelToCut:
    """A user's model, and how it is to be cut. `sample`: a batch of one micro-batch. `pairs`: pairs of names of
    parameters that share one weight. `cuts`: the CutPoints to cut at; None: cuts that balance the stages' FLOPs.
    `dtype`: dtype of the computation; None: the model's. `init_weights`: fills tensors of a model on the meta
    device."""

    model: nn.Module
    sample: Inputs
    pairs: Sequence[tuple[str, str]]
    cuts: Sequence[int] | None
    dtype: torch.dtype | None
    init_weights: InitWeights | None


@dataclass(frozen=True)
class StageSetup:
    """A rank's stage, ready to train. `sizes`: samples of each micro-batch. `active`: numbers of the CutPoints between
    the stages. `modes`: the stage's part by mode, True for train(), because a trace fixes self.training. `names`: all
    weights of the model, in its order, each shared weight once. `stage_of`: the first stage of each weight. `results`:
    what each stage returns, by the size of a micro-batch; tensors without memory."""

    stage: int
    num_stages: int
    sizes: list[int]
    device: torch.device
    active: list[int]
    modes: Mapping[bool, Part]
    masters: Masters
    names: list[str]
    stage_of: Mapping[str, int]
    shared: Sequence[Shared]
    results: Mapping[int, Sequence[Any]]

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def received(self, size: int) -> Sequence[Tensor]:
        """Return the tensors that a micro-batch of `size` samples brings from the stage below."""
        return self.results[size][self.stage - 1] if self.stage else []

    def sent(self, size: int) -> Sequence[Tensor]:
        """Return the tensors that a micro-batch of `size` samples sends to the stage above."""
        return [] if self.is_last else self.results[size][self.stage]

    def sent_specs(self) -> list[list[Spec]]:
        """Return the shapes and dtypes of the tensors that each micro-batch sends."""
        return [specs_of(self.sent(size), self.stage) for size in self.sizes]


def set_up_stage(
    request: ModelToCut, num_stages: int, stage: int, sizes: list[int], device: torch.device
) -> StageSetup:
    """Cut the model, and give this process's stage its memory on the device. `sizes`: samples of each micro-batch.
    Raises ValueError if the model cannot be cut in this way."""
    model, sample, dtype = request.model, request.sample, request.dtype
    if LOSS_SCALE in inspect.signature(model.forward).parameters:
        sample = {**sample, LOSS_SCALE: 1.0}
    names = counted_names(model, request.pairs)
    parts, active = _cut(model, sample, request.cuts, num_stages)
    shared = find_shared(model, parts, request.pairs)
    stage_of = _first_stages(parts)  # before give_memory(), after which two names of a weight may differ
    starts = _starting_weights(parts[stage].module, dtype, request.init_weights, device)
    if dtype:
        model.to(dtype)
    results = _results(parts, cast(sample, dtype), sizes)
    give_memory(model, starts)
    modes = {
        is_training: cut(model, traced(model.train(is_training), sample), active)[stage]
        for is_training in (False, True)
    }
    move([part.module for part in modes.values()], device)
    masters = Masters(
        dict(modes[True].module.named_parameters()),
        {name: start.to(device) for name, start in starts.items()} if dtype else None,
    )
    return StageSetup(
        stage=stage,
        num_stages=num_stages,
        sizes=sizes,
        device=device,
        active=active,
        modes=modes,
        masters=masters,
        names=names,
        stage_of=stage_of,
        shared=shared,
        results=results,
    )


def _first_stages(parts: Sequence[Part]) -> dict[str, int]:
    """Return the number of the first stage that has each weight."""
    stages: dict[str, int] = {}
    for number, part in enumerate(parts):
        for name, _ in part.module.named_parameters():
            stages.setdefault(name, number)
    return stages


def _cut(
    model: nn.Module, sample: Inputs, cuts: Sequence[int] | None, num_stages: int
) -> tuple[list[Part], list[int]]:
    """Return the parts of all stages, and the numbers of the CutPoints between them."""
    for name, module in model.named_modules():
        if not module.training:
            raise ValueError(
                "expected a model in train() mode, which a stage would return to, got"
                f" {name or type(model).__name__} in eval(); try model.train(), or a module without modes"
            )
    graph = traced(model, sample)
    num_cutpoints = num_cuts(graph)
    if cuts is not None:
        active = sorted(set(cuts))
        if len(active) != num_stages - 1 or any(index not in range(num_cutpoints) for index in active):
            raise ValueError(
                f"cuts: expected {counted(num_stages - 1, 'number')} of CutPoints, from 0 to {num_cutpoints - 1}, for"
                f" {counted(num_stages, 'stage')}, got {list(cuts)}"
            )
        return cut(model, graph, active), active
    sections = cut(model, graph, range(num_cutpoints))
    flops = [flops for _, flops in probe(sections, sample)]
    has_parameters = [any(True for _ in section.module.parameters()) for section in sections]
    active = choose_cuts(flops, has_parameters, num_stages)
    return cut(model, graph, active), active


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
    starts = {}
    for name, tensor in {**weights, **dict(module.named_buffers())}.items():
        if tensor.is_meta:
            is_rounded = dtype is not None and tensor.is_floating_point()
            starts[name] = torch.empty_like(
                tensor, device=device, dtype=torch.float32 if is_rounded else tensor.dtype
            )
    init_weights(starts.items())
    return starts


def _results(parts: Sequence[Part], sample: Inputs, sizes: Sequence[int]) -> dict[int, list[Any]]:
    """Return what each part returns, by the size of a micro-batch. Raises ValueError if a value cannot be sent, or if
    the last part returns no loss. `sample`: a batch of the largest size."""
    results = {
        size: [values for values, _ in probe(parts, resized(sample, size))] for size in sorted(set(sizes))
    }
    *lower_results, last_results = results[sizes[0]]
    loss = last_results[0][0] if isinstance(last_results[0], tuple | list) else last_results[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"expected the model's forward pass to return a loss of one element, got {got}")
    for number, values in enumerate(lower_results):
        specs_of(values, number)
    return results


def move(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Move the modules to the device, in place. A tensor that several of them hold stays one tensor."""
    on_device = functools.cache(lambda tensor: tensor.to(device))
    for module in modules:
        module._apply(on_device)


def counted_names(model: nn.Module, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the names of all weights in the model's order, without the second name of a parameter with two names. The
    global norm is summed in this order, so that it has the bits of the norm of a whole model."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    second_names = {
        other
        for name, other in pairs
        if name != other and name in weights and weights[name] is weights.get(other)
    }
    return [name for name in weights if name not in second_names]


def find_shared(model: nn.Module, parts: Sequence[Part], pairs: Sequence[tuple[str, str]]) -> list[Shared]:
    """Return the given pairs of names with their stages. Raises ValueError if a name is unknown or used by no stage, if
    the two shapes differ, if a parameter is used on both sides of a cut but is in no pair, or if more than two stages
    use a parameter."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    stages: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        for name, _ in part.module.named_parameters(remove_duplicate=False):
            stages.setdefault(name, []).append(number)
    shared_weights = []
    for name, other in pairs:
        _check_pair(name, other, weights, stages)
        shared = Shared(name, other, stages[name][0], stages[other][-1])
        if shared.stage != shared.other_stage or weights[name] is not weights[other]:
            shared_weights.append(shared)
    _check_all_paired(weights, stages, pairs)
    return shared_weights


def _check_pair(
    name: str, other: str, weights: Mapping[str, nn.Parameter], stages: Mapping[str, list[int]]
) -> None:
    for name_of_pair in (name, other):
        if name_of_pair not in weights:
            raise ValueError(
                f"shared_weights: the model has no parameter {name_of_pair}; try a name of named_parameters()"
            )
        if name_of_pair not in stages:
            raise ValueError(f"shared_weights: no stage uses {name_of_pair}")
    if weights[name].shape != weights[other].shape:
        raise ValueError(
            f"shared_weights: expected one shape, got {tuple(weights[name].shape)} of {name} and"
            f" {tuple(weights[other].shape)} of {other}"
        )


def _check_all_paired(
    weights: Mapping[str, nn.Parameter], stages: Mapping[str, list[int]], pairs: Sequence[tuple[str, str]]
) -> None:
    """Raise ValueError if a parameter is used on both sides of a cut but is in no pair, or is used by more than two
    stages."""
    paired = {frozenset((id(weights[name]), id(weights[other]))) for name, other in pairs}
    for name, weight in weights.items():
        for other, other_weight in weights.items():
            if other_weight is not weight or name > other or not stages.get(name) or not stages.get(other):
                continue
            users = sorted({*stages[name], *stages[other]})
            if len(users) > 1 and frozenset((id(weight), id(other_weight))) not in paired:
                raise ValueError(
                    f"parameter {name} is used by stages {' and '.join(map(str, users))}, on both sides of a cut; try"
                    f" shared_weights=[({name!r}, {other!r})]"
                )
            if len(users) > 2:
                raise ValueError(
                    f"parameter {name}: expected at most two stages that use it, got {len(users)}"
                )
