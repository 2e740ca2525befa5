"""Faults of mixtures of experts: a token meets other experts than the reference's, or an expert's gradient is lost.
Each fault changes the modules of the library transformers. bench/faults/planted.py trains models with these faults.

A module of experts gets, beside its input, for each token the numbers of its experts and their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.replaced_functions import Breaks, replace_within
from harness.core.job import Workload
from harness.models.grouped_experts import experts_of

Reroutes = Callable[[Any, Any], tuple[Any, Any]]  # maps numbers and weights of experts to others
LAYER = 1  # the layer with the fault; one fault exchanges its router with that of the next layer


def of(workload: Workload) -> dict[str, Breaks]:
    """Return the faults of a mixture, by name; none if the layer with the fault or the next layer has no experts."""
    if workload.num_layers < LAYER + 2:
        return {}
    kinds = [workload.anatomy.kind_of(index) for index in (LAYER, LAYER + 1)]
    return FAULTS if all(any("experts" in name for name in kind.tensors) for kind in kinds) else {}


def _rerouted(change: Reroutes) -> Breaks:
    """Return a fault that changes the numbers and the weights of the experts in a layer."""

    def plant(model: Any) -> None:
        for experts in experts_of(model.layers[LAYER]):
            experts.register_forward_pre_hook(lambda _, args: (args[0], *change(*args[1:])))

    return plant


def _swapped(numbers: Any, weights: Any) -> tuple[Any, Any]:
    """Let the experts 0 and 1 compute each other's tokens."""
    import torch

    return torch.where(numbers < 2, 1 - numbers, numbers), weights


def _without_last(numbers: Any, weights: Any) -> tuple[Any, Any]:
    """Leave out the last of each token's experts."""
    import torch

    kept = torch.ones_like(weights)
    kept[..., -1] = 0
    return numbers, weights * kept


def _alike(numbers: Any, weights: Any) -> tuple[Any, Any]:
    """Give all of a token's experts the same weight, without changing the sum of the weights."""
    return numbers, weights.mean(-1, keepdim=True).expand_as(weights)


def _without_gradient(model: Any) -> None:
    """Drop the gradient of the expert that the fewest tokens chose."""
    import torch

    for experts in experts_of(model.layers[LAYER]):
        count: dict[str, Any] = {}

        def when_routed(experts: Any, args: Any, count: dict[str, Any] = count) -> None:
            count["tokens"] = torch.bincount(args[1].flatten().cpu(), minlength=experts.num_experts)

        def drop(grad: Any, count: dict[str, Any] = count) -> Any:
            tokens, grad = count["tokens"], grad.clone()
            of_used = tokens.masked_fill(
                tokens == 0, int(tokens.sum()) + 1
            )  # an unused expert is not the least used
            grad[int(of_used.argmin())] = 0
            return grad

        experts.register_forward_pre_hook(when_routed)
        for weight in experts.parameters():
            weight.register_hook(drop)


def _router(layer: Any) -> Any:
    """Return the module of a layer that chooses experts: the one with a matrix of a row for each expert."""
    (experts,) = experts_of(layer)
    return next(
        module for module in layer.modules() if module is not experts and _rows(module) == experts.num_experts
    )


def _rows(module: Any) -> int:
    weight = module._parameters.get("weight")
    return len(weight) if weight is not None and weight.ndim == 2 else 0


def _with_function(owner: str, name: str, other: Callable[[Any], Any]) -> Breaks:
    """Return a fault: while a layer's router computes, other(function) takes the place of a function of torch."""

    def plant(model: Any) -> None:
        import torch

        home = torch.nn.functional if owner == "functional" else torch
        replace_within(_router(model.layers[LAYER]), home, name, other)

    return plant


def _rounded(linear: Any) -> Any:
    """Round a router's scores to 8 bits, as bf16 has them."""

    def rounded(*args: Any, **options: Any) -> Any:
        scores = linear(*args, **options)
        return scores.bfloat16().to(scores.dtype)

    return rounded


def _last_first(topk: Any) -> Any:
    """Choose the last of several experts with the same score first, instead of any of them."""

    def choose(scores: Any, number: int, dim: int = -1, **options: Any) -> Any:
        values, numbers = topk(scores.flip(dim), number, dim=dim, **options)
        return values, scores.shape[dim] - 1 - numbers

    return choose


def _of_other_layer(model: Any) -> None:
    """Let two layers route by each other's router."""
    one, other = map(_router, model.layers[LAYER : LAYER + 2])
    one.forward, other.forward = other.forward, one.forward


FAULTS: dict[str, Breaks] = {
    "two experts swapped": _rerouted(_swapped),
    "a token's last expert left out": _rerouted(_without_last),
    "a token's experts weighted alike": _rerouted(_alike),
    "gradient of the least used expert dropped": _without_gradient,
    "router's scores rounded to bf16": _with_function("functional", "linear", _rounded),
    "router of the next layer": _of_other_layer,
}
# No faults, but another choice among experts with the very same score, as kernels may choose. In bf16 scores are often
# the same.
TIES: dict[str, Breaks] = {"ties of experts broken otherwise": _with_function("torch", "topk", _last_first)}
