"""One optimizer step of a shard in its slot."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from methods.sharding.optimizer import MASTER
from methods.sharding.shard import Shard


def step(shard: Shard, slab: Tensor, factor: Tensor | None, learning_rate: float | None, *, is_first: bool) -> None:
    """One step on a shard bound to its slot, from its gradients times the factor; `slab` holds its states there.

    torch's own optimizer on parameters shaped as the model's: its very bits, whatever it computes.
    """
    states = [shard.states(slab, name) for name in shard.trained]
    weights = [shard.parameters[name] for name in shard.trained]
    stepped = weights
    if shard.mixed:
        masters = [each.pop(MASTER) for each in states]
        stepped = shard.masters = shard.masters or [nn.Parameter(master) for master in masters]
        for parameter, master, weight in zip(stepped, masters, weights, strict=True):
            assert weight.grad is not None
            parameter.data, parameter.grad = master, weight.grad.float()
    if factor is not None:
        torch._foreach_mul_([parameter.grad for parameter in stepped if parameter.grad is not None], factor)
    optimizer = shard.optimizer = shard.optimizer or shard.make_optimizer(stepped)
    if learning_rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
    if is_first:
        _first_step(optimizer, stepped, states)
    else:
        for parameter, each in zip(stepped, states, strict=True):
            optimizer.state[parameter] = dict(each)
        optimizer.step()
        for parameter, each in zip(stepped, states, strict=True):
            _keep(optimizer, parameter, each)
    with torch.no_grad():
        if shard.mixed:
            torch._foreach_copy_([*weights], [*stepped])
            for parameter in stepped:
                parameter.grad = None


def _first_step(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], states: list[dict[str, Tensor]]
) -> None:
    """The optimizer makes its states itself, beside the slot: one parameter at a time, so that they are few."""
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


def _keep(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, states: dict[str, Tensor]) -> None:
    """Take a parameter's states from the optimizer into the slot, where they are not there already."""
    with torch.no_grad():
        for key, value in optimizer.state.pop(parameter, {}).items():
            if value is not states[key]:
                states[key].copy_(value)
