"""Faults of mixtures of experts: a token meets other experts than the reference's, or an expert's gradient is lost.
Each fault changes the modules of the library transformers. bench/faults/planted.py trains models with these faults.

A module of experts gets, beside its input, for each token the numbers of its experts and their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from harness.models.grouped_experts import MARK

Breaks = Callable[[Any], None]  # a function that plants the fault in a HubModel
Reroutes = Callable[[Any, Any], tuple[Any, Any]]  # maps numbers and weights of experts to others
LAYER = 1  # the layer with the fault, where one layer alone has it


def of(layer: dict[str, Any]) -> dict[str, Breaks]:
    """Return the faults of a mixture, by name; none if a layer with these tensors is no mixture."""
    return FAULTS if any("experts" in name for name in layer) else {}


def _experts(model: Any) -> Iterator[Any]:
    return (module for module in model.layers[LAYER].modules() if hasattr(module, MARK))


def _rerouted(change: Reroutes) -> Breaks:
    """Return a fault that changes the numbers and the weights of the experts in a layer."""

    def plant(model: Any) -> None:
        for experts in _experts(model):
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

    for experts in _experts(model):
        count: dict[str, Any] = {}

        def when_routed(experts: Any, args: Any, count: dict[str, Any] = count) -> None:
            count["tokens"] = torch.bincount(args[1].flatten().cpu(), minlength=experts.num_experts)

        def drop(grad: Any, count: dict[str, Any] = count) -> Any:
            grad = grad.clone()
            used = count["tokens"].masked_fill(count["tokens"] == 0, grad.shape[1] * 2**20)
            grad[int(used.argmin())] = 0
            return grad

        experts.register_forward_pre_hook(when_routed)
        for weight in experts.parameters():
            weight.register_hook(drop)


def _routers(model: Any) -> list[Any]:
    """Return the modules of the layers that choose experts: those with a matrix of a row for each expert."""
    found = []
    for layer in model.layers:
        numbers = [module.num_experts for module in layer.modules() if hasattr(module, MARK)]
        found += [
            module
            for module in layer.modules()
            if numbers and not hasattr(module, MARK) and _rows(module) == numbers[0]
        ]
    return found


def _rows(module: Any) -> int:
    weight = module._parameters.get("weight")
    return len(weight) if weight is not None and weight.ndim == 2 else 0


def _with_function(owner: str, name: str, other: Callable[[Any], Any]) -> Breaks:
    """Return a fault: while a layer's router computes, other(function) takes the place of a function of torch."""

    def plant(model: Any) -> None:
        import torch

        home = torch.nn.functional if owner == "functional" else torch
        router = _routers(model)[LAYER]
        forward = router.forward

        def changed(*args: Any, **words: Any) -> Any:
            original = getattr(home, name)
            setattr(home, name, other(original))
            try:
                return forward(*args, **words)
            finally:
                setattr(home, name, original)

        router.forward = changed

    return plant


def _rounded(linear: Any) -> Any:
    """Round a router's scores to 8 bits, as bf16 has them."""

    def rounded(*args: Any, **words: Any) -> Any:
        scores = linear(*args, **words)
        return scores.bfloat16().to(scores.dtype)

    return rounded


def _last_first(topk: Any) -> Any:
    """Choose the last of several experts with the same score first, instead of any of them."""

    def choose(scores: Any, number: int, dim: int = -1, **words: Any) -> Any:
        values, numbers = topk(scores.flip(dim), number, dim=dim, **words)
        return values, scores.shape[dim] - 1 - numbers

    return choose


def _of_other_layer(model: Any) -> None:
    """Let two layers route by each other's router."""
    one, other = _routers(model)[LAYER : LAYER + 2]
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
