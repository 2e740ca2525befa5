"""Runs any of torch's optimizers with its states in a slab of bytes. The slab is copied between host and device
together with the shard's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
States = dict[str, Tensor]  # the tensors that an optimizer keeps for a parameter, by the optimizer's keys
MASTER = "master"  # key of the fp32 weights of mixed precision, which are kept among the optimizer's states


def state_tensors(make_optimizer: MakeOptimizer, weights: Mapping[str, Tensor], *, mixed: bool) -> dict[str, States]:
    """Return the states that the optimizer keeps for each weight, as meta tensors, which have no memory. The states are
    found by a step on the meta device. `mixed`: True: add an fp32 master. Raises ValueError if the optimizer keeps
    values that are not tensors.
    """
    if not weights:
        return {}
    parameters = {}
    for name, weight in weights.items():
        dtype = torch.float32 if mixed else weight.dtype
        parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=dtype, device="meta"))
        parameters[name].grad = torch.empty_like(parameters[name])
    optimizer = make_optimizer(list(parameters.values()))
    for group in optimizer.param_groups:  # torch's fused, foreach and capturable steps do not run on the meta device
        group.update({key: False for key in ("fused", "foreach", "capturable") if key in group})
    optimizer.step()
    found = {}
    for name, parameter in parameters.items():
        found[name] = ({MASTER: parameter.detach()} if mixed else {}) | optimizer.state[parameter]
        for key, value in found[name].items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{type(optimizer).__name__}: expected only tensors as state, got {key}")
    return found


def step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], states: list[States], *, is_first: bool
) -> None:
    """Take one optimizer step. `states`: for each parameter the tensors in a slot that hold its states.

    In the first step the optimizer makes its own states, outside of the slot, and these are copied into the slot. To
    keep few states outside at once, the first step updates one parameter at a time.
    """
    given = [dict(each) for each in states] if is_first else with_numbers_on_host(optimizer, states)
    each_of = zip(parameters, states, given, strict=True)
    rows = [(parameter, parameter.grad, each, kept) for parameter, each, kept in each_of]
    for parameter in parameters:
        parameter.grad = None  # the optimizer skips a parameter without a gradient
    for together in [[row] for row in rows] if is_first else [rows]:
        for parameter, grad, _, kept in together:
            parameter.grad = grad
            if not is_first:
                optimizer.state[parameter] = kept
        optimizer.step()
        for parameter, _, each, _ in together:
            parameter.grad = None
            _keep(optimizer.state.pop(parameter, {}), each)


def with_numbers_on_host(optimizer: torch.optim.Optimizer, states: list[States]) -> list[States]:
    """Return the states. States that are single numbers, such as Adam's count of steps, are moved to the host.

    An optimizer that is neither fused nor capturable reads each of these numbers in a step. Each read from a device
    would wait for the device, so one copy brings all of them to the host. For other optimizers nothing is moved.
    """
    found = [dict(each) for each in states]
    if any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return found
    numbers = [(each, key) for each in found for key, value in each.items() if not value.dim()]
    if numbers and (first := numbers[0][0][numbers[0][1]]).device.type != "cpu":
        on_host = torch.stack([each[key].to(first.dtype) for each, key in numbers]).cpu()
        for (each, key), value in zip(numbers, on_host, strict=True):
            each[key] = value.to(each[key].dtype, copy=True)
    return found


def _keep(made: States, states: States) -> None:
    """Copy a parameter's states, `made` by the optimizer, into the slot's tensors `states`. A state that is already in
    the slot is not copied."""
    with torch.no_grad():
        for key, value in made.items():
            if value is not states[key]:
                states[key].copy_(value, non_blocking=not value.dim())  # the host reads single numbers at once: wait
