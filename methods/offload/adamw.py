"""AdamW on slabs: the very bits of torch.optim.AdamW(fused=True), in fp32 and in mixed precision, on either memory.

A kernel of ours (adamw_kernel.py; a GPU's, adamw_cuda.py) updates a layer in one pass. Without a compiler torch's fused
kernel updates one block after another, so that temporary fp32 copies are small and stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY
from methods.offload import adamw_cuda, adamw_kernel, torch_ops  # noqa: F401  registers the kernel
from methods.offload.state import State, joined, keep_
from methods.shared.memory_needs import VECTOR

Factor = Tensor | float | None  # scale of a gradient; None is 1


class AdamSettings(NamedTuple):
    """AdamW's numbers for one group of parameters."""

    learning_rate: float
    beta1: float = BETAS[0]
    beta2: float = BETAS[1]
    epsilon: float = EPSILON
    weight_decay: float = 0.0


Settings = Sequence[AdamSettings]  # of each group of parameters


def published_settings(learning_rate: float) -> Settings:
    """Return the settings of the published runs: of the parameters that decay, and of the others."""
    return AdamSettings(learning_rate, weight_decay=WEIGHT_DECAY), AdamSettings(learning_rate)


class Piece(NamedTuple):
    """Elements [start, stop) of one tensor in a slab, and its group in a step's settings."""

    start: int
    stop: int
    group: int


class AdamStep(NamedTuple):
    """An update's settings and its number, counted from 1, also as a tensor in the state's memory."""

    settings: Settings
    number: int
    steps: Tensor


def chunks(tensors: Sequence[Piece], max_numel: int) -> list[list[Piece]]:
    """Split tensors of a slab, in its order, into runs of at most `max_numel` elements, at multiples of VECTOR."""
    max_numel = max(VECTOR, max_numel // VECTOR * VECTOR)
    found: list[list[Piece]] = []
    room = 0
    for start, stop, group in tensors:
        while start < stop:
            if not found or room < min(VECTOR, stop - start):
                found.append([])
                room = max_numel
            end = min(stop, start + room // VECTOR * VECTOR)
            found[-1].append(Piece(start, end, group))
            room -= -(-(end - start) // VECTOR) * VECTOR
            start = end
    return found


def update(
    grads: Tensor, source: State, target: State, runs: Sequence[list[Piece]], step: AdamStep, factor: Factor, *,
    num_threads: int = 1, deadline: int = 0,
) -> None:  # fmt: skip
    """Take one AdamW step of adjacent chunks, by their gradient times the clip factor, from one state into another or
    in place. The compiled kernel has threads of its own, which take the update with the earliest deadline first."""
    if not runs:
        return
    is_ahead = target.weights is not source.weights
    if takes_one_pass(source, grads.device.type):
        start, stop = runs[0][0].start, runs[-1][-1].stop
        slabs = [[slab for slab in state.cut(start, stop) if slab is not None] for state in (source, target)]
        known, computed = (factor, None) if isinstance(factor, float) else (1.0, factor)
        for settings, table in _calls(runs, step.settings).items():
            torch.ops.harness.adamw(
                grads[start:stop], *slabs, computed, known, table, settings, step.number, num_threads, deadline
            )
        return
    for run in runs:
        start, stop = run[0].start, run[-1].stop
        block = target.cut(start, stop)
        if is_ahead:
            for ours, theirs in zip(block, source.cut(start, stop), strict=True):
                if ours is not None and theirs is not None:
                    ours.copy_(theirs)
        pieces = [Piece(piece.start - start, piece.stop - start, piece.group) for piece in run]
        _update_by_torch(grads[start:stop].float(), block, pieces, step, factor)


def _calls(runs: Sequence[list[Piece]], settings: Settings) -> dict[AdamSettings, list[int]]:
    """Return the tables of the kernel's calls, from the first piece on. A call has one weight decay; tensors without
    decay join one whose other settings are theirs."""
    calls: dict[AdamSettings, list[int]] = {}
    alike = {each._replace(weight_decay=0.0): each for each in settings if each.weight_decay}
    first = runs[0][0].start
    for start, stop, group in (piece for run in runs for piece in run):
        own = settings[group]
        table = calls.setdefault(own if own.weight_decay else alike.get(own, own), [])
        table += (start - first, stop - first, int(own.weight_decay != 0))
    return calls


def takes_one_pass(state: State, device: str) -> bool:
    """True if a compiled kernel updates this state on a device; a GPU's only takes split states, torch's kernel takes
    the others."""
    if device == "cuda":
        return state.is_split and adamw_cuda.load() is not None
    return adamw_kernel.load() is not None


def _update_by_torch(grads: Tensor, state: State, pieces: list[Piece], step: AdamStep, factor: Factor) -> None:
    """Update in place by torch's fused kernel, which scales the fp32 gradient in place."""
    if factor is not None:
        grads.mul_(factor)
    values = joined(state)
    if state.is_split:
        state.exp_avg_sq.abs_()
    for group, settings in enumerate(step.settings):
        chosen = [piece for piece in pieces if piece.group == group]
        if not chosen:
            continue
        weights, gradients, exp_avgs, exp_avg_sqs = (
            [slab[piece.start : piece.stop] for piece in chosen]
            for slab in (values, grads, state.exp_avg, state.exp_avg_sq)
        )
        torch._fused_adamw_(
            weights, gradients, exp_avgs, exp_avg_sqs, [], [step.steps] * len(chosen),
            amsgrad=False, maximize=False, beta1=settings.beta1, beta2=settings.beta2, eps=settings.epsilon,
            lr=settings.learning_rate, weight_decay=settings.weight_decay,
        )  # fmt: skip
    keep_(state, values)
