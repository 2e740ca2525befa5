"""Facts of this machine and its software, and its measured rates. Only tf32_settings() imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import psutil

from harness.base import cgroup
from harness.base.checkout import ROOT
from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.base.whole_file import write_whole
from harness.core import cpu_cores
from harness.core.job import Job, Workload
from harness.core.rates import Rates

# this machine's measured rates, written by `doctor --calibrate`
CALIBRATION = ROOT / "results" / "calibration.json"
# Environment variables that change which kernels the same code runs, or how fast they are.
KERNEL_VARIABLES_TEXT = """
OMP_NUM_THREADS OMP_THREAD_LIMIT OMP_DYNAMIC OMP_WAIT_POLICY OMP_PROC_BIND OMP_PLACES OMP_SCHEDULE GOMP_CPU_AFFINITY
GOMP_SPINCOUNT KMP_AFFINITY KMP_BLOCKTIME KMP_HW_SUBSET KMP_LIBRARY MKL_NUM_THREADS MKL_DOMAIN_NUM_THREADS MKL_DYNAMIC
MKL_THREADING_LAYER MKL_CBWR MKL_ENABLE_INSTRUCTIONS OPENBLAS_NUM_THREADS ATEN_CPU_CAPABILITY ONEDNN_MAX_CPU_ISA
DNNL_MAX_CPU_ISA ONEDNN_DEFAULT_FPMATH_MODE DNNL_DEFAULT_FPMATH_MODE THP_MEM_ALLOC_ENABLE LD_PRELOAD GLIBC_TUNABLES
MALLOC_ARENA_MAX MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ MALLOC_CONF TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE
NVIDIA_TF32_OVERRIDE CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
TORCH_BLAS_PREFER_CUBLASLT TORCH_LINALG_PREFER_CUSOLVER DISABLE_ADDMM_CUDA_LT TORCH_CUDNN_V8_API_DISABLED
PYTORCH_TUNABLEOP_ENABLED PYTORCH_TUNABLEOP_TUNING PYTORCH_NO_CUDA_MEMORY_CACHING CUDA_LAUNCH_BLOCKING
CUDA_DEVICE_MAX_CONNECTIONS NCCL_ALGO NCCL_PROTO NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_MAX_NCHANNELS
NCCL_MIN_NCHANNELS
"""
KERNEL_VARIABLES = tuple(KERNEL_VARIABLES_TEXT.split())
# Environment variables whose value 1 makes CUDA's libraries or torch compute matrix products of fp32 in TF32.
TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
PACKAGES = ("torch", "numpy", "deepspeed", "megatron-core")


@functools.cache
def facts() -> JsonObject:
    """Return the machine's facts by name: its CPU, the cores and the memory that this process may use, its operating
    system, and its first GPU and driver."""
    return {
        "cpu": _cpu_name(),
        "cores": cpu_cores.available_cores(),
        **affinity(),
        "host_bytes": host_bytes(),
        "os": platform.platform(),
        **gpu(),
    }


def affinity() -> dict[str, str]:
    """Return the numbers of the cores that this process may use, as {"affinity": "0,2-3"}; empty if it may use all
    cores. Times depend on which cores: two may share a physical core, and some cores may be slower than others."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not cores or len(cores) == os.cpu_count():
        return {}
    runs = zip(
        sorted(cores - {core + 1 for core in cores}),
        sorted(cores - {core - 1 for core in cores}),
        strict=True,
    )
    return {"affinity": ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs)}


def kernel_environment() -> dict[str, str]:
    """Return the caller's values of KERNEL_VARIABLES, as {"environment": "OMP_NUM_THREADS=2"}; empty if none of these
    variables is set."""
    settings = " ".join(f"{name}={os.environ[name]}" for name in KERNEL_VARIABLES if os.environ.get(name))
    return {"environment": settings} if settings else {}


@functools.cache
def software() -> JsonObject:
    """Return the versions of Python and of PACKAGES (None: not installed), and this checkout's commit. A + after the
    commit says that files differ from it; None says that git does not tell the commit."""
    versions = {name: _package_version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **versions, "commit": _commit()}


def compared_facts() -> dict[str, str]:
    """Return the facts that must be equal for two measurements to be comparable. A job's key contains these facts."""
    names = ("cpu", "cores", "gpu")
    compared = {
        **{name: str(facts().get(name)) for name in names},
        **{name: str(software()[name]) for name in PACKAGES},
    }
    compared["python"] = software()["python"].rpartition(".")[0]
    compared |= affinity() | kernel_environment()
    # Settings of the GPU's allocator change fragmentation, and so the largest model that fits.
    return {**compared, "allocator": allocator_settings()} if gpu() and allocator_settings() else compared


