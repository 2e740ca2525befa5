"""Faults of the path of bf16 alone, for bench/gate_harm.py: of weights in bf16 and their fp32 masters, of what is
stored or sent in fewer bits, and of kernels that compute in bf16 what they should compute in fp32.

Some are hardly more than a rounding: gate_harm.py measures which. The gate's limits were chosen without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from methods._step_faults import is_bias, is_of_norm, rounded  # type: ignore[import-not-found]
from methods.planted import MOMENTS, Loop, patch, plain_adamw  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from torch import Tensor

BF16_FAULTS: dict[str, Callable[[Loop], None]] = {}
TEN = 10  # a fault that happens every so many steps


def _bf16_fault(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[..., None]) -> Callable[..., None]:
        BF16_FAULTS[name] = function
        return function

    return add


def _copied(change: Callable[[Loop, str, Tensor], Tensor]) -> Callable[[Loop], None]:
    """Return a fault: the weight that is called `name` becomes change(loop, name, master), not the master."""

    def plant(loop: Loop) -> None:
        def copy_to_weights() -> None:
            for name, weight in loop.weights.items():
                weight.data.copy_(change(loop, name, loop.masters[name].detach()))

        loop.copy_to_weights = copy_to_weights  # type: ignore[method-assign]

    return plant


def _graded(change: Callable[[Loop, str, Tensor], Tensor]) -> Callable[[Loop], None]:
    """Return a fault: the gradient that is called `name` becomes change(loop, name, gradient)."""

    def plant(loop: Loop) -> None:
        loop.change_gradients = lambda grads: grads.update(  # type: ignore[method-assign]
            {name: change(loop, name, grad) for name, grad in grads.items()}
        )

    return plant


def _low_bits(master: Tensor, added: Any = 0) -> Tensor:
    """Return fp32 values cut to bf16's 16 bits, after `added` was added to their bits."""
    import torch

    return ((master.view(torch.int32) + added) & -(2**16)).view(torch.float32)


def _stochastic(loop: Loop, name: str, master: Tensor) -> Tensor:
    import torch

    generator = loop.memory.setdefault("generator", torch.Generator().manual_seed(1))
    return _low_bits(master, torch.randint(0, 2**16, master.shape, generator=generator, dtype=torch.int32))


def _late(loop: Loop, name: str, master: Tensor) -> Tensor:
    before, loop.memory[name] = loop.memory.get(name, master), master.clone()
    return before if name.startswith(loop.layer) else master


def _but_last_row(loop: Loop, name: str, master: Tensor) -> Tensor:
    import torch

    is_whole = master.ndim < 2 or loop.step == 0
    return master if is_whole else torch.cat([master[:-1], loop.weights[name].detach()[-1:].float()])


BF16_FAULTS["weights cut to bf16, not rounded"] = _copied(lambda loop, name, master: _low_bits(master))
BF16_FAULTS["weights rounded by chance"] = _copied(_stochastic)
BF16_FAULTS["a layer's weights copied a step late"] = _copied(_late)
BF16_FAULTS["the last row of each matrix not copied"] = _copied(_but_last_row)
BF16_FAULTS["weights not copied every tenth step"] = _copied(
    lambda loop, name, master: loop.weights[name].detach() if loop.step % TEN == TEN - 1 else master
)


@_bf16_fault("decay of the copy, not of the master")
def _decayed_copy(loop: Loop) -> None:
    _copied(lambda loop, name, master: master * (1 - loop.rate(name) * Loop.decay(loop, name)))(loop)
    loop.decay = lambda name: 0.0  # type: ignore[method-assign]


def _without_master(of: Callable[[Loop, str], bool], every: int = 1) -> Callable[[Loop], None]:
    return rounded(
        lambda loop: [p for name, p in loop.masters.items() if of(loop, name) and loop.step % every == 0]
    )


