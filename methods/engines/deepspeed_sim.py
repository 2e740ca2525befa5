"""DeepSpeed's accelerator class for the simulated device, which has the CPU's kernels but limited memory.

DeepSpeed 0.19.8 asks for the device's memory, to decide if it flattens tensors on the device or on the host.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """The simulated device as DeepSpeed sees it, with streams. torch.sim has the functions of torch.cuda."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "sim"
        self.module = torch.get_device_module("sim")

    def device_name(self, device_index: int | None = None) -> str:
        return "sim" if device_index is None else f"sim:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device("sim", 0)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "sim"

    @property
    def Stream(self) -> Any:
        return self.module.Stream

    @property
    def Event(self) -> Any:
        return self.module.Event

    def stream(self, stream: Any) -> Any:
        return self.module.stream(stream)

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return torch.accelerator.memory_stats()

    def total_memory(self, device_index: int | None = None) -> int:
        return self.module.mem_get_info()[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return self.module.mem_get_info()[0]


def _module_function(name: str) -> Callable[..., Any]:
    """Return a method that calls the function `name` of torch.sim, whatever device it is asked about."""
    return lambda self, device_index=None: getattr(self.module, name)()


def _constructor(dtype: torch.dtype) -> property:
    return property(lambda self: partial(torch.tensor, dtype=dtype, device="sim"))


CONSTANT_ANSWERS = {
    "is_synchronized_device": False,
    "current_device_name": "sim:0",
    "current_device": 0,
    "device_count": 1,
}
MODULE_FUNCTIONS = {name: name for name in ("synchronize", "current_stream", "default_stream")}
for name in ("memory_allocated", "max_memory_allocated"):
    MODULE_FUNCTIONS |= dict.fromkeys(
        (name, name.replace("allocated", "reserved"), name.replace("allocated", "cached")), name
    )
for name, answer in CONSTANT_ANSWERS.items():
    setattr(SimAccelerator, name, lambda self, answer=answer: answer)
for name, function_name in MODULE_FUNCTIONS.items():
    setattr(SimAccelerator, name, _module_function(function_name))
for name, dtype in DTYPES.items():
    setattr(SimAccelerator, name, _constructor(dtype))


def use_sim() -> None:
    """Make DeepSpeed use the simulated device in this process. Raises Unavailable if that device is not compiled."""
    require_device("sim", "DeepSpeed")
    set_accelerator(SimAccelerator())
