"""Machines by name: the budgets and rates of --machine, from machines.yaml. A new entry of machines.yaml adds a
machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.base.checked_data import NO_OTHER_FIELDS
from harness.base.checkout import ROOT
from harness.base.named_entries import entry, places
from harness.base.registry import Registry
from harness.core.job import GIB, Budget, Room
from harness.core.rates import Rates, of_facts
from harness.devices import cuda_budget, machine

FILE = ROOT / "machines.yaml"
PUBLISHED = "v100-vm"  # the machine of the published runs
EXAMPLE = "v100-vm: {device_memory: 32GiB}"
NAME = re.compile("[A-Za-z0-9][A-Za-z0-9 ._-]{0,59}")
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
LEAST_END = 4  # fewest characters of a name's ending that may stand for the whole name, such as 4090


# Assumed shares of a datasheet's rates that a step achieves. The published V100 runs had 0.70, 0.55 and 0.73.
ACHIEVED_FLOPS = {"fp32": 0.7, "bf16": 0.5, "fp16": 0.5}
ACHIEVED_MEMORY, ACHIEVED_LINK = 0.7, 0.75
# NCCL sends 370 of the 450 GB/s of NVLink 4, as one of its authors says (GitHub, NVIDIA/nccl-tests, number 212).
ACHIEVED_NVLINK = 0.8
# Assumed for a machine without facts of its disk: an NVMe disk on four lanes of PCIe 3.0, whose peak is 3.9 GB/s.
# Without an assumed rate the disk's rate would count as infinite.
ASSUMED_DISK = {"disk_read_gb_per_second": 3.0, "disk_write_gb_per_second": 2.0}


@dataclass(frozen=True)
class Datasheet:
    """A GPU maker's datasheet: peaks of dense arithmetic, the memory's rate, and the rates, in one direction, of the
    link to the host and of NVLink, if the GPU has NVLink."""

    __pydantic_config__ = NO_OTHER_FIELDS
    memory_gb_per_second: float
    link_gb_per_second: float
    source: str
    fp32_tflops: float
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    nvlink_gb_per_second: float | None = None

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak in this dtype; None if the datasheet has none, because the GPU does not compute in this
        dtype."""
        peak = getattr(self, f"{dtype}_tflops", None)
        return peak and 1e12 * peak

    def facts(self, dtype: str) -> dict[str, Any]:
        nvlink = self.nvlink_gb_per_second
        return {
            **({"exchange_gb_per_second": ACHIEVED_NVLINK * nvlink} if nvlink else {}),
            "gpu_tflops": ACHIEVED_FLOPS.get(dtype, 0.0) * (self.peak_flops(dtype) or 1e12 * self.fp32_tflops) / 1e12,
            "device_memory_gb_per_second": ACHIEVED_MEMORY * self.memory_gb_per_second,
            "link_gb_per_second": ACHIEVED_LINK * self.link_gb_per_second,
        }


@dataclass(frozen=True)
class Machine:
    """An entry of machines.yaml: sizes with their units, measured facts, and a datasheet for the rates that no fact
    gives."""

    __pydantic_config__ = NO_OTHER_FIELDS
    about: str = ""
    device_memory: str | float | None = None
    host_memory: str | float | None = None
    disk_memory: str | float | None = None
    facts: dict[str, Any] | None = field(default_factory=dict)
    datasheet: Datasheet | None = None

    def rates(self, dtype: str) -> Rates | None:
        """Return the rates for training in this dtype; the fact gpu_tflops counts only if it was measured in this
        dtype."""
        facts = ASSUMED_DISK | (self.facts or {})
        if self.datasheet is None:
            return of_facts(facts)
        if not str(facts.get("precision", dtype)).startswith(dtype):
            facts.pop("gpu_tflops", None)
        return of_facts(self.datasheet.facts(dtype) | facts)

    @property
    def device_bytes(self) -> int | None:
        """Return the GPU's bytes without the driver's context."""
        return None if self.device_memory is None else size_bytes(str(self.device_memory))

    @property
    def room(self) -> Room:
        """Return the bytes that plans may fill; a simulated device has as many. The GPU's bytes leave out the reserve
        for memory that plans do not count. Rates are for the dtype of the fact `precision`, else fp32."""
        sizes = {f"{memory}_bytes": getattr(self, f"{memory}_memory") for memory in ("host", "disk")}
        given: dict[str, Any] = {name: size_bytes(str(size)) for name, size in sizes.items() if size is not None}
        if self.device_bytes is not None:
            least = cuda_budget.budget_bytes(cuda_budget.LEAST_TENSOR_BYTES, context_bytes=0)
            if self.device_bytes < least:
                raise ValueError(
                    f"device_memory: expected at least {-(-least // 2**20)}MiB for a GPU, got {self.device_memory};"
                    " for a simulated device leave it out, and try --device-memory"
                )
            given["device_bytes"] = cuda_budget.tensor_bytes(self.device_bytes, context_bytes=0)
        precision = str((self.facts or {}).get("precision", "fp32"))[:4]
        return Room(**given, rates=self.rates(precision))

    def budget_on(self, device: str, dtype: str | None = None) -> Budget:
        """Return the budget that leaves this machine's room on a device, with rates for a dtype. On a GPU the budget
        includes the context and the reserve; if this machine's own card is a little smaller, the budget is all of that
        card's bytes."""
        room = self.room
        rates = self.rates(dtype) if dtype else room.rates
        budget = Budget(room.device_bytes, room.host_bytes, room.disk_bytes, rates=rates)
        if device != "cuda" or self.device_bytes is None:
            return budget
        whole, there = self.device_bytes + cuda_budget.CONTEXT_BYTES, machine.gpu().get("gpu_bytes", 0)
        return replace(budget, device_bytes=there if self.device_bytes <= there < whole else whole)

    def __post_init__(self) -> None:
        self.room  # noqa: B018  raises ValueError where a size is wrong


