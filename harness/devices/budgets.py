"""Budgets put in force, and how long a run may take.

The host's budget is the anonymous and shared memory of the worker, imports included. In the worker RLIMIT_DATA turns
its excess into an exception; around the worker a memory group of the kernel, where one may be made, is the hard wall
that also holds what the limit does not count: shared memory and the worker's children. On a device that keeps its own
account of the host, both would count the same bytes in another way, so there the limit is a generous backstop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from harness.core.child_process import ask
from harness.core.job import Budget, Job, gib
from harness.devices import cgroup, machine, sim

MIB = 2**20
LEAST_ROOM_BYTES = 64 * MIB  # beyond the imports
AGENT_BYTES = 256 * MIB  # of torchrun's agent, which is inside the wall and trains nothing
# The wall stands this much behind the budget: page tables, kernel stacks and code pages are charged to the group, too.
WALL_BYTES, WALL_SHARE = 32 * MIB, 1 / 256
# What the slowest honest run may need, from rates a loaded machine of two cores is well above.
FLOPS_PER_SECOND = {"cuda": 5e11}
SLOWEST_FLOPS_PER_SECOND = 2e8
STATE_BYTES_PER_PARAM, STATE_BYTES_PER_SECOND = 64, 1e8  # all states to a slow disk and back
FLOOR_SECONDS, SILENCE_SECONDS = 3600.0, 900.0


def check(budget: Budget, device: str, world_size: int = 1) -> None:
    """Raise ValueError, one line, where a budget is more than the machine has or less than the imports alone take."""
    there = machine.budget(Budget(), device)
    if device == "sim":  # whose memory is the host's
        there = Budget(machine.host_bytes(), machine.host_bytes())
    for name, option in (("device_bytes", "--device-memory"), ("host_bytes", "--host-memory")):
        asked, most = getattr(budget, name), getattr(there, name)
        if asked and most and asked > most:
            raise ValueError(f"{option} {gib(asked)} is more than this machine has: at most {most // MIB}MiB")
    if budget.host_bytes and device in ("cpu", "cuda"):
        least = (baseline_bytes(device) + LEAST_ROOM_BYTES) * world_size
        if budget.host_bytes < least:
            raise ValueError(
                f"--host-memory {gib(budget.host_bytes)} is too little: torch with an optimizer takes"
                f" {gib(baseline_bytes(device))}{' a rank' if world_size > 1 else ''} here, so the smallest budget is"
                f" {-(-least // MIB)}MiB"
            )


@functools.cache
def baseline_bytes(device: str) -> int:
    """Anonymous memory of a process that has imported what a worker needs and trained nothing, measured in one; 0 where
    the system does not tell."""
    with contextlib.suppress(ValueError):  # a run without torch has a record that says so
        return ask("harness.devices.budgets", device)
    return 0


def enforce(job: Job) -> dict[str, str]:
    """In the worker: put the budgets in force on top of what every run imports; says what does it."""
    import torch  # noqa: F401

    found: dict[str, str] = {}
    if job.device == "cuda":
        found |= _cap_device(job.budget.device_bytes)
    elif job.device == "sim":
        found |= sim.enforce(job.budget)
    elif job.budget.device_bytes is not None:
        found["device"] = "planned, not enforced on a CPU"
    if job.budget.host_bytes is not None:
        found["host"] = _limit_data(job)
    return found


def lift(job: Job) -> dict[str, int]:
    """End the limits, for what is not training. Returns bytes at that moment: of the host, its budget where
    RLIMIT_DATA enforced it, and of the device."""
    limit = _end_data_limit()
    if job.device == "sim":
        sim.lift()
    sizes, found = process_bytes(), {}
    if "VmData" in sizes and job.device != "sim":
        found["host_bytes"] = sizes["RssAnon"]
        if limit is not None and job.budget.host_bytes:
            # As the limit counts: memory that is mapped and not yet touched is in use.
            found["host_bytes"] = job.budget.host_bytes - (limit - sizes["VmData"])
            found["host_limit_bytes"] = job.budget.host_bytes
    torch: Any = sys.modules.get("torch")
    if job.device == "cuda" and torch is not None:
        with contextlib.suppress(RuntimeError):  # the context itself may be gone
            found["device_free_bytes"], found["device_total_bytes"] = torch.cuda.mem_get_info()
    return found


def wall(job: Job) -> cgroup.Group | None:
    """A memory group with the host's budget for a worker, where one may be made and the budget is the process's."""
    limit = wall_bytes(job)
    return cgroup.make(limit) if limit else None


def wall_bytes(job: Job) -> int | None:
    """Where that wall stands; None where the host's budget is not the process's."""
    if job.budget.host_bytes is None or job.device not in ("cpu", "cuda"):
        return None
    agent = AGENT_BYTES if job.world_size > 1 else 0
    return int(job.budget.host_bytes * (1 + WALL_SHARE)) + WALL_BYTES + agent


def deadline_seconds(job: Job) -> float:
    """The time that a job without a --timeout may take in all."""
    return FLOOR_SECONDS + 2 * job.steps * _slowest_step_seconds(job)


def silence_seconds(job: Job) -> float:
    """How long a job without a --timeout may go without an event: a step, or the next phase."""
    return SILENCE_SECONDS + 2 * _slowest_step_seconds(job)


def _slowest_step_seconds(job: Job) -> float:
    rate = FLOPS_PER_SECOND.get(job.device, SLOWEST_FLOPS_PER_SECOND)
    moving = STATE_BYTES_PER_PARAM * job.workload.num_params / STATE_BYTES_PER_SECOND
    return job.workload.flops_per_step / rate + moving


def _limit_data(job: Job) -> str:
    """Room for the budget less what is resident, on top of what is mapped: untouched mappings cost nobody memory."""
    sizes, budget = process_bytes(), job.budget.host_bytes or 0
    try:
        import resource

        limit = sizes["VmData"] + max(0, budget - sizes["RssAnon"])
        if job.device == "sim":
            limit = sizes["VmData"] + 2 * (budget + (job.budget.device_bytes or 0)) + 1024 * MIB
        most = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    except (ImportError, KeyError, ValueError, OSError) as error:
        return f"planned, not enforced here ({error})"
    if job.device == "sim":
        return f"the device's own account; RLIMIT_DATA at {limit} bytes behind it"
    return f"RLIMIT_DATA at {limit} bytes: the budget, and {sizes['VmData'] - sizes['RssAnon']} that are mapped only"


def _end_data_limit() -> int | None:
    """The limit that was in force, if any."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        limit, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return None if limit == most else limit
    return None


