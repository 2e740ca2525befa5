"""The device `sim`: a second memory on a CPU. The budgets of both memories are enforced, so machines without a GPU can
try the training of models that are larger than a device's memory.

sim.cpp implements the device. The system's compiler compiles it once, into .venv/sim; the library's file name contains
a hash of the source and of torch's version. Without a compiler, memory_account.py counts the same bytes in Python. A
process has at most one sim, which must be started before any tensor is made. The start imports torch.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import types
from pathlib import Path
from typing import Any

from harness.base.checkout import ROOT
from harness.core.job import Budget
from harness.core.method import Unavailable
from harness.core.native_build import Library
from harness.devices import machine

STAT_NAMES = [
    f"{memory}_{count}" for memory in ("device", "host", "pinned") for count in ("allocated", "peak")
]
UNLIMITED_BYTES = 2**63  # bytes

started: Any = None  # this process's device sim, a Compiled or a Tracker; None before start() is called


@functools.cache
def sim_library() -> Library:
    """Return the shared library of the device, which may not be compiled yet."""
    sources = tuple(Path(__file__).with_name(name) for name in ("sim.cpp", "sim.h"))
    return Library("the device sim", 20, ROOT / ".venv" / "sim", sources, (str(machine.software()["torch"]),))


def is_built() -> bool:
    return sim_library().is_built


def to_build() -> str | None:
    """Describe for people what build() would compile; None if sim is compiled already or there is no compiler."""
    return sim_library().to_build()


def build() -> None:
    """Compile the device's library. Raises Unavailable if there is no compiler, or if compiling fails."""
    torch = importlib.util.find_spec("torch")
    assert torch and torch.origin
    root = Path(torch.origin).parent
    sim_library().build(
        "-std=c++20", "-O1", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"
    )


class Compiled:
    """The compiled device of sim.cpp. Making a Compiled registers and starts `sim` as a device of this process's
    torch. Budgets are in bytes; None: no limit."""

    def __init__(self, budget: Budget, pinned_bytes: int | None) -> None:
        import torch

        torch.utils.rename_privateuse1_backend("sim")
        self.library = ctypes.CDLL(str(sim_library().path))
        limits = (
            ctypes.c_size_t(size or UNLIMITED_BYTES)
            for size in (budget.device_bytes, budget.host_bytes, pinned_bytes)
        )
        self.library.sim_start(*limits, ctypes.c_double(budget.link_bytes_per_second or 0.0))
        self.reset_peaks, self.lift = self.library.sim_reset_peaks, self.library.sim_lift
        torch._register_device_module("sim", _sim_module(self))

    def stats(self) -> dict[str, int]:
        """Return the bytes in use and the peak bytes of each memory: device, host (page-locked memory included), and
        pinned (page-locked memory alone)."""
        numbers = (ctypes.c_size_t * len(STAT_NAMES))()
        self.library.sim_stats(numbers)
        return dict(zip(STAT_NAMES, numbers, strict=True))


def start(budget: Budget, pinned_bytes: int | None = None) -> dict[str, str]:
    """Make `sim` a device of this process's torch. Return, for each memory, the mechanism that enforces its budget.

    A memory without a budget has no limit. If the budget has a rate of the link, copies take the time that this rate
    gives; if not, they take no simulated time. From this call on, torch's allocations are counted, and an allocation
    beyond a budget raises torch.OutOfMemoryError. Raises Unavailable for a rate of the link if sim is not compiled.
    """
    global started
    if is_built():
        started, mechanism = Compiled(budget, pinned_bytes), "sim's allocators"
    elif budget.link_bytes_per_second:
        raise Unavailable("--link needs the compiled device sim: try apt-get install g++, then the same call")
    else:
        from harness.devices.memory_account import Tracker

        started, mechanism = Tracker(budget.device_bytes, budget.host_bytes), "sim's account in Python"
        started.__enter__()
    return {"device": mechanism, "host": f"{mechanism}: tensors alone"}


def peaks() -> dict[str, int]:
    """Return the peak bytes of sim's memories by their names in a record; empty before the device is started."""
    names = {"device_allocated": "device_peak", "host_accounted": "host_peak", "host_pinned": "pinned_peak"}
    return {name: started.stats()[stat] for name, stat in names.items()} if started else {}


def _sim_module(sim: Compiled) -> types.ModuleType:
    """Return the module torch.sim, which has the functions of a device that torch and the engines call."""
    import torch

    module: Any = types.ModuleType("torch.sim")
    module.Stream, module.Event = (
        functools.partial(torch.Stream, device="sim"),
        functools.partial(torch.Event, "sim"),
    )
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    module.is_initialized, module.set_device = lambda: True, lambda device: None
    device_type = torch._C._autograd.DeviceType.PrivateUse1.value
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=0, device_type=device_type
    )
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.stream = lambda stream: stream  # a stream is its own context manager
    module.synchronize = lambda device=None: torch.accelerator.synchronize()
    module.memory_allocated = lambda device=None: sim.stats()["device_allocated"]
    module.max_memory_allocated = lambda device=None: sim.stats()["device_peak"]
    module.mem_get_info = lambda device=None: torch.accelerator.get_memory_info()
    # The next functions have nothing to do, because sim draws random numbers and computes as the CPU does.
    module.manual_seed_all, module._is_in_bad_fork = lambda seed: None, lambda: False
    module.get_amp_supported_dtype = list
    return module


if __name__ == "__main__":
    build()