def host_bytes() -> int:
    """Return the bytes of host memory that this process may use: the machine's memory or, if lower, the limit of the
    process's memory groups."""
    group = cgroup.current_group()
    limit = group.limit_bytes() if group else None
    return min(psutil.virtual_memory().total, limit or 2**63)


@functools.cache
def gpu() -> JsonObject:
    """Return the name, memory in bytes, UUID and driver version of the first GPU that this process may use; empty if
    there is no GPU."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        handle = _gpu_handle()
        return {
            "gpu": pynvml.nvmlDeviceGetName(handle),
            "gpu_bytes": _total_bytes(handle),
            "gpu_uuid": pynvml.nvmlDeviceGetUUID(handle),
            "driver": pynvml.nvmlSystemGetDriverVersion(),
        }
    return {}


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, each by an index or a name that CUDA_VISIBLE_DEVICES accepts."""
    import pynvml

    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name.strip() for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return []


def num_gpus(job: Job) -> int:
    """Return the number of GPUs that the job uses on CUDA: one for each of its ranks or devices."""
    return max(job.world_size, job.options.get("num_devices", 1))


def gpu_uuids(job: Job) -> list[str]:
    """Return the UUIDs of the GPUs that the job uses on CUDA, which are the first visible GPUs; instead of the UUID of
    a GPU that the driver does not know, return its index in CUDA_VISIBLE_DEVICES or, if it has none, "0"."""
    import pynvml

    def uuid(name: str) -> str:
        with contextlib.suppress(pynvml.NVMLError):
            return str(pynvml.nvmlDeviceGetUUID(_gpu_handle(name)))
        return name if name.isdigit() else "0"

    number = num_gpus(job)
    return [uuid(name) for name in visible_gpus()[:number] or map(str, range(number))]


def gpu_free_bytes() -> int | None:
    """Return the free bytes of the first GPU that this process may use; None if the driver does not tell them. No CUDA
    context is made, because a context would itself take memory."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetMemoryInfo(_gpu_handle()).free)
    return None


def surroundings(device: str, num_gpus: int = 1) -> JsonObject:
    """Return what runs on the machine beside this job when the job begins: the load average and, if `device` is cuda,
    the other processes on the first `num_gpus` visible GPUs, each with its device bytes and its GPU."""
    import pynvml

    beside: JsonObject = {"load_average": round(psutil.getloadavg()[0], 2)}
    for name in visible_gpus()[:num_gpus] if device == "cuda" else ():
        with contextlib.suppress(pynvml.NVMLError):
            others = pynvml.nvmlDeviceGetComputeRunningProcesses(_gpu_handle(name))
            beside.setdefault("foreign_processes", []).extend(
                {"pid": other.pid, "device_bytes": other.usedGpuMemory, "gpu": name} for other in others
            )
    return beside


def has_bf16() -> bool:
    """True if the first GPU that this process may use computes in bf16: if its compute capability is 8.0 or higher. If
    the driver does not tell the capability, return True."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        return bool(pynvml.nvmlDeviceGetCudaComputeCapability(_gpu_handle())[0] >= 8)
    return True


def allocator_settings() -> str:
    """Return, as text, the environment variable that configures torch's caching allocator, under its new and its old
    name; empty if neither name is set."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return " ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


def _gpu_handle(name: str | None = None) -> Any:
    """Return NVML's handle of the GPU that CUDA_VISIBLE_DEVICES names so: by its index, by its UUID, or by the start of
    its UUID. None: CUDA's device 0, the first device in this variable, or GPU 0 if the variable is not set. Raises
    NVMLError if there is no such GPU."""
    import pynvml

    pynvml.nvmlInit()
    if name is None:
        name = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    if name.startswith("MIG"):
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        if name and pynvml.nvmlDeviceGetUUID(handle).startswith(name):
            return handle
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)  # no GPU is visible


def _total_bytes(handle: Any) -> int:
    """Return the total bytes of a GPU as CUDA counts them: without the bytes that the driver reserves. An older driver
    does not report the reserved bytes; then the total includes them."""
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:  # an older driver
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return int(memory.total - memory.reserved)


def devices() -> list[str]:
    """Return the types of devices on which this machine can train, the best first."""
    return ["cuda", "cpu", "sim"] if gpu() and not cuda_refused() else ["cpu", "sim"]


def cuda_refused() -> str:
    """Return, in one line with a remedy, why the installed torch can use no GPU here: it is a CPU build, or it is built
    for a newer major version of CUDA than the driver supports (within a major version an older driver suffices). Return
    an empty text if there is no such reason, or if one of the versions is not known."""
    import pynvml

    if str(software()["torch"]).endswith("+cpu"):
        return (
            "torch is its CPU build: leave out the index or folder with +cpu builds that .venv/bin/python -m pip config"
            " list or PIP_EXTRA_INDEX_URL names, remove .venv, and ./run.sh again"
        )
    built = _cuda_of_torch()
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
        if built and version // 1000 < built:
            return (
                f"torch is built for CUDA {built}, the driver supports {version // 1000}.{version % 1000 // 10}: update"
                f" the driver until nvidia-smi tells CUDA {built}.0 or newer, or take a torch for CUDA"
                f" {version // 1000} (docs/places.md, Without a set-up)"
            )
    return ""


def _cuda_of_torch() -> int | None:
    """Return the major version of CUDA for which the installed torch is built; None if it is not known. torch's own
    index tells it in the version (+cu130). PyPI's builds do not, but they require NVIDIA's packages for this version,
    such as nvidia-nccl-cu13."""
    if local_version := re.search(r"\+cu(\d+)\d\b", str(software()["torch"])):
        return int(local_version[1])
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for needed in importlib.metadata.requires("torch") or ():
            if named := re.match(r"nvidia-[a-z-]+-cu(\d+)\b", needed):
                return int(named[1])
    return None


def rates(device: str, workload: Workload) -> Rates | None:
    """Return the rates of the calibration whose size is nearest to this workload's, on this device and in this dtype;
    None if there is no such calibration. The device sim has the CPU's rates."""
    entry = _calibration(device, workload)
    return Rates(**entry["rates"]) if entry else None


