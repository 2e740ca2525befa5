"""Enforces the budgets of a run.

The host's budget covers the worker's anonymous and shared memory, including the memory of its imports. Three mechanisms
enforce this budget. (1) RLIMIT_DATA: the worker's allocation of private memory beyond the limit raises an exception.
(2) At the end of training, the worker's private and shared memory are compared with the budget. (3) If the system
allows it, the worker runs in a memory group of the kernel, whose limit also counts shared memory and the worker's
children. On sim, which counts host tensors itself, RLIMIT_DATA is far above the budget and catches only gross excess.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
from collections.abc import Iterator
from typing import Any

from harness.core.job import Job
from harness.devices import cuda_budget, machine, sim
from harness.devices.process_memory import process_bytes

MIB = 2**20
STACK_BYTES = MIB  # of a thread of Python in a process with a host budget; the system's default is 8 MiB
AGENT_BYTES = 256 * MIB  # bytes of the agent that starts several ranks; the memory group counts them, too
# The memory group's limit is above the budget by WALL_BYTES and by WALL_SHARE of the budget, because page tables,
# kernel stacks and code pages count in the group, too.
WALL_BYTES, WALL_SHARE = 32 * MIB, 1 / 256


def enforce(job: Job) -> dict[str, str]:
    """Enforce the job's budgets in this process, the worker, after the imports that every run needs. Return, for each
    memory with a budget, text that names the mechanism that enforces it."""
    import torch  # noqa: F401

    limits: dict[str, str] = {}
    if job.device == "cuda":
        limits |= _cap_device(job.budget.device_bytes, job.world_size)
    elif job.device == "sim":
        limits |= sim.start(job.budget)
    elif job.budget.device_bytes is not None:
        limits["device"] = "planned, not enforced on a CPU"
    if job.budget.host_bytes is not None:
        limits["host"] = _limit_data(job)
    return limits


def lift(job: Job) -> dict[str, int]:
    """End the limits after training. Return the bytes at this moment, as far as the system tells them: host_bytes (in
    use), host_limit_bytes (the host's budget, if RLIMIT_DATA enforced the budget), and the GPU's device_free_bytes and
    device_total_bytes."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))
    if job.device == "sim" and sim.started:
        sim.started.lift()  # ends the budgets, keeps the peaks
    sizes, in_use = process_bytes(), {}
    if "VmData" in sizes and "RssAnon" in sizes and job.device != "sim":  # gVisor's kernel tells only VmData
        in_use["host_bytes"] = sizes["RssAnon"]
        if soft_limit != hard_limit and job.budget.host_bytes:
            # Count as RLIMIT_DATA does, which also counts mapped memory that was never touched.
            in_use["host_bytes"] = job.budget.host_bytes - (soft_limit - sizes["VmData"])
            in_use["host_limit_bytes"] = job.budget.host_bytes
    torch: Any = sys.modules.get("torch")
    if job.device == "cuda" and torch is not None:
        # CUDA's context may have ended by an error; a torch without CUDA asserts
        with contextlib.suppress(RuntimeError, AssertionError):
            in_use["device_free_bytes"], in_use["device_total_bytes"] = torch.cuda.mem_get_info()
            torch.cuda.set_per_process_memory_fraction(1.0)
    return in_use


def check_taken(job: Job, bytes_before: dict[str, int]) -> None:
    """Raise MemoryError if this process takes more memory after training than the limit of wall_bytes(). The check is
    needed because RLIMIT_DATA does not count shared memory, which includes CUDA's page-locked memory.

    `bytes_before`: process_bytes() after the imports. Its shared memory is subtracted, because this memory may be
    imported files on a tmpfs.
    """
    sizes, limit = process_bytes(), wall_bytes(job)
    shared_bytes = max(0, sizes.get("RssShmem", 0) - bytes_before.get("RssShmem", 0))
    taken_bytes = sizes.get("RssAnon", 0) + shared_bytes
    if limit is not None and taken_bytes > limit:
        raise MemoryError(
            f"{taken_bytes} of {job.budget.host_bytes} bytes in use after training, {shared_bytes} of them page-locked"
            " or shared"
        )


def wall_bytes(job: Job) -> int | None:
    """Return the limit of the worker's memory group in bytes; None if the job has no host budget or runs on sim."""
    if job.budget.host_bytes is None or job.device not in ("cpu", "cuda"):
        return None
    agent_bytes = AGENT_BYTES if job.world_size > 1 else 0
    return int(job.budget.host_bytes * (1 + WALL_SHARE)) + WALL_BYTES + agent_bytes


def _limit_data(job: Job) -> str:
    """Set RLIMIT_DATA so that this process may map only this many more bytes: its host budget minus its resident bytes.
    Present mappings that were never touched take no memory, so they do not count against the budget. Return text that
    names the limit, or tells why there is no limit."""
    if job.device != "sim":  # sim would count what starting them takes, and its limit has room for stacks
        _start_threads(job.device)
    sizes, budget = process_bytes(), job.budget.host_bytes or 0
    threading.stack_size(STACK_BYTES)  # RLIMIT_DATA counts a thread's whole stack, which is hardly used
    try:
        limit = sizes["VmData"] + max(0, budget - sizes["RssAnon"])
        if job.device == "sim":
            limit = sizes["VmData"] + 2 * (budget + (job.budget.device_bytes or 0)) + 1024 * MIB
        hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
    except (KeyError, ValueError, OSError) as error:
        return f"planned, not enforced here ({error})"
    if job.device == "sim":
        return f"the device's own account; RLIMIT_DATA at {limit} bytes behind it"
    mapped_bytes = sizes["VmData"] - sizes["RssAnon"]
    return (
        f"RLIMIT_DATA at {limit} bytes: the budget, and {mapped_bytes} that are mapped only; what page-locked and"
        " shared memory adds is compared with the budget after training"
    )


def _start_threads(device: str) -> None:
    """Start torch's own threads: those that share an operation on the CPU, and autograd's thread of a GPU. Each maps a
    stack of several MiB and hardly uses it, as the CPU's matrix product does with its buffers. RLIMIT_DATA would count
    them if they were mapped later."""
    import torch

    torch.ones(2**20).sum()
    torch.ones(256, 256) @ torch.ones(256, 256)
    torch.ones(1, device="cuda" if device == "cuda" else "cpu", requires_grad=True).sum().backward()


def _cap_device(budget_bytes: int | None, num_ranks: int = 1) -> dict[str, str]:
    """Cap torch's caching allocator at the budget minus the bytes that plans assume for the context; None: no cap.

    Return text for the record: the cap, the context's planned and measured bytes, and the allocator's settings, which
    change what fits.
    """
    import torch

    free_bytes_before = machine.gpu_free_bytes()
    square = torch.ones(16, 16, device="cuda")
    square @ square
    planned_bytes, measured_bytes = cuda_budget.context_bytes(num_ranks), context_since(free_bytes_before)
    measured_text = "not" if measured_bytes is None else str(measured_bytes)
    limits = {
        "device_allocator": machine.allocator_settings() or "default settings",
        "device_context": f"{planned_bytes} bytes planned, {measured_text} measured",
    }
    if budget_bytes is not None:
        cap_bytes = cap_allocator(budget_bytes, planned_bytes)
        tensor_bytes = cuda_budget.tensor_bytes(budget_bytes, planned_bytes)
        limits["device"] = (
            f"cap of the caching allocator at {cap_bytes} bytes: the budget less the context; plans fill {tensor_bytes}"
        )
    return limits


def cap_allocator(budget_bytes: int, context_bytes: int, index: int | None = None) -> int:
    """Cap torch's caching allocator of this process on a GPU at the budget minus the context. Return the cap in bytes.
    `index`: the GPU's number; None: the current GPU."""
    import torch

    cap_bytes = cuda_budget.allocator_bytes(budget_bytes, context_bytes)
    _, total_bytes = torch.cuda.mem_get_info(index)
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), index)
    return cap_bytes


