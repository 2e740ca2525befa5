"""Sets with how many of the CPU's cores the calling thread computes."""

from __future__ import annotations

import contextlib
import ctypes

import torch


def use_cores(num_cores: int) -> None:
    """Let torch's operations in the calling thread use this many cores; other threads stay as they are.

    torch.set_num_threads() also changes a setting of MKL for the whole process: products within a parallel region then
    use several cores, so the gradients of attention would be rounded otherwise than in a process that never calls it.
    It is called only where torch's OpenMP library is not found.
    """
    torch.get_num_threads()  # the thread first takes torch's own number, which would replace this one later
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(num_cores)
    if torch.get_num_threads() != num_cores:
        torch.set_num_threads(num_cores)
