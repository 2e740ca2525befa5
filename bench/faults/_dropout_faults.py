"""Faults of dropout, for bench/dropout_rule.py. Training without dropout does not show these faults."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from methods.planted import Loop, patch  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from torch import Tensor


def _dropout_at(factor: float) -> Callable[[Loop], None]:
    """Return a fault that multiplies the dropout probability by `factor`."""

    def plant(loop: Loop) -> None:
        for part in (loop.model.ends, *loop.model.layers):
            part.dropout *= factor  # type: ignore[operator, assignment]

    return plant


def _unscaled(loop: Loop) -> None:
    """Plant a fault: kept elements are not divided by the share of elements that dropout keeps."""

    def dropout(original: Any, x: Any, probability: float) -> Any:
        return original(x, probability) * (1 - probability)

    patch(loop, "dropout", dropout)


def _undropped_attention(loop: Loop) -> None:
    def attention(original: Any, *words: Any, dropout_p: float, **others: Any) -> Any:
        return original(*words, dropout_p=0.0, **others)

    patch(loop, "scaled_dot_product_attention", attention)


def _same_each_step(loop: Loop) -> None:
    import torch

    whole = loop.batch

    def batch(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return whole(inputs, targets)

    loop.batch = batch  # type: ignore[method-assign]


def _anew_in_recompute(loop: Loop) -> None:
    """Plant a fault: the recompute in the backward pass drops other elements than the forward pass did."""
    from harness.models import gpt
    from methods.shared.roundings import replaced

    forgetful = functools.partial(gpt.checkpoint, preserve_rng_state=False)
    loop.patches.append(lambda: replaced(gpt, "checkpoint", forgetful))


DROPOUT_FAULTS: dict[str, Callable[[Loop], None]] = {
    "no dropout": _dropout_at(0.0),
    "twice the probability": _dropout_at(2.0),
    "five times the probability": _dropout_at(5.0),
    "what stays is not scaled": _unscaled,
    "attention without dropout": _undropped_attention,
    "the same elements at each step": _same_each_step,
    "other elements in recompute": _anew_in_recompute,
}