class MachineRegistry(Registry):
    def add(self, places: Iterable[Path]) -> None:
        """Add files of machines. Raises ValueError if an entry is wrong, because tables, figures and reports read every
        machine."""
        files = [file.absolute() for file in places]
        for file in files:
            if not file.exists():
                told = f"expected a file of machines, got {file}; try --machines FILE"
                raise ValueError(f"{told}, with entries such as {EXAMPLE}")
        for name in names(*self.places, *files):
            load(name, *self.places, *files)
        super().add(files)


REGISTRY = MachineRegistry("machine", FILE)


def names(*files: Path) -> list[str]:
    """Return the names in these files, by default in all known files."""
    found = sorted(places(files or REGISTRY.places, EXAMPLE))
    for name in found:
        if not NAME.fullmatch(name):  # names appear in file names of figures
            raise ValueError(f"expected a name of letters, digits, ._- and spaces, got {name!r:.80}; try my-machine")
    return found


def load(name: str, *files: Path) -> Machine:
    """Return the machine of this name. Raises ValueError that names the nearest machine, or the entry's wrong
    fields."""
    return entry(Machine, "machine", name, files or REGISTRY.places, EXAMPLE)


def plain(name: str) -> str:
    """Return a GPU's name in lower case with letters and digits alone: the form in which names of machines.yaml, of
    people and of the driver agree."""
    return "".join(character for character in name.lower() if character.isalnum())


def spelled(name: str) -> str:
    """Return the name of the entry that people mean by a name such as RTX 4090, 4090, NVIDIA H100, a100-80gb. A name
    that no entry matches, or several, is returned unchanged."""
    word = plain(name).removeprefix("nvidia").removeprefix("geforce").removesuffix("gb")
    same = [each for each in names() if plain(each) == word]
    ends = [each for each in names() if plain(each).endswith(word)] if len(word) >= LEAST_END else []
    found = [name] if name in names() else same or ends
    return found[0] if len(found) == 1 else name


def of_gpu(gpu: str | None) -> str | None:
    """Return the machine's name by the name that the driver gives its GPU; None if no machine has that GPU."""
    return max((name for name in names() if plain(name) in plain(gpu or "")), key=len, default=None)


def source(name: str) -> str:
    """Return the entry's name and file as text for people."""
    file = places(REGISTRY.places, EXAMPLE)[name]
    return f"{name} in {file.name if file == FILE else file}"


def words(name: str) -> str:
    """Return the options of a call that name the machine and, if a file given by the caller defines it, that file."""
    file = places(REGISTRY.places, EXAMPLE).get(name)
    return shlex.join(["--machine", name, *(["--machines", str(file)] if file in REGISTRY.added else [])])


def size_bytes(text: str) -> int:
    """Return the bytes of a size such as 32GiB; the unit's case does not matter. Raises ValueError for other text."""
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    match = re.fullmatch(rf"(\d{{1,9}}(?:\.\d{{1,30}})?) ?({'|'.join(units)})", text.lower())
    size = int(float(match[1]) * units[match[2]]) if match else 0
    if not size:
        raise ValueError(f"expected a positive size with {', '.join(UNITS)}, got {text!r:.80}; try 32GiB")
    return size
