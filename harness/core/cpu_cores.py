"""Tells how many of the CPU's cores this process may use, and sets with how many the calling thread computes."""

from __future__ import annotations

import contextlib
import ctypes
import os

import psutil

from harness.base import cgroup
from harness.core.job import Workload

# If a layer's forward pass on one sample takes fewer FLOPs than this, only one thread computes. For so little work a
# second thread gains nothing; beside other work, two threads, which wait busily for each other, took up to 25 times as
# long (results/LOG.md). The number is for a sample, not for a batch, so that the batch's size does not change results.
FLOPS_FOR_THREADS = 1e8


def available_cores() -> int:
    """Return the number of cores that this process may keep busy: those it may run on or, if fewer, whole cores of its
    quota. More threads than that would use the quota up early in each period and then all stand still."""
    quota = cgroup.cpu_quota()
    return min(_num_allowed(), max(1, int(quota))) if quota else _num_allowed()


def has_quota() -> bool:
    """True if a quota lets this process keep fewer cores busy than it may run on, for which torch does not look."""
    return available_cores() < _num_allowed()


def is_small(workload: Workload) -> bool:
    """True if a CPU should compute this workload's layers with one thread (see FLOPS_FOR_THREADS)."""
    return workload.layer_flops / workload.batch_size < FLOPS_FOR_THREADS


def use_cores(number: int) -> None:
    """Let torch's operations in the calling thread use this many cores; other threads stay as they are.

    torch.set_num_threads() also changes a setting of MKL for the whole process: products within a parallel region then
    use several cores, so the gradients of attention would be rounded otherwise than in a process that never calls it.
    It is called only where torch's OpenMP library is not found.
    """
    import torch

    torch.get_num_threads()  # the thread first takes torch's own number, which would replace this one later
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(number)
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def _num_allowed() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1