BF16_FAULTS["masters from the weights every tenth step"] = _without_master(lambda loop, name: True, TEN)
BF16_FAULTS["no fp32 master of norms"] = _without_master(lambda loop, name: is_of_norm(name))
BF16_FAULTS["no fp32 master of biases"] = _without_master(lambda loop, name: is_bias(name))
BF16_FAULTS["no fp32 master of a layer"] = _without_master(lambda loop, name: name.startswith(loop.layer))
BF16_FAULTS["first moment in fp16"] = rounded(
    lambda loop: [s[MOMENTS[0]] for s in loop.states().values()], "fp16"
)
BF16_FAULTS["second moment in fp16"] = rounded(
    lambda loop: [s[MOMENTS[1]] for s in loop.states().values()], "fp16"
)


@_bf16_fault("updates rounded to bf16")
def _rounded_updates(loop: Loop) -> None:
    def before() -> None:
        loop.memory = {name: master.detach().clone() for name, master in loop.masters.items()}

    def after() -> None:
        for name, master in loop.masters.items():
            master.data.copy_(loop.memory[name] + (master.data - loop.memory[name]).bfloat16())

    loop.before_update, loop.after_update = before, after  # type: ignore[method-assign]


def _in_fp8(x: Tensor, scale: Any = 1.0) -> Tensor:
    """Return x, multiplied by `scale`, as 8 bits hold it, 5 of them the exponent. Its gradient is that of x."""
    import torch

    return x + ((x.detach() * scale).to(torch.float8_e5m2).to(x.dtype) / scale - x.detach())


BF16_FAULTS["gradients sent in 8 bits"] = _graded(
    lambda loop, name, grad: _in_fp8(grad, 2**15 / grad.abs().max().clamp(min=1e-30))
)
BF16_FAULTS["gradients below a thousandth lost"] = _graded(
    lambda loop, name, grad: grad.where(grad.abs() > 1e-3 * grad.abs().max(), 0.0)
)


@_bf16_fault("gradients not cleared every tenth step")
def _uncleared(loop: Loop) -> None:
    def change(loop: Loop, name: str, grad: Tensor) -> Tensor:
        before, loop.memory[name] = loop.memory.get(name, grad), grad
        return grad + before if loop.step % TEN == 0 else grad

    _graded(change)(loop)


@_bf16_fault("a layer not clipped")
def _unclipped(loop: Loop) -> None:
    loop.clip = lambda grads, norm: Loop.clip(  # type: ignore[method-assign]
        loop, {name: grad for name, grad in grads.items() if not name.startswith(loop.layer)}, norm
    )


@_bf16_fault("clipped gradients rounded to bf16")
def _rounded_when_clipped(loop: Loop) -> None:
    def clip(grads: dict[str, Tensor], norm: Tensor) -> None:
        Loop.clip(loop, grads, norm)
        for grad in grads.values():
            grad.copy_(grad.bfloat16())

    loop.clip = clip  # type: ignore[method-assign]


BF16_FAULTS["gradient norm in bf16"] = lambda loop: vars(loop).update(
    norm=lambda grads: Loop.norm(loop, {name: grad.bfloat16() for name, grad in grads.items()}).float()
)
BF16_FAULTS["learning rate in bf16"] = lambda loop: vars(loop).update(
    rate=lambda name: float(_low_bits(_as_tensor(Loop.rate(loop, name)), 2**15))
)
BF16_FAULTS["the bias correction's step stops at 10"] = lambda loop: vars(loop).update(
    before_update=lambda: [state["step"].clamp_(max=TEN - 1) for state in loop.states().values()]
)


def _as_tensor(number: float) -> Tensor:
    import torch

    return torch.tensor(number)


@_bf16_fault("decay at the peak rate")
def _peak_decay(loop: Loop) -> None:
    def before() -> None:
        for group in loop.optimizer.param_groups:
            group["weight_decay"] = (
                Loop.decay(loop, group["name"]) * loop.workload.learning_rate / group["lr"]
            )

    loop.before_update = before  # type: ignore[method-assign]


def _by_plain_adamw(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Loop], None]:
    """Return a fault: AdamW divides by the root of change(second moment, group)[0] plus change(...)[1]."""

    def plant(loop: Loop) -> None:
        class Changed(plain_adamw()):  # type: ignore[misc]
            def divisor(self, square: Tensor, group: Any) -> Tensor:
                inner, outer = change(square, group)
                return inner.sqrt() + outer

        loop.make_optimizer = lambda: Changed(  # type: ignore[method-assign]
            [
                {"params": [p], "weight_decay": loop.decay(name), "name": name}
                for name, p in loop.masters.items()
            ],
            {"lr": 0.0, "betas": loop.betas, "eps": loop.epsilon},
        )

    return plant


