"""Any of torch's optimizers with its states in a slab of bytes, which travels with the shard."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
States = dict[str, Tensor]  # the tensors that an optimizer keeps for a parameter, by its keys for them
MASTER = "master"  # the fp32 weights of mixed precision, which travel as a state


def state_tensors(make_optimizer: MakeOptimizer, weights: list[Tensor], *, mixed: bool) -> list[States]:
    """The states of each weight as tensors without memory, in mixed precision with an fp32 master: those that the
    optimizer makes in a step on the meta device. Raises ValueError for an optimizer that keeps anything but tensors."""
    if not weights:
        return []
    parameters = []
    for weight in weights:
        dtype = torch.float32 if mixed else weight.dtype
        parameters.append(nn.Parameter(torch.empty(weight.shape, dtype=dtype, device="meta")))
        parameters[-1].grad = torch.empty_like(parameters[-1])
    optimizer = make_optimizer(parameters)
    for group in optimizer.param_groups:  # these variants refuse the meta device
        group.update({key: False for key in ("fused", "foreach", "capturable") if key in group})
    optimizer.step()
    found = []
    for parameter in parameters:
        states = {MASTER: parameter.detach()} if mixed else {}
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{type(optimizer).__name__} keeps {key}, which is no tensor and cannot travel")
            states[key] = value
        found.append(states)
    return found


def step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], states: list[States], *, is_first: bool
) -> None:
    """One step with the states in a slot."""
    if not is_first:
        optimizer.state.update((parameter, dict(each)) for parameter, each in zip(parameters, states, strict=True))
        optimizer.step()
        for parameter, each in zip(parameters, states, strict=True):
            _keep(optimizer, parameter, each)
        return
    # The optimizer makes its states itself, beside the slot: one parameter at a time, so that they are few.
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for parameter, grad, each in zip(parameters, grads, states, strict=True):
        parameter.grad = grad
        optimizer.step()
        _keep(optimizer, parameter, each)
        parameter.grad = None
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def _keep(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, states: States) -> None:
    """Move a parameter's states from the optimizer into the slot, unless they lie there already."""
    with torch.no_grad():
        for key, value in optimizer.state.pop(parameter, {}).items():
            if value is not states[key]:
                states[key].copy_(value)
