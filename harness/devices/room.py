"""The bytes of each memory that a plan may fill. This file imports no torch.

A memory's bytes are those of the budget or, if the budget sets no limit, those of the machine. These take some of them:

    taken by            of which memory                       where
    context             device; see cuda_budget.py            a GPU
    communicators       device; see cuda_budget.py            a GPU of several ranks
    reserve             device; see cuda_budget.py            a GPU
    dropout             device, or the host without one       a CPU or sim, if the workload has dropout
    imports             host                                  a CPU or a GPU, if the host has a budget
    heap                host                                  a CPU, if the host has a budget
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
from typing import TYPE_CHECKING

from harness.base.checkout import ROOT
from harness.base.child_process import ask
from harness.base.json_object import JsonObject
from harness.base.whole_file import write_whole
from harness.core.job import GIB, Budget, Job, Room, Workload, gib
from harness.devices import cuda_budget, machine
from harness.devices.cuda_budget import context_bytes
from harness.devices.process_memory import process_bytes

if TYPE_CHECKING:
    from harness.devices.named_machines import Machine

MIB = 2**20
# file that caches baseline_bytes() by device, machine and packages
BASELINES = ROOT / ".venv" / "baselines.json"
LEAST_ROOM_BYTES = 64 * MIB
# The reserve of a CPU's host budget, for fragments of the C library's heap, in which all tensors of a CPU below 32 MiB
# lie: runs of the reference took 5 to 39 % more than their plans. On a GPU the host's tensors are few and large.
HEAP_PARTS = 3
# Bytes that the imports and the context of a process on a GPU take of the host where no GPU is here to measure them, as
# in a call that submits jobs to other machines: an upper estimate, not measured.
CUDA_BASELINE_BYTES = 2048 * MIB
# host memory of a named machine whose entry in machines.yaml has no host_memory
ASSUMED_HOST_BYTES = 64 * GIB


def room_of(job: Job, counts_imports: bool = True) -> Room:
    """Return the room that the plan of each of the job's ranks has if all ranks are on this machine. `counts_imports`:
    False: the bytes of imports and of the heap stay in the room. Raises ValueError if the job asks for several ranks or
    devices on sim."""
    if job.world_size > 1 and job.device == "sim":
        raise ValueError(
            "--ranks: expected 1 on sim (--device-memory on a CPU); leave --ranks or --device-memory out"
        )
    num_devices = job.options.get("num_devices", 1)
    if num_devices > 1 and job.device == "sim":
        raise ValueError(
            "sim (--device-memory on a CPU) is one device: leave --devices out, or add --device cpu, whose devices are"
            " processes (plans keep to the budget; nothing enforces it)"
        )
    whole = room_within(job.budget, job.device, job.workload, job.world_size)
    return less_imports(whole, job.budget, job.device, num_devices) if counts_imports else whole


def room_within(budget: Budget, device: str, workload: Workload | None = None, num_ranks: int = 1) -> Room:
    """Return the room of each rank's plan if `num_ranks` ranks share this machine; the bytes of imports and of the heap
    stay in the room.

    If the budget has no device memory, device_bytes is None on a CPU, which has no device memory, and on CUDA if this
    machine has no GPU; such a machine submits its jobs to other machines. On sim, a memory that is not in the budget
    has no limit. The rates are the budget's; if the budget has none, they are those calibrated for this workload.
    """
    device_bytes = budget.device_bytes
    if device_bytes is None and device == "cuda":
        device_bytes = machine.gpu().get("gpu_bytes")
    if device_bytes is not None and device == "cuda":
        device_bytes = cuda_budget.tensor_bytes(device_bytes, context_bytes(num_ranks))
    host_bytes = host_limit_bytes(budget, device)
    if device != "cuda" and workload and workload.dropout:
        if device_bytes is None:
            host_bytes = host_bytes and max(1, host_bytes - workload.dropout_bytes)
        else:
            device_bytes = max(1, device_bytes - workload.dropout_bytes)
    rates = budget.rates or (machine.rates(device, workload) if workload else None)
    if rates and budget.link_bytes_per_second:
        link = budget.link_bytes_per_second
        rates = dataclasses.replace(rates, inbound_bytes_per_second=link, outbound_bytes_per_second=link)
    host_bytes = host_bytes and host_bytes // num_ranks
    return Room(device_bytes, host_bytes, budget.disk_bytes, rates, page_locks=device == "cuda")


def less_imports(whole: Room, budget: Budget, device: str, num_devices: int = 1) -> Room:
    """Return a rank's room without the host memory that its processes take and plans do not count: the imports and, on
    a CPU, 1/HEAP_PARTS of the rest for fragments of the heap.

    With several devices, one process leads the processes of the devices. On a CPU, the devices' processes share one
    copy of the imports, and the leading process has another. On GPUs each process has imports and a context of its own.
    The room stays as it is if there is no host budget, and on sim, whose host budget counts only tensors.
    """
    if not imports_text(budget, device) or whole.host_bytes is None:
        return whole
    num_imports = 1
    if num_devices > 1:
        num_imports = 2 if device == "cpu" else 1 + num_devices
    left_bytes = whole.host_bytes - baseline_bytes(device) * num_imports
    heap_bytes = left_bytes // HEAP_PARTS if device == "cpu" else 0
    return dataclasses.replace(whole, host_bytes=max(1, left_bytes - heap_bytes))


def imports_text(budget: Budget, device: str) -> str:
    """Return what less_imports() subtracts, as text; empty if it subtracts nothing."""
    if budget.host_bytes is None or device not in ("cpu", "cuda"):
        return ""
    return "less a reserve" if device == "cpu" else "less imports"


def room_at(named: Machine, budget: Budget, workload: Workload, num_ranks: int = 1) -> Room:
    """Return the room of each rank's plan on the GPU of another machine whose host `num_ranks` ranks share."""
    whole = named.room
    device_bytes = (
        cuda_budget.tensor_bytes(budget.device_bytes) if budget.device_bytes else whole.device_bytes
    )
    if device_bytes and num_ranks > 1:
        device_bytes = max(1, device_bytes - cuda_budget.COMMUNICATORS_BYTES)
    host_bytes = host_bytes_at(named, budget) // num_ranks
    disk_bytes = budget.disk_bytes or whole.disk_bytes
    return Room(device_bytes, host_bytes, disk_bytes, named.rates(workload.dtype), page_locks=True)


