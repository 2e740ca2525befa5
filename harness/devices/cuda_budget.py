"""The parts of a CUDA device's budget. Plans, checks of budgets and the allocator's cap all use these numbers.

    budget = context + bytes that torch's allocator may reserve
    bytes that the allocator may reserve = reserve + bytes that a plan's tensors may fill

The context is memory of the driver and of libraries, outside the allocator; with several ranks it includes NCCL's
buffers. The reserve is for memory that plans do not count: cuBLAS's workspaces, the rounding up of segments, and
fragments.
"""

from __future__ import annotations

from harness.devices import machine

# An upper estimate of the context's bytes, not measured. It is used on machines without a calibration.
CONTEXT_BYTES = 768 * 2**20
# The reserve, not measured: RESERVE_BYTES for workspaces, and 1/RESERVE_PARTS of the remaining bytes for rounding and
# fragments.
RESERVE_BYTES, RESERVE_PARTS = 256 * 2**20, 32
# Bytes of NCCL's communicators in each of several ranks: an estimate, not measured, enough for two communicators.
COMMUNICATORS_BYTES = 512 * 2**20
# A GPU's budget that leaves fewer bytes than these for a plan's tensors is refused.
MIN_BYTES_FOR_TENSORS = 256 * 2**20
# If a process leads the processes of several GPUs: the bytes that the leading process takes on the first GPU for its
# context, a workspace of cuBLAS and the tokens of the batches; not measured.
LEADING_BYTES = CONTEXT_BYTES + 64 * 2**20


def context_bytes(num_ranks: int = 1) -> int:
    """Return the bytes of a CUDA context: the device memory that a process takes outside torch's allocator. This
    machine's calibrations measure this number; without a calibration it is an upper estimate. If there are several
    ranks, the bytes of NCCL's communicators are added."""
    measured = [entry.get("measured", {}).get("context_bytes", 0) for entry in machine.calibrations()]
    alone = max(measured, default=0) or CONTEXT_BYTES
    return alone + (COMMUNICATORS_BYTES if num_ranks > 1 else 0)


def allocator_bytes(budget_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the most bytes that torch's allocator may reserve within this budget."""
    return max(0, budget_bytes - context_bytes)


def tensor_bytes(budget_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the bytes that a plan's tensors may fill. The number is at least 1, because a budget must be positive."""
    room = allocator_bytes(budget_bytes, context_bytes) - RESERVE_BYTES
    return max(1, room * (RESERVE_PARTS - 1) // RESERVE_PARTS)


def budget_bytes(tensor_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the smallest budget in bytes in which a plan's tensors may fill `tensor_bytes`."""
    return context_bytes + RESERVE_BYTES + -(-tensor_bytes * RESERVE_PARTS // (RESERVE_PARTS - 1))
