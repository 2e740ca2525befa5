"""AdamW's state in slabs on host or device; the fp32 master of a bf16 weight is stored in two halves.

In bf16 the weight is the upper half of its master, so 12 bytes a parameter hold weight, master and moments. The weight
is the master rounded to nearest, ties to even, as torch rounds; the master's low 16 bits are stored beside the weight.
If the master lies midway between two bf16 numbers (a tie), the two halves match two masters: one was rounded up, the
other down. A 17th bit tells which of the two it is: the sign of the second moment, which is never negative. No bit of
the master is lost.

An fp16 weight cannot be a part of its master, because the master's exponent may exceed fp16's. The master is stored
whole: 14 bytes a parameter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from methods.shared.memory_needs import CHUNK_NUMEL


class State(NamedTuple):
    """Flat slabs of equal length: weights in the workload's dtype, moments in fp32, and the master.

    The master is None for fp32 weights and fp32 for fp16 weights. For bf16 weights it is int16: the master's low half.
    """

    weights: Tensor
    master: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def has_split_master(self) -> bool:
        """True if `master` holds only the low 16 bits of the fp32 master, as for bf16 weights."""
        return self.master is not None and self.master.dtype == torch.int16

    def cut(self, start: int, stop: int) -> State:
        """Return the state whose slabs are the elements [start, stop) of these slabs."""
        return State(*(None if slab is None else slab[start:stop] for slab in self))  # type: ignore[arg-type]


def kept_dtypes(dtype: str) -> list[torch.dtype]:
    """Return the dtypes of AdamW's state besides the weights: the master (none in fp32, its low half in bf16) and two
    moments."""
    master = {"fp32": [], "bf16": [torch.int16], "fp16": [torch.float32]}[dtype]
    return [*master, torch.float32, torch.float32]


def joined_master(state: State) -> Tensor:
    """Return the fp32 master: a slab of the state, or a new tensor joined from both halves."""
    if state.master is None or not state.has_split_master:
        return state.weights if state.master is None else state.master
    master = torch.empty_like(state.exp_avg)
    low, high = _halves(master)
    low.copy_(state.master)
    high.copy_(state.weights.view(torch.int16))
    # subtracts 1 where the low half, as a signed number, is negative
    high.add_(state.master.bitwise_right_shift(15))
    # adds 1 where the second moment marks a tie
    high.sub_(_halves(state.exp_avg_sq)[1].bitwise_right_shift(15))
    return master


def keep_master_(state: State, masters: Tensor) -> None:
    """Store these values as the weights and the fp32 master. If the master is split, its 17th bit is stored in the sign
    of exp_avg_sq."""
    if masters is not state.weights:
        state.weights.copy_(masters)
    if state.master is None or not state.has_split_master:
        if state.master is not None and state.master is not masters:
            state.master.copy_(masters)
        return
    low, high = _halves(masters)
    state.master.copy_(low)
    # joined_master() finds the high half from the weights and the low half's top bit. `correction` becomes this high
    # half minus the true one: where it is -1, the sign bit of exp_avg_sq is set as a mark, for which joined_master()
    # adds 1.
    correction = state.master.bitwise_right_shift(15)
    correction.add_(state.weights.view(torch.int16)).sub_(high)
    _halves(state.exp_avg_sq.abs_())[1].bitwise_or_(correction.eq_(-1).bitwise_left_shift_(15))


def master_of(state: State) -> Tensor:
    """Return the whole fp32 master. A split master is joined on the host, because a device may have no room for it. The
    halves are joined in blocks that fit the processor's cache."""
    if not state.has_split_master:
        return joined_master(state)
    master = torch.empty(len(state.exp_avg))
    for start in range(0, len(master), CHUNK_NUMEL):
        master[start : start + CHUNK_NUMEL] = joined_master(state.cut(start, start + CHUNK_NUMEL))
    return master


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high 16 bits of fp32 values as int16 views, without a copy. torch's kernels need no copy
    of these views either; they would copy operands of different widths."""
    halves = values.view(torch.int16)
    return halves[::2], halves[1::2]