def caution(device: str, workload: Workload) -> str:
    """Return a warning for people if other work ran while rates() were measured, because the rates are then too low;
    else an empty text."""
    entry = _calibration(device, workload)
    if entry is None or not was_busy(entry):
        return ""
    load, cores = f"{entry['load_average']:.3g}", counted(facts()["cores"], "core")
    return (
        f"caution: this machine's rates were measured at a load of {load} on {cores}, so times are foretold too"
        " long: repeat ./run.sh doctor --calibrate when nothing else runs"
    )


def was_busy(entry: JsonObject) -> bool:
    """True if other work ran during this calibration: if its load average is above the number of cores."""
    return (entry.get("load_average") or 0) > facts()["cores"]


def _calibration(device: str, workload: Workload) -> JsonObject | None:
    kind = "cuda" if device == "cuda" else "cpu"
    entries = [
        entry for entry in calibrations() if (entry["device"], entry["dtype"]) == (kind, workload.dtype)
    ]
    return min(
        entries, key=lambda entry: abs(math.log(entry["forward_flops"] / workload.layer_flops)), default=None
    )


def calibrations() -> list[JsonObject]:
    """Return the entries of CALIBRATION that have all rates; an empty list if the file is missing or was written on a
    machine with other facts."""
    try:
        data = json.loads(CALIBRATION.read_text())
        names = {item.name for item in dataclasses.fields(Rates)}
        entries = [entry for entry in data["entries"] if set(entry["rates"]) == names]
        return entries if data["machine"] == _calibrated_facts() else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


def keep_calibration(entry: JsonObject) -> None:
    """Add an entry to CALIBRATION. An older entry of the same device, dtype and size is replaced."""
    names = ("device", "dtype", "forward_flops")
    others = [old for old in calibrations() if any(old[name] != entry[name] for name in names)]
    text = json.dumps({"machine": _calibrated_facts(), "entries": [*others, entry]}, indent=1)
    CALIBRATION.parent.mkdir(parents=True, exist_ok=True)
    write_whole(CALIBRATION, text)


def _calibrated_facts() -> JsonObject:
    return {name: facts().get(name) for name in ("cpu", "cores", "gpu")} | {"torch": software()["torch"]}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _package_version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return None


def tf32_settings() -> list[str]:
    """Return the settings that make this process compute matrix products on a GPU in TF32; empty if there are none."""
    import torch

    settings = [f"{name}=1" for name in TF32_VARIABLES if os.environ.get(name) == "1"]
    products: Any = torch.backends.cuda.matmul
    # torch before 2.9, which a rented machine may have, knows only the switch allow_tf32.
    name, tf32 = ("fp32_precision", "tf32") if hasattr(products, "fp32_precision") else ("allow_tf32", True)
    if getattr(products, name) == tf32:
        settings.append(f"torch.backends.cuda.matmul.{name}")
    return settings


def refuse_tf32(device: str, dtype: str) -> None:
    """Raise ValueError if the run is in fp32 on a GPU, but this process computes in TF32."""
    if (device, dtype) == ("cuda", "fp32") and (settings := tf32_settings()):
        raise ValueError(
            f"expected matrix products in fp32 for --dtype fp32, got TF32 by {' and '.join(settings)}; try without this"
            " setting, or --dtype bf16"
        )
