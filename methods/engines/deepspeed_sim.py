"""DeepSpeed's accelerator for sim: the CPU's kernels, but a limited memory.

DeepSpeed 0.19.8 flattens tensors on the device or on the host, depending on the device's memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from harness.devices.streams import require_device

DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class SimAccelerator(CPU_Accelerator):
    """sim as a device with streams of its own. torch.sim has the shape of torch.cuda."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "sim"
        self.module = torch.get_device_module("sim")

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return "sim" if device_index is None else f"sim:{device_index}"

    def current_device_name(self) -> str:
        return "sim:0"

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def device(self, device_index: int | None = None) -> Any:
        return torch.device("sim", 0)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "sim"

    def synchronize(self, device_index: int | None = None) -> None:
        self.module.synchronize()

    @property
    def Stream(self) -> Any:
        return self.module.Stream

    @property
    def Event(self) -> Any:
        return self.module.Event

    def stream(self, stream: Any) -> Any:
        return self.module.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return self.module.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return self.module.default_stream()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self.module.memory_allocated()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self.module.max_memory_allocated()

    memory_cached = memory_reserved = memory_allocated
    max_memory_cached = max_memory_reserved = max_memory_allocated

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return torch.accelerator.memory_stats()

    def total_memory(self, device_index: int | None = None) -> int:
        return self.module.mem_get_info()[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return self.module.mem_get_info()[0]


def _constructor(dtype: torch.dtype) -> property:
    return property(lambda self: partial(torch.tensor, dtype=dtype, device="sim"))


for name, dtype in DTYPES.items():
    setattr(SimAccelerator, name, _constructor(dtype))


def use() -> None:
    """Make DeepSpeed run on sim in this process. Raises Unavailable if sim is not compiled."""
    require_device("sim", "DeepSpeed")
    set_accelerator(SimAccelerator())
