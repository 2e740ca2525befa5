"""The division of a CUDA device's budget, which plans, refusals and the allocator's cap share.

    budget = context + bytes that torch's allocator may reserve
    bytes that the allocator may reserve = reserve + bytes that a plan's tensors may fill

The context is driver and library memory outside the allocator; with several ranks it includes NCCL's buffers. The
reserve is for memory that plans do not count: cuBLAS's workspaces, segments rounded up, and fragments.
"""

from __future__ import annotations

# Upper estimate of the context for machines without a calibration; not measured.
CONTEXT_BYTES = 768 * 2**20
# The reserve, not measured: RESERVE_BYTES for workspaces, and 1/RESERVE_PARTS for rounding and fragments.
RESERVE_BYTES, RESERVE_PARTS = 256 * 2**20, 32
# Bytes of NCCL's communicators in each of several ranks, not measured: room for two communicators and more.
COMMUNICATORS_BYTES = 512 * 2**20
LEAST_TENSOR_BYTES = 256 * 2**20
# Bytes that a process which leads the processes of several GPUs takes on the first GPU, not measured: the context, a
# workspace of cuBLAS and the batches' tokens.
LEADING_BYTES = CONTEXT_BYTES + 64 * 2**20


def allocator_bytes(budget_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the cap of torch's allocator."""
    return max(0, budget_bytes - context_bytes)


def tensor_bytes(budget_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the bytes that a plan may fill; at least 1, because a budget must be positive."""
    room = allocator_bytes(budget_bytes, context_bytes) - RESERVE_BYTES
    return max(1, room * (RESERVE_PARTS - 1) // RESERVE_PARTS)


def budget_bytes(tensor_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the smallest budget in which a plan may fill this many bytes."""
    return context_bytes + RESERVE_BYTES + -(-tensor_bytes * RESERVE_PARTS // (RESERVE_PARTS - 1))
