"""How a CUDA device's budget is divided, for plans, refusals and the allocator's cap alike.

    budget = context + what torch's allocator may reserve
    what the allocator may reserve = a reserve + what a plan's tensors may fill

The context is driver and library memory outside the allocator. The reserve is for what plans do not count: cuBLAS's
workspaces, segments rounded up, and fragments.
"""

from __future__ import annotations

# Upper estimate without a calibration, not measured: kernels and libraries are loaded at their first use.
CONTEXT_BYTES = 768 * 2**20
# Not measured: the constant covers workspaces, one part in RESERVE_PARTS covers rounding and fragments.
RESERVE_BYTES, RESERVE_PARTS = 256 * 2**20, 32
LEAST_TENSOR_BYTES = 256 * 2**20
# Of a process that leads those of several devices, on the first one, not measured: its context, a workspace of cuBLAS
# and the batches' tokens.
LEADING_BYTES = CONTEXT_BYTES + 64 * 2**20


def allocator_bytes(budget_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the cap of torch's allocator."""
    return max(0, budget_bytes - context_bytes)


def tensor_bytes(budget_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the bytes that a plan may fill; at least one byte, as in every budget."""
    room = allocator_bytes(budget_bytes, context_bytes) - RESERVE_BYTES
    return max(1, room * (RESERVE_PARTS - 1) // RESERVE_PARTS)


def budget_bytes(tensor_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Return the smallest budget in which a plan may fill this many bytes."""
    return context_bytes + RESERVE_BYTES + -(-tensor_bytes * RESERVE_PARTS // (RESERVE_PARTS - 1))