def host_bytes_at(named: Machine, budget: Budget) -> int:
    """Return the bytes of a named machine's host memory: the budget's; without one, those of its entry in
    machines.yaml; without both, ASSUMED_HOST_BYTES."""
    return budget.host_bytes or named.room.host_bytes or ASSUMED_HOST_BYTES


def host_limit_bytes(budget: Budget, device: str) -> int | None:
    """Return the most bytes of host memory that a run may take: the budget or, without one, the machine's memory. None:
    no limit, on sim, which counts the host's tensors only if there is a budget."""
    return budget.host_bytes or (None if device == "sim" else machine.host_bytes())


def device_limit_bytes(job: Job) -> int | None:
    """Return the most bytes that torch's allocator may reserve of a device for the job: the budget or, on a GPU, the
    budget less the context; without a budget the bytes of the GPU. None: no limit."""
    budget_bytes = job.budget.device_bytes
    if job.device != "cuda":
        return budget_bytes
    if not budget_bytes:
        return machine.gpu().get("gpu_bytes")
    return cuda_budget.allocator_bytes(budget_bytes, context_bytes(job.world_size))


def check_budget(budget: Budget, device: str, world_size: int = 1) -> None:
    """Raise ValueError, one line, if a budget exceeds the machine's memory, or if the host's budget is too small for
    the imports of `world_size` ranks."""
    host_bytes = machine.host_bytes()
    device_bytes = host_bytes if device == "sim" else None  # sim's device memory lies in the host's memory
    if device == "cuda":
        device_bytes = machine.gpu()["gpu_bytes"]
        check_device(budget.device_bytes, world_size)
    limits = (
        ("--device-memory", budget.device_bytes, device_bytes),
        ("--host-memory", budget.host_bytes, host_bytes),
    )
    for option, budget_bytes, machine_bytes in limits:
        if budget_bytes and machine_bytes and budget_bytes > machine_bytes:
            raise ValueError(
                f"expected {option} of at most {machine_bytes // MIB}MiB on this machine, got {gib(budget_bytes)}"
            )
    if budget.host_bytes and device in ("cpu", "cuda"):
        import_bytes = baseline_bytes(device)
        least_bytes = (import_bytes + LEAST_ROOM_BYTES) * world_size
        if budget.host_bytes < least_bytes:
            of_a_rank = " a rank" if world_size > 1 else ""
            raise ValueError(
                f"--host-memory {gib(budget.host_bytes)} is too little: torch's imports alone take"
                f" {gib(import_bytes)}{of_a_rank} here; the smallest budget is {-(-least_bytes // MIB)}MiB"
            )


