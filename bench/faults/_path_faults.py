"""Faults of a path that a training takes with some sizes, dtypes or steps only: a part of a tensor, a step that fp16
skips, the schedule after the warm-up, a head or a sample larger than a kernel's block. And faults that the gate's probe
cannot show: they affect only layers beyond the probe's 4 layers, or steps after its 20 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from methods.planted import MOMENTS, Loop, patch  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from torch import Tensor

PATH_FAULTS: dict[str, Callable[[Loop], None]] = {}
OF_SKIPS = ["weights decayed in skipped steps", "moments decayed in skipped steps"]  # in fp16 only
OF_SIZES = [  # beyond BLOCK_TOKENS or BLOCK_COLUMNS only
    "attention to the last 64 tokens only",
    "scale of heads wider than 32 wrong",
    "half the gradient of positions from 64 on",
]


def _path_fault(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(function: Callable[..., None]) -> Callable[..., None]:
        PATH_FAULTS[name] = function
        return function

    return add


def _frozen(part: Callable[[Tensor], Tensor]) -> Callable[[Loop], None]:
    """Return a fault: part(matrix) of a layer's matrix is never updated."""

    def plant(loop: Loop) -> None:
        def before() -> None:
            loop.memory["frozen"] = part(loop.masters[loop.matrix]).detach().clone()

        def after() -> None:
            part(loop.masters[loop.matrix].data).copy_(loop.memory["frozen"])

        loop.before_update, loop.after_update = before, after  # type: ignore[method-assign]

    return plant


PATH_FAULTS["a row of a matrix never updated"] = _frozen(lambda matrix: matrix[3])
PATH_FAULTS["the last 16 elements of a matrix never updated"] = _frozen(lambda matrix: matrix.view(-1)[-16:])


@_path_fault("gradient of a column lost")
def _lost_column(loop: Loop) -> None:
    def change(grads: dict[str, Tensor]) -> None:
        grads[loop.matrix][:, -1] = 0

    loop.change_gradients = change  # type: ignore[method-assign]


@_path_fault("the last position's gradient lost")
def _lost_position(loop: Loop) -> None:
    from harness.models import gpt
    from methods.shared.roundings import replaced

    original, num_tokens = gpt.cross_entropy, loop.workload.seq_len

    def cross_entropy(logits: Tensor, targets: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        loss, dlogits = original(logits, targets, *others)
        dlogits[num_tokens - 1 :: num_tokens] = 0
        return loss, dlogits

    loop.patches.append(lambda: replaced(gpt, "cross_entropy", cross_entropy))


def _undecayed_in(start: Callable[[Loop], str]) -> Callable[[Loop], None]:
    return lambda loop: vars(loop).update(
        decay=lambda name: 0.0 if name.startswith(start(loop)) else Loop.decay(loop, name)
    )


PATH_FAULTS["no decay in a layer"] = _undecayed_in(lambda loop: loop.layer)
PATH_FAULTS["no decay in the embedding"] = _undecayed_in(lambda loop: loop.table)


@_path_fault(OF_SKIPS[0])
def _decayed_when_skipped(loop: Loop) -> None:
    def skip() -> None:
        for name, master in loop.masters.items():
            master.data.mul_(1 - loop.rate(name) * loop.decay(name))

    loop.skip = skip  # type: ignore[method-assign]


@_path_fault(OF_SKIPS[1])
def _moments_decayed_when_skipped(loop: Loop) -> None:
    def skip() -> None:
        for state in loop.states().values():
            for name, beta in zip(MOMENTS, loop.betas, strict=True):
                state[name].mul_(beta)

    loop.skip = skip  # type: ignore[method-assign]


PATH_FAULTS["constant rate after the warm-up"] = lambda loop: vars(loop).update(
    rate=lambda name: loop.workload.learning_rate_at(min(loop.step, loop.workload.lr_warmup_steps))
)
BLOCK_TOKENS, BLOCK_COLUMNS = 64, 32  # sizes that a kernel handles; the faults below show beyond them


@_path_fault(OF_SIZES[0])
def _sliding(loop: Loop) -> None:
    import torch

    def attention(original: Any, query: Any, *others: Any, is_causal: bool, **words: Any) -> Any:
        is_seen = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool, device=query.device).tril()
        return original(query, *others, attn_mask=is_seen.triu(1 - BLOCK_TOKENS), **words)

    patch(loop, "scaled_dot_product_attention", attention)


@_path_fault(OF_SIZES[1])
def _wide_scale(loop: Loop) -> None:
    def attention(original: Any, query: Any, *others: Any, **words: Any) -> Any:
        is_wide = query.shape[-1] > BLOCK_COLUMNS
        return original(query * 2**-0.5 if is_wide else query, *others, **words)

    patch(loop, "scaled_dot_product_attention", attention)


@_path_fault(OF_SIZES[2])
def _half_positions(loop: Loop) -> None:
    def change(grads: dict[str, Tensor]) -> None:
        for name in loop.workload.anatomy.embedding:
            if name != loop.table:
                grads[name][BLOCK_TOKENS:] *= 0.5

    loop.change_gradients = change  # type: ignore[method-assign]


# Faults that the gate's probe cannot show.


def _undecayed_after(loop: Loop) -> None:
    def before() -> None:
        for group in loop.optimizer.param_groups if loop.step > 20 else ():
            group["weight_decay"] = 0.0

    loop.before_update = before  # type: ignore[method-assign]


def _undecayed_beyond(loop: Loop) -> None:
    deep = tuple(loop.workload.anatomy.layer_name(index) for index in range(4, loop.workload.num_layers))
    loop.decay = lambda name: 0.0 if name.startswith(deep) else Loop.decay(loop, name)  # type: ignore[method-assign]


HIDDEN_FAULTS: dict[str, Callable[[Loop], None]] = {
    "no decay beyond layer 4": _undecayed_beyond,
    "no decay after step 20": _undecayed_after,
}