@contextlib.contextmanager
def capped(device: Any, budget_bytes: int | None) -> Iterator[None]:
    """Within this context, this process may take `budget_bytes` of a GPU, which cover the GPU's context and the
    allocator's reserve, too; afterwards the cap is as before. `device`: a torch.device; if it is no GPU, or without a
    budget, there is no cap."""
    import torch

    if budget_bytes is None or device.type != "cuda":
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    fraction_before = torch.cuda.get_per_process_memory_fraction(index)
    cap_allocator(budget_bytes, cuda_budget.context_bytes(), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(fraction_before, index)


def context_since(free_bytes: int | None) -> int | None:
    """Return the device bytes that were taken outside torch's allocator since the device had `free_bytes` free; None if
    the driver does not tell free bytes. The bytes of all processes count, so call this while no other process uses the
    device."""
    import torch

    torch.cuda.synchronize()
    free_bytes_now = machine.gpu_free_bytes()
    if free_bytes is None or free_bytes_now is None:
        return None
    return max(0, free_bytes - free_bytes_now - torch.cuda.memory_reserved())


def device_peaks(device: str) -> dict[str, int]:
    """Return this process's peak bytes on the device, by their names in a record; empty on a CPU."""
    if device == "sim":
        return sim.peaks()
    torch = sys.modules.get("torch")
    if device != "cuda" or torch is None:
        return {}
    return {
        "device_allocated": torch.cuda.max_memory_allocated(),
        "device_reserved": torch.cuda.max_memory_reserved(),
    }


def reset_peaks(device: str) -> None:
    """Count device_peaks(), and how often a GPU's allocator emptied its cache, from now on."""
    if device == "sim":
        sim.started.reset_peaks()
    elif device == "cuda":
        torch: Any = sys.modules["torch"]
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()


def limit_of_the_call() -> str:
    """Name the limits that the caller's shell sets on the memory of its processes, such as `ulimit -v`; empty if the
    shell sets no limit. If a run is out of memory under such a limit, the result holds for this call alone."""
    limits = {"ulimit -v": resource.RLIMIT_AS, "ulimit -d": resource.RLIMIT_DATA}
    limit_names = (
        name for name, kind in limits.items() if resource.getrlimit(kind)[0] != resource.RLIM_INFINITY
    )
    return ", ".join(limit_names)
