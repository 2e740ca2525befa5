"""Facts of this machine and its software, gathered without torch, and what a run may use of it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from harness.method import ROOT
from harness.spec import Budget

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CUDA_CONTEXT_BYTES = 600 * 2**20  # driver and library memory outside torch's allocator: an upper estimate
PACKAGES = ("torch", "numpy", "deepspeed", "megatron-core")


@functools.cache
def facts() -> dict[str, Any]:
    """The machine: CPU, cores this process may use, memory it may use, GPU and driver."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_bytes": host_bytes(),
        "os": platform.platform(),
        **gpu(),
    }


@functools.cache
def software() -> dict[str, Any]:
    """Versions, and the commit of this checkout with a + where files differ from it."""
    found = {name: _version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **found, "commit": _commit()}


def checked() -> dict[str, str]:
    """The facts that make two measurements comparable; part of a job's identity."""
    names = ("cpu", "cores", "gpu")
    return {**{name: str(facts().get(name)) for name in names}, **{name: str(software()[name]) for name in PACKAGES}}


def host_bytes() -> int:
    """Memory this process may use: the container's limit where there is one, else the machine's."""
    limits = [psutil.virtual_memory().total]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
    return min(limits)


@functools.cache
def gpu() -> dict[str, Any]:
    """Name, bytes and driver of the first GPU; empty without one."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "gpu": pynvml.nvmlDeviceGetName(handle),
            "gpu_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
            "driver": pynvml.nvmlSystemGetDriverVersion(),
        }
    except pynvml.NVMLError:
        return {}


def devices() -> list[str]:
    """The device types that can be trained on, best first."""
    has_cuda = bool(gpu()) and not str(software()["torch"]).endswith("+cpu")
    return ["cuda", "cpu", "sim"] if has_cuda else ["cpu", "sim"]


def budget(asked: Budget, device: str) -> Budget:
    """What a run may use: what was asked for, else what there is.

    A CPU has no device memory of its own: without a budget for it, it stays None and shares the host's. The memories of
    sim are what they are said to be: without budgets they have no end.
    """
    device_bytes = asked.device_bytes
    if device_bytes is None and device == "cuda":
        device_bytes = gpu()["gpu_bytes"] - CUDA_CONTEXT_BYTES
    most = asked.host_bytes or (None if device == "sim" else host_bytes())
    return dataclasses.replace(asked, device_bytes=device_bytes, host_bytes=most)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
