"""Faults of a training's steps, of a kind that an offloading method could have: what is updated, when and by which
numbers, which gradient a tensor gets, and what the model computes.

A fault is a function that changes a Loop before its training begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.core.job import BETAS, WEIGHT_DECAY
from methods.planted import MOMENTS, Loop, patch  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from torch import Tensor

STRIKES = 5  # the step, from 1, at which a fault of a single step happens
FAULTS: dict[str, Callable[[Loop], None]] = {}


def _fault(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[..., None]) -> Callable[..., None]:
        FAULTS[name] = function
        return function

    return add


def is_bias(name: str) -> bool:
    return name.endswith("bias") and not is_of_norm(name)


def is_of_norm(name: str) -> bool:
    return ".ln" in name or "norm." in name


def _never(loop: Loop, is_left_out: Callable[[str], bool]) -> None:
    loop.is_updated = lambda name: not is_left_out(name)  # type: ignore[method-assign]


FAULTS["a layer's update skipped once"] = lambda loop: _never(
    loop, lambda name: loop.step == STRIKES and name.startswith(loop.layer)
)
FAULTS["a layer's update skipped always"] = lambda loop: _never(
    loop, lambda name: name.startswith(loop.layer)
)
FAULTS["a layer's update skipped every other step"] = lambda loop: _never(
    loop, lambda name: loop.step % 2 == 0 and name.startswith(loop.layer)
)
FAULTS["biases never updated"] = lambda loop: _never(loop, is_bias)
FAULTS["norms never updated"] = lambda loop: _never(loop, is_of_norm)


@_fault("only the first rows of each tensor updated")
def _first_rows(loop: Loop) -> None:
    import torch

    def before() -> None:
        loop.memory = {name: master.detach().clone() for name, master in loop.masters.items()}

    def after() -> None:
        with torch.no_grad():
            for name, master in loop.masters.items():
                master[1:] = loop.memory[name][1:]

    loop.before_update, loop.after_update = before, after  # type: ignore[method-assign]


def _with(**changes: Any) -> Callable[[Loop], None]:
    return lambda loop: vars(loop).update(changes)


FAULTS["decay on norms and biases"] = _with(decay=lambda name: WEIGHT_DECAY)
FAULTS["no decay"] = _with(decay=lambda name: 0.0)
FAULTS["epsilon 1e-6"] = _with(epsilon=1e-6)
FAULTS["epsilon 1e-10"] = _with(epsilon=1e-10)
FAULTS["beta2 0.95"] = _with(betas=(BETAS[0], 0.95))
FAULTS["beta1 0.95"] = _with(betas=(0.95, BETAS[1]))
FAULTS["clip off"] = _with(clip=lambda grads, norm: None)
FAULTS["clip at half"] = lambda loop: vars(loop).update(max_norm=loop.max_norm / 2)


def _count_from(loop: Loop, count: Callable[[int], int]) -> None:
    """Plant a fault: at step n, AdamW uses the bias correction of step count(n)."""

    def before() -> None:
        import torch

        for master in loop.masters.values():
            state = loop.optimizer.state[master]
            if not state:
                state |= {"step": torch.zeros(()), **{name: torch.zeros_like(master) for name in MOMENTS}}
            state["step"].fill_(count(loop.step) - 1)

    loop.before_update = before  # type: ignore[method-assign]


FAULTS["no bias correction"] = lambda loop: _count_from(loop, lambda step: 10**6)
FAULTS["step off by one"] = lambda loop: _count_from(loop, lambda step: step + 1)


@_fault("constant rate on some layers")
def _constant(loop: Loop) -> None:
    of_step = loop.workload.learning_rate_at
    loop.rate = lambda name: of_step(3200 if name.startswith(loop.layer) else loop.step)  # type: ignore[method-assign]


FAULTS["rate one step late"] = lambda loop: vars(loop).update(
    rate=lambda name: loop.workload.learning_rate_at(loop.step - 1)
)


@_fault("clip by each layer's norm")
def _clip_each(loop: Loop) -> None:
    whole = loop.clip

    def clip(grads: dict[str, Tensor], norm: Tensor) -> None:
        prefix = loop.workload.anatomy.layer_prefix
        owners = {
            name[: len(prefix) + 2] if name.startswith(prefix) else name.rpartition(".")[0] for name in grads
        }  # valid for up to 10 layers, because layer numbers must have one digit
        for group in owners:
            some = {name: grad for name, grad in grads.items() if name.startswith(group)}
            whole(some, Loop.norm(loop, some))

    loop.clip = clip  # type: ignore[method-assign]


@_fault("norm counts the embedding twice")
def _twice(loop: Loop) -> None:
    import torch

    loop.norm = lambda grads: torch.nn.utils.get_total_norm([*grads.values(), grads[loop.table]])  # type: ignore


@_fault("norm leaves out a layer")
def _left_out(loop: Loop) -> None:
    loop.norm = lambda grads: Loop.norm(  # type: ignore[method-assign]
        loop, {name: grad for name, grad in grads.items() if not name.startswith(loop.layer)}
    )


def _stale_gradients(starts: Callable[[Loop], tuple[str, ...]]) -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        def change(grads: dict[str, Tensor]) -> None:
            for name in loop.of(*starts(loop)):
                fresh = grads[name]
                grads[name] = loop.memory.get(name, fresh).clone()
                loop.memory[name] = fresh.clone()

        loop.change_gradients = change  # type: ignore[method-assign]

    return plant


FAULTS["gradient a step stale in a layer"] = _stale_gradients(lambda loop: (loop.layer,))
FAULTS["gradient a step stale everywhere"] = _stale_gradients(lambda loop: ("",))
FAULTS["gradient a step stale in a window"] = _stale_gradients(lambda loop: (loop.layer, loop.next))


@_fault("weights a step stale")
def _stale_weights(loop: Loop) -> None:
    import torch

    whole = loop.backward

    def backward(inputs: Tensor, targets: Tensor) -> Tensor:
        fresh = {name: weight.detach().clone() for name, weight in loop.weights.items()}
        with torch.no_grad():
            for name, weight in loop.weights.items():
                weight.copy_(loop.memory.get(name, weight))
        loss = whole(inputs, targets)
        with torch.no_grad():
            for name, weight in loop.weights.items():
                weight.copy_(fresh[name])
        loop.memory = fresh
        return loss

    loop.backward = backward  # type: ignore[method-assign]


def _times(factor: float, *starts: str) -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        def change(grads: dict[str, Tensor]) -> None:
            for name in loop.of(*starts):
                grads[name] *= factor

        loop.change_gradients = change  # type: ignore[method-assign]

    return plant


FAULTS["gradients halved"] = _times(0.5, "")
FAULTS["gradients doubled"] = _times(2.0, "")


@_fault("gradients with noise of 1e-3")
def _noise(loop: Loop) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)

    def change(grads: dict[str, Tensor]) -> None:
        for grad in grads.values():
            grad *= 1 + 1e-3 * torch.randn(grad.shape, generator=generator)

    loop.change_gradients = change  # type: ignore[method-assign]


FAULTS["a sample dropped"] = lambda loop: vars(loop).update(
    batch=lambda inputs, targets: (inputs[:-1], targets[:-1])
)


@_fault("a batch twice")
def _repeat(loop: Loop) -> None:
    def batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if loop.step == STRIKES:
            return loop.memory["batch"]  # type: ignore[no-any-return]
        loop.memory["batch"] = inputs, targets
        return inputs, targets

    loop.batch = batch  # type: ignore[method-assign]


@_fault("tied gradient from the head only")
def _head_only(loop: Loop) -> None:
    def embedding(original: Any, inputs: Any, weight: Any, *words: Any) -> Any:
        is_tied = weight is loop.weights[loop.table]
        return original(inputs, weight.detach() if is_tied else weight, *words)

    patch(loop, "embedding", embedding)


@_fault("tied gradient from the look-up only")
def _look_up_only(loop: Loop) -> None:
    from harness.models.gpt import HeadLoss
    from methods.shared.roundings import replaced

    whole = HeadLoss.apply
    loop.patches.append(
        lambda: replaced(HeadLoss, "apply", lambda x, weight, *others: whole(x, weight.detach(), *others))
    )


def rounded(of: Callable[[Loop], list[Tensor]], dtype: str = "") -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        from harness.models.gpt import DTYPES

        def after() -> None:
            for tensor in of(loop):
                tensor.data.copy_(tensor.data.to(DTYPES[dtype or loop.workload.dtype]))

        loop.after_update = after  # type: ignore[method-assign]

    return plant


FAULTS["no fp32 master"] = lambda loop: rounded(lambda loop: list(loop.masters.values()))(loop)
FAULTS["moments in bf16"] = lambda loop: rounded(
    lambda loop: [state[name] for state in loop.states().values() for name in MOMENTS], "bf16"
)(loop)


def _swap(loop: Loop, pairs: dict[str, Any]) -> None:
    """In `pairs`, whose keys are tensor names, swap the values of the loop's two chosen layers."""
    for name in [name for name in pairs if name.startswith(loop.layer)]:
        other = name.replace(loop.layer, loop.next)
        pairs[name], pairs[other] = pairs[other], pairs[name]


