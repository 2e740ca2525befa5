"""Honest roundings: other ways to compute the same gradients. No rounding here is wrong; the results differ by rounding
only.

The gate's probe trains the reference with some of these roundings (ROUNDINGS in harness/gate/probe.py). The distance of
these trainings from the reference measures the effect of rounding. bench/gate_power.py tries the gate on the other
roundings. To add a rounding, write one function with the decorator _register or _kernel.

Shapes: B batch, T tokens, D hidden, N rows.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.base.registry import did_you_mean
from harness.models import gpt

ULP = 2.0**-24  # relative rounding error of fp32, in which kernels sum
BLOCK_LOGITS = 2**14


class Backward(Protocol):
    """Computes the mean loss for inputs and targets, (B, T), and the loss's gradients. The batch is cut into
    `num_parts` parts, whose gradients are summed. Returns the detached loss."""

    def __call__(self, inputs: Tensor, targets: Tensor, num_parts: int = 1) -> Tensor: ...


Rounding = Callable[[Backward, Tensor, Tensor], Tensor]
ROUNDINGS: dict[str, Rounding] = {}


def rounding_of(name: str) -> Rounding:
    """Return the rounding of this name. Raises ValueError for an unknown name."""
    if name not in ROUNDINGS:
        raise ValueError(
            f"no rounding {name!r}: {did_you_mean(name, ROUNDINGS)}choose some of {', '.join(ROUNDINGS)}"
        )
    return ROUNDINGS[name]


def _register(rounding: Rounding) -> Rounding:
    ROUNDINGS[rounding.__name__.replace("_", "-")] = rounding  # type: ignore[attr-defined]
    return rounding


def _replaces_kernel(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that turns a function into a rounding. In this rounding the decorated function replaces the
    function `name` of torch.nn.functional, and gets the original function as its first argument."""

    def register_rounding(function: Callable[..., Any]) -> Callable[..., Any]:
        def rounding(backward: Backward, inputs: Tensor, targets: Tensor) -> Tensor:
            with replaced(F, name, functools.partial(function, getattr(F, name))):
                return backward(inputs, targets)

        rounding.__name__ = function.__name__
        _register(rounding)
        return function

    return register_rounding


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@_register
def single_samples(backward: Backward, inputs: Tensor, targets: Tensor) -> Tensor:
    return backward(inputs, targets, len(inputs))


@_register
def samples_reversed(backward: Backward, inputs: Tensor, targets: Tensor) -> Tensor:
    return backward(inputs.flip(0), targets.flip(0))