def _cap_device(budget_bytes: int | None) -> dict[str, str]:
    """Cap the caching allocator at the budget less what the context takes outside of it, measured here.

    The context is what the device has less of once a kernel and cuBLAS have run, beside what the allocator reserved.
    Allocator settings change what fits, so they are on record.
    """
    import torch

    before = machine.gpu_free_bytes()
    square = torch.ones(16, 16, device="cuda")
    square @ square
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found = {"device_allocator": machine.allocator_settings() or "default settings"}
    context = max(0, before - free - torch.cuda.memory_reserved()) if before else machine.CUDA_CONTEXT_BYTES
    found["device_context"] = f"{context} bytes" if before else f"{context} bytes, not measured"
    if budget_bytes is not None:
        cap = max(0, budget_bytes - context)
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total))
        found["device"] = f"cap of the caching allocator at {cap} bytes: the budget less the context"
    return found


def process_bytes(pid: int | None = None) -> dict[str, int]:
    """Bytes of a process, else of this one, by the kernel's names (RssAnon, VmData); empty if it does not tell."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines()
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("Rss", "VmData"))}
    return {}


def main() -> None:
    """For child_process.ask(): of a device, baseline_bytes(). The first optimizer imports half as much as torch."""
    import torch

    torch.optim.AdamW([torch.zeros(1, device=json.load(sys.stdin))], fused=True)
    print(process_bytes().get("RssAnon", 0))


if __name__ == "__main__":
    main()
