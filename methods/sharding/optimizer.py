"""The optimizer of a shard that travels: any of torch's, its states kept in a slab of bytes at home between steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MASTER = "master"  # the fp32 weights of mixed precision, which travel as a state


def state_tensors(make_optimizer: MakeOptimizer, weights: list[Tensor], *, mixed: bool) -> list[dict[str, Tensor]]:
    """For each weight the states that an optimizer keeps of it, and its fp32 master in mixed precision: tensors without
    memory, made by a step on such. Raises ValueError for an optimizer that keeps anything but tensors."""
    if not weights:
        return []
    dtypes = [torch.float32 if mixed else weight.dtype for weight in weights]
    shapes = [weight.shape for weight in weights]
    parameters = [
        nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = make_optimizer(parameters)
    for group in optimizer.param_groups:  # such variants ask for a device that there is
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


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """As torch.nn.utils.clip_grad_norm_ scales gradients of this norm."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
