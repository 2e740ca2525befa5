"""AdamW on slabs: the very bits of torch.optim.AdamW(fused=True), in fp32 and in mixed precision, on either memory.

On the host the fp32 master of a bf16 weight is split: the weight is its high half, so 12 bytes a parameter hold weight,
master and moments. The weight is the master rounded to nearest, ties to even, as torch rounds; the master's low 16 bits
are stored beside it. At a tie these two match two masters, one rounded up and one rounded down; a 17th bit tells which:
the sign of the second moment, which is never negative. No bit of the master is lost. An fp16 weight is no part of its
master, which is stored whole: 14 bytes a parameter.

A kernel of ours (adamw_kernel.py; a GPU's, adamw_cuda.py) updates a layer in one pass. Without a compiler, and where a
bf16 weight lies beside a whole master, torch's fused kernel updates one block after another, so that temporary fp32
copies are small and stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY
from methods.offload import adamw_cuda, adamw_kernel, torch_ops  # noqa: F401  registers the kernel
from methods.shared.memory_needs import VECTOR

Factor = Tensor | float | None  # scale of a gradient; None is 1


class State(NamedTuple):
    """Flat slabs of equal length: weights in the workload's dtype, moments in fp32, and the master.

    The master is None for fp32 weights; fp32; or int16, the low half that bf16 weights lack.
    """

    weights: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def is_split(self) -> bool:
        return self.master is not None and self.master.dtype == torch.int16

    def cut(self, start: int, stop: int) -> State:
        """Return the elements [start, stop) of each slab."""
        return State(*(None if slab is None else slab[start:stop] for slab in self))  # type: ignore[arg-type]


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


def joined(state: State) -> Tensor:
    """Return the fp32 master: a slab of the state, or a copy joined from both halves."""
    if state.master is None or not state.is_split:
        return state.weights if state.master is None else state.master
    bits = state.weights.view(torch.int16).int().bitwise_left_shift_(16)
    bits.add_(state.master.int())  # converted here: torch's kernel makes copies that no memory account sees
    bits.add_((state.exp_avg_sq.view(torch.int32) < 0).int(), alpha=1 << 16)
    return bits.view(torch.float32)


def keep_(state: State, values: Tensor) -> None:
    """Store these values as the fp32 master, and renew the marks in a split state's second moment."""
    if values is not state.weights:
        state.weights.copy_(values)
    if state.master is None or not state.is_split:
        if state.master is not None and state.master is not values:
            state.master.copy_(values)
        return
    bits = values.view(torch.int32)
    state.master.copy_(bits)
    rest = state.weights.view(torch.int16).int().bitwise_left_shift_(16)
    rest.add_(state.master.int()).neg_().add_(bits)
    marks = (rest == 1 << 16).int().bitwise_left_shift_(31)
    state.exp_avg_sq.abs_().view(torch.int32).bitwise_or_(marks)


def update(
    grads: Tensor, source: State, target: State, runs: Sequence[list[Piece]], step: AdamStep, factor: Factor, *,
    num_threads: int = 1, deadline: int = 0,
) -> None:  # fmt: skip
    """Take one AdamW step of adjacent chunks, by their gradient times the clip factor, from one state into another or
    in place. The compiled kernel has threads of its own, which take the update with the earliest deadline first."""
    if not runs:
        return
    is_ahead = target.weights is not source.weights
    if takes_one_pass(grads, source):
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


def takes_one_pass(grads: Tensor, state: State) -> bool:
    """True if a compiled kernel updates this state; a GPU's only takes split states, torch's kernel takes the
    others."""
    if grads.device.type == "cuda":
        return state.is_split and adamw_cuda.load() is not None
    is_whole = grads.dtype == torch.bfloat16 and not state.is_split
    return not is_whole and adamw_kernel.load() is not None


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