@_replaces_kernel("linear")
def split_products(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute each matrix product as the sum of four products, each rounded to the dtype."""
    return _split(linear, x, weight, bias, 4)


@_replaces_kernel("linear")
def ulp_of_norms(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Add noise to each matrix product, also in the backward pass. The noise of an element is at most ULP times the
    norm of its row times the norm of its column. Rounding stays within this bound in any order of summation."""
    product: Tensor = Noisy.apply(x.reshape(-1, x.shape[-1]), weight)  # type: ignore[no-untyped-call]
    product = product.view(*x.shape[:-1], -1)
    return product if bias is None else product + bias


@_replaces_kernel("scaled_dot_product_attention")
def plain_attention(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    """Compute attention by separate operations (scores, mask, softmax, values), each rounded to the dtype."""
    return attended(query, key, value, scale=_scale(options))


@_register
def head_in_blocks(backward: Backward, inputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the head and the loss for one block of tokens after another."""
    with replaced(gpt, "MOST_LOGITS", BLOCK_LOGITS):
        return backward(inputs, targets)


@_register
def two_parts(backward: Backward, inputs: Tensor, targets: Tensor) -> Tensor:
    return backward(inputs, targets, len(inputs) if len(inputs) % 2 else 2)  # parts of equal sizes


@_register
def samples_rotated(backward: Backward, inputs: Tensor, targets: Tensor) -> Tensor:
    return backward(inputs.roll(1, 0), targets.roll(1, 0))


@_replaces_kernel("linear")
def products_in_halves(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return _split(linear, x, weight, bias, 2)


@_replaces_kernel("linear")
def transposed_products(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute the transposed matrix product. Add the bias after the product is rounded, instead of before."""
    product = (weight @ x.reshape(-1, x.shape[-1]).t()).t().reshape(*x.shape[:-1], -1)
    return product if bias is None else product + bias


@_replaces_kernel("linear")
def products_in_double(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


@_replaces_kernel("scaled_dot_product_attention")
def attention_in_double(
    attention: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Tensor:
    return attended(query.double(), key.double(), value.double(), scale=_scale(options)).to(query.dtype)


@_replaces_kernel("layer_norm")
def plain_norm(
    norm: Callable[..., Tensor], x: Tensor, shape: Any, weight: Tensor, bias: Tensor, epsilon: float
) -> Tensor:
    """Normalize in fp32. The variance is the mean of squares minus the squared mean, instead of the mean square of the
    differences from the mean."""
    wide_x = x.float()
    mean = wide_x.mean(-1, keepdim=True)
    variance = (wide_x * wide_x).mean(-1, keepdim=True) - mean * mean
    return ((wide_x - mean) * (variance + epsilon).rsqrt() * weight.float() + bias.float()).to(x.dtype)


@_replaces_kernel("gelu")
def plain_gelu(gelu: Callable[..., Tensor], x: Tensor) -> Tensor:
    wide_x = x.float()
    return (0.5 * wide_x * (1 + torch.erf(wide_x / math.sqrt(2)))).to(x.dtype)


@_replaces_kernel("linear")
def products_in_sevenths(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute each matrix product as the sum of seven products, over the columns in reverse order."""
    return _split(linear, x.flip(-1), weight.flip(-1), bias, 7)


def _split(
    linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, parts: int
) -> Tensor:
    pairs = zip(x.chunk(parts, -1), weight.chunk(parts, -1), strict=True)
    total: Any = sum(linear(columns, matching_weights) for columns, matching_weights in pairs)
    return total if bias is None else total + bias


def _scale(options: dict[str, Any]) -> float | None:
    """Return the scale among the keyword arguments of torch's attention; None: 1 / sqrt(head size). Raises ValueError
    if the arguments have a mask, because only causal attention is computed here."""
    if options.get("attn_mask") is not None:
        raise ValueError("expected causal attention, got a mask: leave this rounding out")
    return options.get("scale")


def attended(
    query: Tensor, key: Tensor, value: Tensor, diagonal: int = 0, scale: float | None = None
) -> Tensor:
    """Return the output of causal attention, (B, heads, T, head size). Token i sees tokens up to i + `diagonal`.
    `scale`: factor of the scores; None: 1 / sqrt(head size). Several heads of queries may share keys and values."""
    num_sharing = query.shape[1] // key.shape[1]
    if num_sharing > 1:
        key, value = (projected.repeat_interleave(num_sharing, 1) for projected in (key, value))
    scores = query @ key.transpose(-1, -2)
    scores = scores / math.sqrt(query.shape[-1]) if scale is None else scores * scale
    is_hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1 + diagonal)
    return scores.masked_fill(is_hidden, -math.inf).softmax(-1) @ value


class Noisy(torch.autograd.Function):
    """Multiplies x, (N, D), by the transposed weight, (rows, D), and adds the noise of ulp_of_norms()."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return noisy(x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        return noisy(grad, weight), noisy(grad.t(), x)


def noisy(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of two matrices with noise added. The random numbers depend only on the shapes, so that a
    recompute gives the same bits."""
    product = left.float() @ right.float()
    generator = torch.Generator().manual_seed(product.numel() + left.shape[1])
    noise = torch.rand(product.shape, generator=generator).to(left.device).mul_(2).sub_(1)
    norm_products = torch.outer(left.float().norm(dim=1), right.float().norm(dim=0))
    return product.add_(noise.mul_(norm_products).mul_(ULP)).to(left.dtype)