BF16_FAULTS["epsilon before the root"] = _by_plain_adamw(lambda square, group: (square + group["eps"], 0.0))
BF16_FAULTS["corrected second moment in bf16"] = _by_plain_adamw(
    lambda square, group: (square.bfloat16().float(), group["eps"])
)


@_bf16_fault("norm statistics in bf16")
def _bf16_norm(loop: Loop) -> None:
    def norm(original: Any, x: Tensor, shape: Any, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * (variance + epsilon).rsqrt() * weight + bias

    patch(loop, "layer_norm", norm)


@_bf16_fault("attention's softmax in bf16, not shifted")
def _bf16_softmax(loop: Loop) -> None:
    def attention(original: Any, query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
        weights = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).exp().tril()
        return weights / weights.sum(-1, keepdim=True) @ value

    patch(loop, "scaled_dot_product_attention", attention)


@_bf16_fault("GELU by a sigmoid")
def _quick_gelu(loop: Loop) -> None:
    patch(loop, "gelu", lambda original, x: x * (1.702 * x).sigmoid())


@_bf16_fault("layers' inputs kept in 8 bits")
def _kept_in_fp8(loop: Loop) -> None:
    for layer in loop.model.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(lambda module, given: (_in_fp8(given[0]), *given[1:]))


@_bf16_fault("positions from 16 on rounded to even")
def _even_positions(loop: Loop) -> None:
    def embedding(original: Any, inputs: Tensor, *others: Any) -> Any:
        is_position = inputs.ndim == 1
        return original(inputs.where(inputs < 16, inputs // 2 * 2) if is_position else inputs, *others)

    patch(loop, "embedding", embedding)


@_bf16_fault("the last use of a word gives its look-up's gradient")
def _last_use(loop: Loop) -> None:
    def embedding(original: Any, inputs: Tensor, weight: Tensor, *others: Any) -> Any:
        flat = inputs.flatten().tolist()
        last = {word: place for place, word in enumerate(flat)}
        is_last = inputs.new_tensor([last[word] == place for place, word in enumerate(flat)]).bool()
        found, kept = original(inputs, weight, *others), original(inputs, weight.detach(), *others)
        return found.where(is_last.view(*inputs.shape, 1), kept)

    patch(loop, "embedding", embedding)


def _by_cross_entropy(change: Callable[[Tensor], Tensor], is_wide: bool = True) -> Callable[[Loop], None]:
    """Return a fault: change(gradient of the logits) goes back. `is_wide`: the loss is computed in fp32, else bf16."""

    def plant(loop: Loop) -> None:
        from harness.models import gpt
        from methods.shared.roundings import replaced

        whole = gpt.cross_entropy

        def cross_entropy(
            logits: Tensor, targets: Tensor, num_tokens: int, *others: Any
        ) -> tuple[Tensor, Tensor]:
            if is_wide:
                loss, dlogits = whole(logits, targets, num_tokens, *others)
                return loss, change(dlogits)
            shares = logits.exp() / logits.exp().sum(1, keepdim=True)
            right = shares.gather(1, targets.unsqueeze(1))
            shares = shares.scatter_add(1, targets.unsqueeze(1), -right.new_ones(right.shape))
            return -right.log().float().sum() / num_tokens, change(shares / num_tokens)

        loop.patches.append(lambda: replaced(gpt, "cross_entropy", cross_entropy))

    return plant


BF16_FAULTS["softmax and loss in bf16, not shifted"] = _by_cross_entropy(
    lambda dlogits: dlogits, is_wide=False
)
BF16_FAULTS["logits' gradient in 8 bits"] = _by_cross_entropy(lambda dlogits: _in_fp8(dlogits, 2**10))
BF16_FAULTS["logits' gradient lost for half the words"] = _by_cross_entropy(
    lambda dlogits: dlogits.where(dlogits.new_ones(dlogits.shape[1]).cumsum(0) <= dlogits.shape[1] / 2, 0.0)
)
