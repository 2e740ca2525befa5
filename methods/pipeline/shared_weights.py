"""Finds the parameters that two stages share, or that one stage has under two names."""

from __future__ import annotations

from collections.abc import Sequence
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
    whole = dict(model.named_parameters(remove_duplicate=False))
    again = {
        other for name, other in pairs if name != other and name in whole and whole[name] is whole.get(other)
    }
    return [name for name in whole if name not in again]


def find_shared(model: nn.Module, parts: Sequence[Part], pairs: Sequence[tuple[str, str]]) -> list[Shared]:
    """Return the given pairs of names with their stages. Raises ValueError if a name is unknown or used by no stage, if
    the two shapes differ, if a parameter is used on both sides of a cut but is in no pair, or if more than two stages
    use a parameter."""
    whole = dict(model.named_parameters(remove_duplicate=False))
    stages: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        for name, _ in part.module.named_parameters(remove_duplicate=False):
            stages.setdefault(name, []).append(number)
    found = []
    for name, other in pairs:
        for each in (name, other):
            if each not in whole:
                raise ValueError(
                    f"shared_weights: the model has no parameter {each}; try a name of named_parameters()"
                )
            if each not in stages:
                raise ValueError(f"shared_weights: no stage uses {each}")
        if whole[name].shape != whole[other].shape:
            raise ValueError(
                f"shared_weights: expected one shape, got {tuple(whole[name].shape)} of {name} and"
                f" {tuple(whole[other].shape)} of {other}"
            )
        shared = Shared(name, other, stages[name][0], stages[other][-1])
        if shared.stage != shared.other_stage or whole[name] is not whole[other]:
            found.append(shared)
    told = {frozenset((id(whole[name]), id(whole[other]))) for name, other in pairs}
    for name, weight in whole.items():
        for other, another in whole.items():
            if another is not weight or name > other or not stages.get(name) or not stages.get(other):
                continue
            places = sorted({*stages[name], *stages[other]})
            if len(places) > 1 and frozenset((id(weight), id(another))) not in told:
                raise ValueError(
                    f"parameter {name} is used by stages {' and '.join(map(str, places))}, on both sides of a cut; try"
                    f" shared_weights=[({name!r}, {other!r})]"
                )
            if len(places) > 2:
                raise ValueError(
                    f"parameter {name}: expected at most two stages that use it, got {len(places)}"
                )
    return found
