"""Measures the facts about a GPU and its host that plans assume, one after another, and writes them to one file.

    .venv/bin/python -m bench.gpu_facts FILE [--device cpu]

If a measurement fails, the file holds the error in place of the fact, and the other facts are still measured.
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
from harness.devices import budgets, machine, process_memory
from harness.devices.streams import Device
from methods.streaming.placement.calibrate import median_seconds

# Shapes of attention's inputs (batch, heads, tokens, head size): the published one, and a small one.
SHAPES = {"cuda": (4, 16, 1024, 128), "cpu": (1, 4, 64, 32)}
PINNED_BYTES = {"cuda": 3 * GIB // 2, "cpu": GIB // 8}  # torch rounds 1.5 GiB up to 2 GiB, a power of two
LAUNCHES = 1000


def memory(device: str) -> dict[str, Any]:
    """Return the bytes of device memory that NVML tells, and the bytes that CUDA tells. Also return the bytes of a CUDA
    context without further libraries, and with the libraries that a layer loads.
    """
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


def products(device: str) -> dict[str, Any]:
    """Return the relative error of an fp32 matrix product, and the settings that ask for TF32. TF32 makes the error a
    thousand times as large.
    """
    a, b = torch.randn(2, 512, 512, device=device)
    exact = a.double() @ b.double()
    return {
        "relative_error": f"{float((a @ b - exact).norm() / exact.norm()):.1e}",
        "tf32_by": machine.tf32_settings(),
    }


def attention(device: str) -> dict[str, Any]:
    """Return by dtype: the attention kernel that torch chooses, its seconds, and whether two backward passes have the
    same bits.
    """
    found = {}
    with Device(device) as place:
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = torch.randn(3, *SHAPES[device], device=device, dtype=dtype, requires_grad=True)
            # with one number everywhere, sums in another order may have the same bits
            slope = torch.randn_like(q)

            def passes(q: Any = q, k: Any = k, v: Any = v, slope: Any = slope) -> tuple[torch.Tensor, ...]:
                mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
                return torch.autograd.grad(mixed, (q, k, v), slope)

            found[str(dtype)] = {
                "kernel": SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True)).name,
                "same_bits": all(map(torch.equal, passes(), passes())),
                "seconds": f"{median_seconds(place, passes):.2e}",
            }
    return found


def pinning(device: str) -> dict[str, Any]:
    """Return the seconds to page-lock memory, and the MiB by which this process then grows in the kernel's counters.
    The memory is page-locked once as this project's training does it, and once as torch does it for DeepSpeed and
    FSDP2.
    """
    size = PINNED_BYTES[device]

    def taken(take: Callable[[], Any]) -> dict[str, Any]:
        before, started = process_memory.process_bytes(), time.perf_counter()
        kept = take()
        found: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 3)}
        grown = {
            name: (now - before.get(name, 0)) // 2**20 for name, now in process_memory.process_bytes().items()
        }
        del kept
        return found | {name: mib for name, mib in grown.items() if mib > 0}

    with Device(device) as place:
        found = {"ours": taken(lambda: place.room(size, torch.uint8, host=True))}
    return {
        **found,
        "torch's": taken(lambda: torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")),
    }


def launches(device: str) -> dict[str, str]:
    """Return the host's seconds to queue a small kernel."""
    x = torch.zeros(64, device=device)
    x.add_(1)
    started = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(1)
    return {"seconds": f"{(time.perf_counter() - started) / LAUNCHES:.1e}"}


def messages(device: str) -> dict[str, Any]:
    """Return the seconds to make a process group of one rank, as engines do, and to sum a number in this group. Also
    return the network interfaces that the environment sets."""
    started = time.perf_counter()
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    for place in dict.fromkeys(("cpu", device)):
        dist.all_reduce(torch.ones(1, device=place))
    dist.destroy_process_group()
    interfaces = {
        name: os.environ.get(name, "not set") for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    }
    return {"seconds": round(time.perf_counter() - started, 3), **interfaces}


FACTS = (memory, versions, products, attention, launches, pinning, messages)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda")
def main(file: Path, device: str) -> None:
    found: dict[str, Any] = {"machine": machine.facts()}
    for measure in FACTS:
        try:
            found[measure.__name__] = measure(device)
        except Exception as error:  # a driver or library may raise any kind of error
            found[measure.__name__] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        write_whole(file, json.dumps(found, indent=1))
    print("\n".join(lines(found)))


def lines(found: dict[str, Any]) -> list[str]:
    """Return one readable line per fact."""
    return [f"{name:12}{json.dumps(value)}" for name, value in found.items()]


if __name__ == "__main__":
    main()
