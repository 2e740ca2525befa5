"""Runs any of torch's optimizers with its states in a slab of bytes. The slab is copied between host and device
together with the shard's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from methods.shared.module_watch import hooks_of_step

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
States = dict[str, Tensor]  # the tensors that an optimizer keeps for a parameter, by the optimizer's keys
MASTER = "master"  # key of the fp32 weights of mixed precision, which are kept among the optimizer's states
ANOTHER = "try another, such as torch.optim.AdamW"


def state_tensors(
    make_optimizer: MakeOptimizer, weights: Mapping[str, Tensor], *, is_mixed: bool
) -> dict[str, States]:
    """Return the states that the optimizer keeps for each weight, as meta tensors, which have no memory. The states are
    found by a step on the meta device or, if the optimizer reads values in a step, on the host, weight by weight.
    `is_mixed`: True: add an fp32 master. Each shard has an optimizer of its own. Therefore raises ValueError if the
    optimizer keeps values that are not tensors, or values that several parameters share.
    """
    parameters = {}
    for name, weight in weights.items():
        dtype = torch.float32 if is_mixed else weight.dtype
        parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=dtype, device="meta"))
    if not weights:
        return {}
    try:
        states_of_parameters = _states_after_step(make_optimizer, list(parameters.values()))
    except RuntimeError:
        states_of_parameters = []
        for parameter in parameters.values():
            with_memory = nn.Parameter(torch.ones_like(parameter, device="cpu"))
            (states,) = _states_after_step(make_optimizer, [with_memory])
            states_of_parameters.append({key: value.to("meta") for key, value in states.items()})
    return {
        name: ({MASTER: parameter.detach()} if is_mixed else {}) | states
        for (name, parameter), states in zip(parameters.items(), states_of_parameters, strict=True)
    }


def _states_after_step(make_optimizer: MakeOptimizer, parameters: list[nn.Parameter]) -> list[States]:
    """Return the states that an optimizer has for these parameters after a step. Raises what state_tensors() raises."""
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(list(parameters))
    class_name, groups = type(optimizer).__name__, optimizer.param_groups
    if sorted(id(p) for group in groups for p in group["params"]) != sorted(map(id, parameters)):
        raise ValueError(
            f"{class_name}: expected an optimizer of the parameters that it is given, got other parameters;"
            " try to make it of the argument"
        )
    if hooks_of_step(optimizer):
        raise ValueError(
            f"{class_name}: expected an optimizer without hooks of its step(), which takes a shard at a time;"
            " try to do their work between the steps"
        )
    for group in groups:  # torch's fused, foreach and capturable steps do not run on the meta device
        group.update({key: False for key in ("fused", "foreach", "capturable") if key in group})
    values_before = _shared_values(optimizer)
    try:
        optimizer.step()
    except TypeError as error:
        raise ValueError(
            f"{class_name}: expected an optimizer whose step() takes no arguments ({error}); {ANOTHER}"
        ) from error
    if values_before != _shared_values(optimizer):
        raise ValueError(
            f"{class_name}: expected states of single parameters, got values that all of them share; {ANOTHER}"
        )
    for states in optimizer.state.values():
        for key, value in states.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{class_name}: expected only tensors as state, got {key}; {ANOTHER}")
    return [optimizer.state[parameter] for parameter in parameters]


def _shared_values(optimizer: torch.optim.Optimizer) -> list[object]:
    """Return the values that an optimizer keeps for all parameters together: those of its groups, and its
    own attributes."""
    attributes = {
        key: value for key, value in vars(optimizer).items() if isinstance(value, int | float | str)
    }
    shared = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    return [{key: value for key, value in attributes.items() if not key.startswith("_")}, shared]


def step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], states: list[States], *, is_first: bool
) -> None:
    """Take one optimizer step. `states`: for each parameter the tensors in a slot that hold its states.

    In the first step the optimizer makes its own states, outside of the slot, and these are copied into the slot. To
    keep few states outside at once, the first step updates one parameter at a time.
    """
    states_for_optimizer = [dict(state) for state in states]
    if not is_first:
        states_for_optimizer = with_numbers_on_host(optimizer, states)
    triples = zip(parameters, states, states_for_optimizer, strict=True)
    updates = [
        (parameter, parameter.grad, state, optimizer_states) for parameter, state, optimizer_states in triples
    ]
    for parameter in parameters:
        parameter.grad = None  # the optimizer skips a parameter without a gradient
    batches_of_updates = [[parameter_update] for parameter_update in updates] if is_first else [updates]
    for updates_at_once in batches_of_updates:
        for parameter, grad, _, optimizer_states in updates_at_once:
            parameter.grad = grad
            if not is_first:
                optimizer.state[parameter] = optimizer_states
        optimizer.step()
        for parameter, _, state, _ in updates_at_once:
            parameter.grad = None
            _copy_to_slot(optimizer.state.pop(parameter, {}), state)


def with_numbers_on_host(optimizer: torch.optim.Optimizer, states: list[States]) -> list[States]:
    """Return the states. States that are single numbers, such as Adam's count of steps, are moved to the host.

    An optimizer that is neither fused nor capturable reads each of these numbers in a step. Each read from a device
    would wait for the device, so one copy brings all of them to the host. For other optimizers nothing is moved.
    """
    copies = [dict(state) for state in states]
    if any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return copies
    numbers = [(state, key) for state in copies for key, value in state.items() if not value.dim()]
    if numbers and (first_number := numbers[0][0][numbers[0][1]]).device.type != "cpu":
        on_host = torch.stack([state[key].to(first_number.dtype) for state, key in numbers]).cpu()
        for (state, key), value in zip(numbers, on_host, strict=True):
            state[key] = value.to(state[key].dtype, copy=True)
    return copies


def _copy_to_slot(new_states: States, states: States) -> None:
    """Copy a parameter's states from `new_states`, the tensors that the optimizer has, to `states`, the tensors in the
    slot. A state that is the slot's own tensor is not copied."""
    with torch.no_grad():
        for key, value in new_states.items():
            if value is not states[key]:
                # Wait for the copy of a single number, because the host reads it at once.
                states[key].copy_(value, non_blocking=not value.dim())
