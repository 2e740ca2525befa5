"""Faults of a training of adapters on frozen weights (--lora). bench/faults/planted.py trains models with these faults.

Each fault is of a kind that an offloading method could have: adapters that are not those of the reference, or frozen
weights that change, come late, or belong to another layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.core.adapters import B_NAME, is_first_factor
from harness.core.job import WEIGHT_DECAY

Plant = Callable[[Any], None]  # changes a Loop of bench/faults/planted.py before its training begins
LAYER = 1  # the layer with the fault, where one layer alone has it
SMALL = 1e-3  # standard deviation of B where B should start at zero
ONE_ULP = 2**-8  # relative distance of neighbours in bf16
FAULTS: dict[str, Plant] = {}


def _fault(name: str) -> Callable[[Plant], Plant]:
    def add(plant: Plant) -> Plant:
        FAULTS[name] = plant
        return plant

    return add


def _adapted(layer: Any) -> list[Any]:
    """Return the layer's linear modules with adapters."""
    return [module for module in layer.modules() if hasattr(module, "base_layer")]


def _pairs(loop: Any) -> list[tuple[Any, Any]]:
    """Return the linear modules of the layer with the fault, each with the same module of the layer after it."""
    one, other = loop.model.layers[LAYER : LAYER + 2]
    return list(zip(_adapted(one), _adapted(other), strict=True))


@_fault("alpha twice as large")
def _alpha(loop: Any) -> None:
    for layer in loop.model.layers:
        for module in _adapted(layer):
            module.scaling["default"] *= 2


@_fault("B of a layer not zero at the start")
def _start(loop: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    for name, master in loop.masters.items():
        if name.startswith(loop.layer) and name.endswith(B_NAME):
            master.data.copy_(SMALL * torch.randn(master.shape, generator=generator))


@_fault("dropout in the adapters")
def _dropout(loop: Any) -> None:
    import torch

    for layer in loop.model.layers:
        for module in _adapted(layer):
            module.lora_dropout["default"] = torch.nn.Dropout(0.05)


@_fault("an adapter never updated")
def _frozen(loop: Any) -> None:
    first = next(name for name in loop.masters if name.startswith(loop.layer))
    loop.is_updated = lambda name: name != first


@_fault("adapters of two layers swapped")
def _swapped(loop: Any) -> None:
    for one, other in _pairs(loop):
        one.lora_A, other.lora_A = other.lora_A, one.lora_A
        one.lora_B, other.lora_B = other.lora_B, one.lora_B


@_fault("gradients of two layers' adapters swapped")
def _swapped_gradients(loop: Any) -> None:
    def change(grads: dict[str, Any]) -> None:
        for name in [name for name in grads if name.startswith(loop.layer)]:
            other = name.replace(loop.layer, loop.next)
            grads[name], grads[other] = grads[other], grads[name]

    loop.change_gradients = change


@_fault("the gradient of B lost once")
def _lost(loop: Any) -> None:
    def change(grads: dict[str, Any]) -> None:
        for name, grad in grads.items():
            if loop.step == 3 and name.startswith(loop.layer) and name.endswith(B_NAME):
                grad.zero_()

    loop.change_gradients = change


@_fault("A of a layer without decay")
def _undecayed(loop: Any) -> None:
    def decay(name: str) -> float:
        return 0.0 if name.startswith(loop.layer) and is_first_factor(name) else WEIGHT_DECAY

    loop.decay = decay


@_fault("adapters rounded to bf16 after each update")
def _rounded(loop: Any) -> None:
    def round_all() -> None:
        for master in loop.masters.values():
            master.data.copy_(master.data.bfloat16())

    loop.after_update = round_all


@_fault("the base decayed")
def _base_decayed(loop: Any) -> None:
    def decay() -> None:
        for name, weight in loop.frozen.items():
            if name.startswith(loop.layer) and weight.ndim > 1:
                weight.mul_(1 - ONE_ULP)

    loop.after_update = decay


@_fault("backward pass by the next layer's weights")
def _other_backward(loop: Any) -> None:
    """The slot was filled again before the backward pass: the gradient of the layer's input is another layer's."""
    for one, other in _pairs(loop):
        _replace_product(one.base_layer, forward_weight=None, backward_weight=other.base_layer.weight)


@_fault("forward pass before the whole copy has landed")
def _torn(loop: Any) -> None:
    """The last eighth of each matrix's rows is still the next layer's."""
    import torch

    for one, other in _pairs(loop):
        weight = one.base_layer.weight
        num_old = max(1, len(weight) // 8)
        torn = torch.cat([weight[:-num_old], other.base_layer.weight[-num_old:]])
        _replace_product(one.base_layer, forward_weight=torn, backward_weight=weight)


@_fault("recompute of a layer by the next layer's weights")
def _other_recompute(loop: Any) -> None:
    """Each second pass, the recompute, has the next layer's matrices, so the adapters' gradients are of other
    activations."""
    for one, other in _pairs(loop):
        linear, forward, calls = one.base_layer, one.base_layer.forward, [0]

        def compute(
            x: Any, linear: Any = linear, other: Any = other, forward: Any = forward, calls: Any = calls
        ) -> Any:
            calls[0] += 1
            return (other.base_layer.forward if calls[0] % 2 == 0 else forward)(x)

        linear.forward = compute


def _replace_product(linear: Any, forward_weight: Any, backward_weight: Any) -> None:
    """Let a linear module compute its output by one matrix, and its input's gradient by another; None: its own."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            weight = linear.weight if forward_weight is None else forward_weight
            return torch.nn.functional.linear(x, weight.to(x.device), linear.bias)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] @ (linear.weight if backward_weight is None else backward_weight)

    linear.forward = Product.apply
