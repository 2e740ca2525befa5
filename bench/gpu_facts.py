"""Measures facts of a GPU and its host that plans take for granted, each by itself, into one file.

    .venv/bin/python -m bench.gpu_facts FILE [--device cpu]

If the measurement of a fact fails, the file has its error, and the next fact follows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from harness.base.whole_file import write_whole
from harness.core.job import GIB
from harness.devices import budgets, machine
from harness.devices.streams import Device
from methods.streaming.calibrate import copies, median_seconds

SHAPES = {"cuda": (4, 16, 1024, 128), "cpu": (1, 4, 64, 32)}  # of attention: the published one, and a small one
PINNED = {"cuda": (4 * GIB, 16 * GIB), "cpu": (GIB // 8,)}
LAUNCHES = 1000


def memory(device: str) -> dict[str, Any]:
    """The device's bytes by NVML and by CUDA, and the context's: bare, and with the libraries of a layer."""
    before, told = machine.gpu_free_bytes(), {"nvml_total": machine.gpu().get("gpu_bytes")}
    torch.zeros(1, device=device)
    told["context_bare"] = budgets.context_since(before)
    told["cuda_free"], told["cuda_total"] = torch.cuda.mem_get_info()
    x = torch.randn(256, 256, device=device, requires_grad=True)
    torch.nn.functional.layer_norm(torch.nn.functional.gelu(x @ x), (256,)).sum().backward()
    told["context_with_libraries"] = budgets.context_since(before)
    told["is_expandable"] = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    return told


def versions(device: str) -> dict[str, Any]:
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def attention(device: str) -> dict[str, Any]:
    """Return, by dtype, the kernel that torch chooses, its time, and whether its backward pass gives the same bits
    twice."""
    found = {}
    with Device(device) as place:
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = torch.randn(3, *SHAPES[device], device=device, dtype=dtype, requires_grad=True)
            choice = SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name

            def passes(q: Any = q, k: Any = k, v: Any = v) -> tuple[torch.Tensor, ...]:
                mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
                return torch.autograd.grad(mixed.sum(), (q, k, v))

            same = all(map(torch.equal, passes(), passes()))
            found[str(dtype)] = {"kernel": choice, "same_bits": same, "seconds": median_seconds(place, passes)}
    return found


def pinning(device: str) -> dict[str, Any]:
    """Seconds to take and page-lock memory as training does, and the kernel's counters in which it shows."""
    found: dict[str, Any] = {}
    for size in PINNED[device]:
        before, started = budgets.process_bytes(), time.perf_counter()
        with Device(device) as place:
            slab = place.room(size, torch.uint8, host=True)
            taken = time.perf_counter() - started
            grown = _grown(before)
            del slab
        found[f"{size // 2**20} MiB"] = {"seconds": taken, "counters": grown}
    return found


def pinned_by_torch(device: str) -> dict[str, Any]:
    """Time pin_memory(), which DeepSpeed and FSDP2 call: 1.5 GiB show whether it takes 2 GiB."""
    before, started = budgets.process_bytes(), time.perf_counter()
    kept = torch.empty(3 * GIB // 2, dtype=torch.uint8, pin_memory=True)
    taken = time.perf_counter() - started
    return {"bytes": kept.nbytes, "seconds": taken, "counters": _grown(before)}


def _grown(before: dict[str, int]) -> dict[str, int]:
    """Return the kernel's counters of this process that have grown by at least a MiB, in MiB."""
    grown = {name: (now - before[name]) // 2**20 for name, now in budgets.process_bytes().items()}
    return {name: size for name, size in grown.items() if size > 0}


def link(device: str) -> dict[str, float]:
    with Device(device) as place:
        return {name: round(rate / 1e9, 2) for name, rate in copies(place).items()}


def launches(device: str) -> dict[str, float]:
    """Return the seconds that the host takes to queue a small kernel."""
    x = torch.zeros(64, device=device)
    x.add_(1)
    started = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(1)
    return {"seconds": (time.perf_counter() - started) / LAUNCHES}


def messages(device: str) -> dict[str, Any]:
    """Make a group of one rank, as the engines need it."""
    started = time.perf_counter()
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for place in dict.fromkeys(("cpu", device)):
        dist.all_reduce(torch.ones(1, device=place))
    dist.destroy_process_group()
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "not set")
    return {"seconds": time.perf_counter() - started, "NCCL_SOCKET_IFNAME": interface}


FACTS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {  # each with the devices that have it
    "memory": (memory, ("cuda",)),
    "versions": (versions, ("cpu", "cuda")),
    "attention": (attention, ("cpu", "cuda")),
    "link_gb_per_second": (link, ("cpu", "cuda")),
    "launches": (launches, ("cpu", "cuda")),
    "pinning": (pinning, ("cpu", "cuda")),
    "pinned_by_torch": (pinned_by_torch, ("cuda",)),
    "messages": (messages, ("cpu", "cuda")),
}


def lines(found: dict[str, Any]) -> list[str]:
    """Return each fact as a line, for people."""
    return [f"{name:20}{_text(value)}" for name, value in found.items()]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda")
def main(file: Path, device: str) -> None:
    found: dict[str, Any] = {"machine": machine.facts()}
    for name, (measure, devices) in FACTS.items():
        if device in devices:
            try:
                found[name] = measure(device)
            except Exception as error:  # any: a driver's, a library's; it is the fact
                found[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            write_whole(file, json.dumps(found, indent=1))
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