def check_device(budget_bytes: int | None, num_ranks: int = 1) -> None:
    """Raise ValueError if the budget of a GPU leaves plans less than MIN_BYTES_FOR_TENSORS after the driver's context
    and the reserve are subtracted. `budget_bytes`: None if there is no budget, and then nothing is raised."""
    context = context_bytes(num_ranks)
    least_bytes = cuda_budget.budget_bytes(cuda_budget.MIN_BYTES_FOR_TENSORS, context)
    if budget_bytes is not None and budget_bytes < least_bytes:
        raise ValueError(
            f"expected --device-memory of at least {-(-least_bytes // MIB)}MiB, because the GPU's context takes"
            f" {gib(context)}, got {gib(budget_bytes)}"
        )


def warnings_beside(job: Job, surroundings: JsonObject) -> list[str]:
    """Return warnings for people about what uses the job's GPUs beside it. `surroundings`: machine.surroundings(),
    which lists no displays; these only take free memory."""
    others = surroundings.get("foreign_processes", ())
    warnings = [f"process {other['pid']} is on GPU {other['gpu']}, too: on record" for other in others]
    gpu_bytes, free_bytes = machine.gpu().get("gpu_bytes"), machine.gpu_free_bytes()
    if job.device == "cuda" and gpu_bytes and free_bytes is not None:
        may_fill_bytes = job.budget.device_bytes or gpu_bytes - cuda_budget.RESERVE_BYTES
        if free_bytes < may_fill_bytes:
            warnings.append(
                f"{gib(free_bytes)} of the GPU's {gib(gpu_bytes)} are free: a run that fills more ends out of memory;"
                f" try --device-memory {free_bytes // MIB}MiB"
            )
    return warnings


@functools.cache
def baseline_bytes(device: str) -> int:
    """Return the bytes of anonymous memory of a process that has a worker's imports but does not train. If they cannot
    be measured, return 0 or, on CUDA, CUDA_BASELINE_BYTES. The number is measured once for each device, machine and set
    of packages and kept in BASELINES, because making a GPU's context takes seconds."""
    key, bytes_by_key = json.dumps([device, machine.compared_facts()]), dict[str, int]()
    with contextlib.suppress(OSError, ValueError, TypeError):
        kept_numbers = dict(json.loads(BASELINES.read_text()))
        bytes_by_key = {str(name): int(size) for name, size in kept_numbers.items()}
    if key not in bytes_by_key:
        with contextlib.suppress(ValueError):  # torch is missing; the run's record will tell that
            bytes_by_key[key] = ask("harness.devices.room", device)
            with contextlib.suppress(OSError):
                # .venv may belong to another user; then the next process measures again
                BASELINES.parent.mkdir(exist_ok=True)
                write_whole(BASELINES, json.dumps(bytes_by_key, indent=1))
    return bytes_by_key.get(key, CUDA_BASELINE_BYTES if device == "cuda" else 0)


def main() -> None:
    """Entry point for child_process.ask(): read a device's name, and print the anonymous memory of this process in
    bytes. An optimizer is made first, because a process's first optimizer imports modules half as large as torch, and a
    matrix product, for which a GPU's libraries take host memory."""
    import torch

    square = torch.ones(16, 16, device=json.load(sys.stdin))
    torch.optim.AdamW([square], fused=True)
    square @ square
    print(process_bytes().get("RssAnon", 0))


if __name__ == "__main__":
    main()
