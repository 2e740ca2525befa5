"""A GPU's memory as NVML and torch.cuda tell of it: strict, so what it does not know is an AttributeError."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from harness.devices import machine

MIB = 2**20


class Square:
    """What torch.ones() makes on it."""

    def __matmul__(self, other: Square) -> Square:
        return self


class FakeGpu:
    """One GPU. NVML's total includes the driver's own part, CUDA's does not; the first kernel makes the context."""

    def __init__(
        self, total_bytes: int, driver_bytes: int, context_bytes: int, *, has_v2: bool = True
    ) -> None:
        self.total_bytes, self.driver_bytes, self.context_bytes = total_bytes, driver_bytes, context_bytes
        self.has_v2, self.has_context = has_v2, False
        self.reserved_bytes = 0  # by torch's allocator
        self.num_retries = 0
        self.fraction: float | None = None

    def memory_info(self, handle: object, version: int | None = None) -> SimpleNamespace:
        if version is not None and not self.has_v2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        used = self.reserved_bytes + (self.context_bytes if self.has_context else 0)
        found = SimpleNamespace(total=self.total_bytes, free=self.total_bytes - self.driver_bytes - used)
        if version is not None:
            found.reserved = self.driver_bytes
        return found

    def ones(self, rows: int, columns: int, device: str) -> Square:
        assert device == "cuda"
        self.has_context = True
        self.reserved_bytes += 2 * MIB
        return Square()

    def cap(self, fraction: float, index: int | None = None) -> None:
        assert 0 <= fraction <= 1
        self.fraction = fraction

    def forget_retries(self) -> None:
        self.num_retries = 0

    @property
    def cap_bytes(self) -> float:
        assert self.fraction is not None, "no cap was set"
        return self.fraction * (self.total_bytes - self.driver_bytes)

    def mem_get_info(self, index: int | None = None) -> tuple[int, int]:
        return self.memory_info(None).free, self.total_bytes - self.driver_bytes

    def install(self, patch: pytest.MonkeyPatch) -> FakeGpu:
        """For NVML, and for code that imports torch from now on."""
        self.install_nvml(patch)
        patch.setitem(
            sys.modules, "torch", SimpleNamespace(ones=self.ones, cuda=SimpleNamespace(**self.functions()))
        )
        return self

    def install_nvml(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(pynvml, "nvmlInit", lambda: None)
        patch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
        patch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        patch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "a GPU")
        patch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: "GPU-1")
        patch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "1")
        patch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", self.memory_info)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setattr(machine, "gpu", machine.gpu.__wrapped__)  # not the cached answer
        patch.setattr(machine, "facts", machine.facts.__wrapped__)

    def install_functions(self, patch: pytest.MonkeyPatch) -> None:
        """For torch.cuda, which stays the fake one of fake_cuda.py otherwise."""
        for name, function in self.functions().items():
            patch.setattr(sys.modules["torch"].cuda, name, function)

    def functions(self) -> dict[str, Any]:
        """Those of torch.cuda that tell of memory."""
        return {
            "synchronize": lambda device=None: None,
            "mem_get_info": self.mem_get_info,
            "memory_reserved": lambda: self.reserved_bytes,
            "max_memory_reserved": lambda: self.reserved_bytes,
            "max_memory_allocated": lambda: self.reserved_bytes // 2,
            "reset_peak_memory_stats": lambda: None,
            "reset_accumulated_memory_stats": self.forget_retries,
            "memory_snapshot": lambda: [{"is_expandable": True}],
            "memory_stats": lambda: {"num_alloc_retries": self.num_retries},
            "set_per_process_memory_fraction": self.cap,
            "get_per_process_memory_fraction": lambda index=None: (
                1.0 if self.fraction is None else self.fraction
            ),
        }
