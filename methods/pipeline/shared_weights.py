"""Finds the parameters that two stages share, or that one stage has under two names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from methods.pipeline.cut import Part


class Shared(NamedTuple):
    """A weight that two stages share, or that one stage has under two names. The norm counts only the first name."""

    name: str
    other: str
    stage: int
    other_stage: int


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
