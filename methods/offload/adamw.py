"""AdamW on slabs (flat tensors that hold many parameters), in fp32 and in mixed precision, on host or device. The
results have the bits of torch.optim.AdamW(fused=True) on a CPU; on a GPU, updates in fp32 and fp16 have the bits of
torch's CUDA kernel, which rounds otherwise.

This project's kernel (adamw_kernel.py on the host, adamw_cuda.py on a GPU) updates a layer in one pass. Where that
kernel cannot be compiled, torch's fused kernel updates one block after another. The blocks are so small that temporary
fp32 copies stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from harness.core.job import BETAS, EPSILON, WEIGHT_DECAY
from methods.offload import adamw_cuda, adamw_kernel, torch_ops  # noqa: F401  registers the kernel
from methods.offload.state import State, joined_master, keep_master_
from methods.shared.memory_needs import VECTOR_NUMEL

Factor = Tensor | float | None  # number by which a gradient is multiplied; None: 1


class AdamSettings(NamedTuple):
    """AdamW's hyperparameters for one group of parameters."""

    learning_rate: float
    beta1: float = BETAS[0]
    beta2: float = BETAS[1]
    epsilon: float = EPSILON
    weight_decay: float = 0.0


Settings = Sequence[AdamSettings]  # AdamSettings for each group of parameters, by the group's index


def published_settings(learning_rate: float) -> Settings:
    """Return AdamW's settings in the published runs, for two groups of parameters: group 0 has weight decay, group 1
    has none."""
    return AdamSettings(learning_rate, weight_decay=WEIGHT_DECAY), AdamSettings(learning_rate)


class Piece(NamedTuple):
    """Elements [start, stop) of a slab, all of one tensor, and the index of the tensor's group in Settings."""

    start: int
    stop: int
    group: int


class AdamStep(NamedTuple):
    """The settings of an update, and the update's number, counted from 1. `steps`: this number as a tensor, on the host
    or device where the state is."""

    settings: Settings
    number: int
    steps: Tensor


def split_into_runs(tensors: Sequence[Piece], max_numel: int) -> list[list[Piece]]:
    """Split the tensors of a slab, in order, into runs of at most `max_numel` elements, or VECTOR_NUMEL elements if
    that is more. A tensor is cut only at multiples of VECTOR_NUMEL elements from its start."""
    max_numel = max(VECTOR_NUMEL, max_numel // VECTOR_NUMEL * VECTOR_NUMEL)
    runs: list[list[Piece]] = []
    room_numel = 0
    for start, stop, group in tensors:
        while start < stop:
            if not runs or room_numel < min(VECTOR_NUMEL, stop - start):
                runs.append([])
                room_numel = max_numel
            end = min(stop, start + room_numel // VECTOR_NUMEL * VECTOR_NUMEL)
            runs[-1].append(Piece(start, end, group))
            room_numel -= -(-(end - start) // VECTOR_NUMEL) * VECTOR_NUMEL
            start = end
    return runs


def update(
    grads: Tensor,
    source: State,
    target: State,
    runs: Sequence[list[Piece]],
    step: AdamStep,
    factor: Factor,
    *,
    num_threads: int = 1,
    deadline: int = 0,
) -> None:
    """Take one AdamW step on adjacent runs of a slab's elements. The gradients are multiplied by `factor`.

    The state is read from `source` and written to `target`, which may be the same state. The compiled kernel works in
    threads of its own; if several updates wait, these threads take the one with the lowest `deadline` first.
    """
    if not runs:
        return
    if takes_one_pass(source, grads.device.type):
        start, stop = runs[0][0].start, runs[-1][-1].stop
        slabs = [[slab for slab in state.cut(start, stop) if slab is not None] for state in (source, target)]
        host_factor, device_factor = (factor, None) if isinstance(factor, float) else (1.0, factor)
        for settings, piece_table in _kernel_calls(runs, step.settings).items():
            torch.ops.harness.adamw(
                grads[start:stop],
                *slabs,
                device_factor,
                host_factor,
                piece_table,
                settings,
                step.number,
                num_threads,
                deadline,
            )
        return
    for run in runs:
        start, stop = run[0].start, run[-1].stop
        block = _block_to_update(source, target, start, stop)
        pieces = [Piece(piece.start - start, piece.stop - start, piece.group) for piece in run]
        _update_by_torch(grads[start:stop].float(), block, pieces, step, factor)


def _block_to_update(source: State, target: State, start: int, stop: int) -> State:
    """Return the elements [start, stop) of the target, after a copy of the source's if these are two states."""
    block = target.cut(start, stop)
    if target.weights is not source.weights:
        for slab, current in zip(block, source.cut(start, stop), strict=True):
            if slab is not None and current is not None:
                slab.copy_(current)
    return block


def _kernel_calls(runs: Sequence[list[Piece]], settings: Settings) -> dict[AdamSettings, list[int]]:
    """Return the kernel's calls: the settings of each call, with its table of pieces. The table has three numbers for
    each piece: start, stop, and 1 if the piece has weight decay. Pieces with and without weight decay share a call if
    all other settings agree."""
    calls: dict[AdamSettings, list[int]] = {}
    # Settings with weight decay, by the same settings without it.
    decayed_settings = {}
    for group_settings in settings:
        if group_settings.weight_decay:
            decayed_settings[group_settings._replace(weight_decay=0.0)] = group_settings
    first_element = runs[0][0].start
    for start, stop, group in (piece for run in runs for piece in run):
        group_settings = call_settings = settings[group]
        if not group_settings.weight_decay:
            call_settings = decayed_settings.get(group_settings, group_settings)
        piece_table = calls.setdefault(call_settings, [])
        has_decay = int(group_settings.weight_decay != 0)
        piece_table += (start - first_element, stop - first_element, has_decay)
    return calls


def takes_one_pass(state: State, device: str) -> bool:
    """Return whether this project's compiled kernel updates this state on this device. On a GPU the kernel takes only
    split states, whose master is stored in two halves; torch's kernel updates all other states."""
    if device == "cuda":
        return state.has_split_master and adamw_cuda.compiled_kernel() is not None
    return adamw_kernel.compiled_library() is not None


def _update_by_torch(
    grads: Tensor, state: State, pieces: list[Piece], step: AdamStep, factor: Factor
) -> None:
    """Update the state in place by torch's fused kernel. First multiply `grads` (fp32), in place, by `factor`."""
    if factor is not None:
        grads.mul_(factor)
    masters = joined_master(state)
    if state.has_split_master:
        state.exp_avg_sq.abs_()
    for group, settings in enumerate(step.settings):
        group_pieces = [piece for piece in pieces if piece.group == group]
        if not group_pieces:
            continue
        weights, gradients, exp_avgs, exp_avg_sqs = (
            [slab[piece.start : piece.stop] for piece in group_pieces]
            for slab in (masters, grads, state.exp_avg, state.exp_avg_sq)
        )
        torch._fused_adamw_(
            weights,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step.steps] * len(group_pieces),
            amsgrad=False,
            maximize=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            eps=settings.epsilon,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
        )
    keep_master_(state, masters)
