"""How a CUDA device's budget is divided, for plans, refusals and the allocator's cap alike.

    budget = context + what torch's allocator may reserve
    what the allocator may reserve = a reserve + what a plan's tensors may fill

The context is driver and library memory outside the allocator. The reserve is for what plans do not count: cuBLAS's
workspaces, segments rounded up, and fragments.
"""

from __future__ import annotations

# Without a calibration; an upper estimate, not measured: kernels and libraries are loaded as they are first used.
CONTEXT_BYTES = 768 * 2**20
# Not measured: the constant is for workspaces, one part of RESERVE_PARTS for rounding and fragments.
RESERVE_BYTES, RESERVE_PARTS = 256 * 2**20, 32
LEAST_TENSOR_BYTES = 256 * 2**20


def allocator_bytes(budget_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """The cap of torch's allocator."""
    return max(0, budget_bytes - context_bytes)


def tensor_bytes(budget_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """What a plan may fill; at least one byte, as every budget."""
    room = allocator_bytes(budget_bytes, context_bytes) - RESERVE_BYTES
    return max(1, room * (RESERVE_PARTS - 1) // RESERVE_PARTS)


def budget_bytes(tensor_bytes: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """The smallest budget in which a plan may fill so much."""
    return context_bytes + RESERVE_BYTES + -(-tensor_bytes * RESERVE_PARTS // (RESERVE_PARTS - 1))