FAULTS["two layers' gradients swapped"] = lambda loop: vars(loop).update(
    change_gradients=functools.partial(_swap, loop)
)


@_fault("two layers' states swapped")
def _swap_states(loop: Loop) -> None:
    def after() -> None:
        if loop.step == STRIKES:
            found = {name: dict(state) for name, state in loop.states().items()}
            _swap(loop, found)
            for name, state in loop.states().items():
                state.update(found[name])

    loop.after_update = after  # type: ignore[method-assign]


@_fault("first moment not decayed")
def _undecayed(loop: Loop) -> None:
    def before() -> None:
        for state in loop.states().values():
            state["exp_avg"] /= loop.betas[0]

    loop.before_update = before  # type: ignore[method-assign]


@_fault("mask off by one")
def _other_mask(loop: Loop) -> None:
    from methods.shared.roundings import attended

    def attention(original: Any, *each: Any, scale: float | None = None, **others: Any) -> Any:
        return attended(*each, scale=scale, diagonal=1)

    patch(loop, "scaled_dot_product_attention", attention)


@_fault("tanh GELU")
def _tanh(loop: Loop) -> None:
    patch(loop, "gelu", lambda original, x: original(x, approximate="tanh"))


@_fault("dropout left at 0.1")
def _dropout(loop: Loop) -> None:
    for module in loop.model.modules():
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)


@_fault("norm epsilon 1e-6")
def _norm_epsilon(loop: Loop) -> None:
    for module in loop.model.modules():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, 1e-5 if getattr(module, name) == 1e-6 else 1e-6)


@_fault("a starting tensor off by 1 %")
def _start(loop: Loop) -> None:
    loop.masters[loop.matrix].data *= 1.01
