"""Reads and sets what DeepSpeed's optimizer keeps for each parameter if ZeRO splits nothing over ranks (stage 0).

DeepSpeed's own functions for this (deepspeed.utils.safe_get_full_fp32_param and others) know stages 1 to 3 only, and
return None. The attributes below are those of DeepSpeed 0.14 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class MainState(NamedTuple):
    """What the optimizer keeps for a parameter, as views: its fp32 weight, and Adam's state by name, empty before the
    first step."""

    weight: Any
    state: dict[str, Any]


def main_states_of(optimizer: Any) -> dict[int, MainState]:
    """Return what the optimizer of an engine of stage 0 keeps, by the identity of the parameter; empty if the optimizer
    is of another stage, or of a kind that DeepSpeed's own functions can read."""
    if hasattr(optimizer, "fp32_groups"):  # a main weight for each parameter
        groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        pairs = [pair for group in groups for pair in zip(*group, strict=True)]
        return {
            id(parameter): MainState(main.detach(), optimizer.optimizer.state[main])
            for parameter, main in pairs
        }
    if hasattr(optimizer, "fp32_groups_flat"):  # a flat main weight for each group
        return dict(_of_flat_groups(optimizer))
    if hasattr(optimizer, "optimizer"):
        return {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        id(parameter): MainState(parameter.detach(), optimizer.state[parameter]) for parameter in parameters
    }


def _of_flat_groups(optimizer: Any) -> Iterator[tuple[int, MainState]]:
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        state, start = optimizer.optimizer.state[flat], 0
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter_state = {
                name: value[start:stop].view_as(parameter)
                for name, value in state.items()
                if getattr(value, "shape", None) == flat.shape
            }
            yield id(parameter), MainState(flat.detach()[start:stop].view_as(parameter), parameter_state)
            start = stop
