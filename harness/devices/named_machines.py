"""The machines that --machine takes by name. machines.yaml gives their memories and rates; to add a machine, add an
entry to machines.yaml."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.base.checkout import ROOT
from harness.base.foreign_file import NO_OTHER_FIELDS
from harness.base.json_object import JsonObject
from harness.base.registry import Registry, files_by_entry, read_entry
from harness.core.job import GIB, Budget, Room
from harness.core.rates import Rates, rates_from_facts
from harness.devices import cuda_budget, machine

FILE = ROOT / "machines.yaml"
PUBLISHED = "v100-vm"  # the machine of the published runs
EXAMPLE = "v100-vm: {device_memory: 32GiB}"
NAME_PATTERN = re.compile("[A-Za-z0-9][A-Za-z0-9 ._-]{0,59}")
UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": GIB,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
# an ending of a name, such as 4090, may stand for the whole name if it has at least this many characters
LEAST_ENDING_CHARACTERS = 4


# Shares of a datasheet's rates that a step is assumed to achieve. The published runs on a V100 achieved 0.70 of the
# FLOPs in fp32, 0.55 of the memory's rate and 0.73 of the link's.
ACHIEVED_FLOPS = {"fp32": 0.7, "bf16": 0.5, "fp16": 0.5}
ACHIEVED_MEMORY, ACHIEVED_LINK = 0.7, 0.75
# NCCL sends 370 of the 450 GB/s of NVLink 4, as one of its authors says (GitHub, NVIDIA/nccl-tests, number 212).
ACHIEVED_NVLINK = 0.8
# For a machine without facts of its disk the rates of an NVMe disk on four lanes of PCIe 3.0 are assumed (peak: 3.9
# GB/s), because an unknown rate would count as infinite.
ASSUMED_DISK = {"disk_read_gb_per_second": 3.0, "disk_write_gb_per_second": 2.0}


@dataclass(frozen=True)
class Datasheet:
    """The rates in a GPU maker's datasheet: the peak of dense arithmetic in each dtype, the memory's rate, and the
    rates of the link to the host and of NVLink, in one direction each. None: the GPU does not compute in this dtype, or
    has no NVLink."""

    __pydantic_config__ = NO_OTHER_FIELDS
    memory_gb_per_second: float
    link_gb_per_second: float
    source: str
    fp32_tflops: float
    bf16_tflops: float | None = None
    fp16_tflops: float | None = None
    nvlink_gb_per_second: float | None = None

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak in this dtype in FLOPs per second; None if the GPU does not compute in this dtype."""
        peak = getattr(self, f"{dtype}_tflops", None)
        return peak and 1e12 * peak

    def facts(self, dtype: str) -> JsonObject:
        nvlink = self.nvlink_gb_per_second
        return {
            **({"exchange_gb_per_second": ACHIEVED_NVLINK * nvlink} if nvlink else {}),
            "gpu_tflops": ACHIEVED_FLOPS.get(dtype, 0.0)
            * (self.peak_flops(dtype) or 1e12 * self.fp32_tflops)
            / 1e12,
            "device_memory_gb_per_second": ACHIEVED_MEMORY * self.memory_gb_per_second,
            "link_gb_per_second": ACHIEVED_LINK * self.link_gb_per_second,
        }


@dataclass(frozen=True)
class Machine:
    """An entry of machines.yaml: sizes of memories with their units (None: no limit), measured facts, and a datasheet.
    A measured fact takes precedence over the datasheet."""

    __pydantic_config__ = NO_OTHER_FIELDS
    about: str = ""
    device_memory: str | float | None = None
    host_memory: str | float | None = None
    disk_memory: str | float | None = None
    facts: JsonObject | None = field(default_factory=dict)
    datasheet: Datasheet | None = None

    def rates(self, dtype: str) -> Rates | None:
        """Return the machine's rates for training in this dtype; None if a fact of rates.NEEDED_FACTS is unknown. If
        there is a datasheet, the fact gpu_tflops is ignored unless it was measured in this dtype."""
        facts = ASSUMED_DISK | (self.facts or {})
        if self.datasheet is None:
            return rates_from_facts(facts)
        if not str(facts.get("precision", dtype)).startswith(dtype):
            facts.pop("gpu_tflops", None)
        return rates_from_facts(self.datasheet.facts(dtype) | facts)

    @property
    def device_bytes(self) -> int | None:
        """The bytes of the GPU's memory without the driver's context; None if the entry does not tell them."""
        return None if self.device_memory is None else size_bytes(str(self.device_memory))

    @property
    def room(self) -> Room:
        """The bytes that plans may fill on this machine, or on a simulated device of its size. The GPU's bytes leave
        out the reserve for memory that plans do not count. The rates are those for the dtype in the fact `precision`
        or, without this fact, for fp32. Raises ValueError if a size is wrong."""
        sizes = {f"{memory}_bytes": getattr(self, f"{memory}_memory") for memory in ("host", "disk")}
        limits: JsonObject = {name: size_bytes(str(size)) for name, size in sizes.items() if size is not None}
        if self.device_bytes is not None:
            least = cuda_budget.budget_bytes(cuda_budget.MIN_BYTES_FOR_TENSORS, context_bytes=0)
            if self.device_bytes < least:
                raise ValueError(
                    f"device_memory: expected at least {-(-least // 2**20)}MiB for a GPU, got {self.device_memory};"
                    " for a simulated device leave it out, and try --device-memory"
                )
            limits["device_bytes"] = cuda_budget.tensor_bytes(self.device_bytes, context_bytes=0)
        precision = str((self.facts or {}).get("precision", "fp32"))[:4]
        return Room(**limits, rates=self.rates(precision))

    def budget_on(self, device: str, dtype: str | None = None) -> Budget:
        """Return the budget with which a plan on `device` has the room of this machine. `dtype`: the dtype for which
        the budget's rates hold; None: as in `room`.

        On a GPU the budget includes the context and the reserve. If the GPU that is really here has too few bytes for
        this budget, but at least the entry's device_bytes, the budget is all bytes of the GPU.
        """
        room = self.room
        rates = self.rates(dtype) if dtype else room.rates
        budget = Budget(room.device_bytes, room.host_bytes, room.disk_bytes, rates=rates)
        if device != "cuda" or self.device_bytes is None:
            return budget
        whole_bytes = self.device_bytes + cuda_budget.context_bytes()
        present_bytes = machine.gpu().get("gpu_bytes", 0)
        is_nearly_whole = self.device_bytes <= present_bytes < whole_bytes
        return replace(budget, device_bytes=present_bytes if is_nearly_whole else whole_bytes)

    def __post_init__(self) -> None:
        self.room  # noqa: B018  raises ValueError if a size is wrong


class MachineRegistry(Registry):
    def add(self, places: Iterable[Path]) -> None:
        """Add files with entries of machines. Every entry is read at once, because tables, figures and reports read all
        machines. Raises ValueError if a file is missing or an entry is wrong."""
        files = [file.absolute() for file in places]
        for file in files:
            if not file.exists():
                message = f"expected a file of machines, got {file}; try --machines FILE"
                raise ValueError(f"{message}, with entries such as {EXAMPLE}")
        for name in names(*self.paths, *files):
            load(name, *self.paths, *files)
        super().add(files)


REGISTRY = MachineRegistry("machine", FILE)


def names(*files: Path) -> list[str]:
    """Return the sorted names of the machines in these files; without files, in all known files. Raises ValueError for
    a name that is not allowed."""
    sorted_names = sorted(files_by_entry(files or REGISTRY.paths, EXAMPLE))
    for name in sorted_names:
        if not NAME_PATTERN.fullmatch(name):  # names become parts of figures' file names
            raise ValueError(
                f"expected a name of letters, digits, ._- and spaces, got {name!r:.80}; try my-machine"
            )
    return sorted_names


def load(name: str, *files: Path) -> Machine:
    """Return the machine `name` of these files; without files, of all known files. Raises ValueError if there is no
    such machine (the text names the nearest one) or if its entry has wrong fields (the text names them)."""
    return read_entry(Machine, "machine", name, files or REGISTRY.paths, EXAMPLE)


def plain(name: str) -> str:
    """Return a GPU's name in lower case and with only its letters and digits. In this form the names that
    machines.yaml, people and the driver use can be compared."""
    return "".join(character for character in name.lower() if character.isalnum())


def spelled(name: str) -> str:
    """Return the name of the entry that a person means by a name such as RTX 4090, 4090, NVIDIA H100 or a100-80gb. If
    no entry or several entries match, the name is returned unchanged."""
    plain_name = plain(name).removeprefix("nvidia").removeprefix("geforce").removesuffix("gb")
    if name in names():
        return name
    matches = [listed for listed in names() if plain(listed) == plain_name]
    if not matches and len(plain_name) >= LEAST_ENDING_CHARACTERS:
        matches = [listed for listed in names() if plain(listed).endswith(plain_name)]
    return matches[0] if len(matches) == 1 else name


def of_gpu(gpu: str | None, gpu_bytes: int | None = None) -> str | None:
    """Return the name of the machine whose GPU the driver calls `gpu`; None if there is no such machine. Of several
    machines with this GPU, return the one whose device memory is nearest to `gpu_bytes` or, if that is None, the one
    whose name has the fewest other words."""

    def distance(name: str) -> tuple[float, int]:
        device_bytes = load(name).device_bytes
        log_ratio = abs(math.log(device_bytes / gpu_bytes)) if device_bytes and gpu_bytes else math.inf
        return log_ratio, len(_gpu_words(name))

    return min((name for name in names() if has_gpu(name, gpu)), key=distance, default=None)


def has_gpu(name: str, gpu: str | None) -> bool:
    """True if the machine `name` has the GPU that the driver calls `gpu`: if the first word of the machine's name is a
    word of the GPU's. So a10 is no NVIDIA A100-SXM4-80GB, and h200 and h200-141 are both an NVIDIA H200."""
    machine_words = _gpu_words(name)
    return bool(machine_words) and machine_words[0] in _gpu_words(gpu or "")


def _gpu_words(name: str) -> list[str]:
    """Return the words of the name of a GPU or a machine, without those of makers and series."""
    all_words = re.findall(r"[a-z0-9]+", re.sub(r"\brtx\s+", "rtx", name.lower()))
    return [word for word in all_words if word not in ("nvidia", "geforce", "tesla", "gpu")]


def source(name: str) -> str:
    """Return text for people with the name of a machine and the file that holds its entry."""
    file = files_by_entry(REGISTRY.paths, EXAMPLE)[name]
    return f"{name} in {file.name if file == FILE else file}"


def options_text(name: str) -> str:
    """Return the options with which a call names this machine: --machine and, if the machine's entry is in a file that
    the caller has added, --machines with this file."""
    file = files_by_entry(REGISTRY.paths, EXAMPLE).get(name)
    return shlex.join(
        ["--machine", name, *(["--machines", str(file)] if file in REGISTRY.added_paths else [])]
    )


def size_bytes(text: str) -> int:
    """Return the bytes of a size such as 32GiB. The unit's case does not matter. Raises ValueError if `text` is no
    positive size with a unit."""
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    match = re.fullmatch(rf"(\d{{1,9}}(?:\.\d{{1,30}})?) ?({'|'.join(units)})", text.lower())
    size = int(float(match[1]) * units[match[2]]) if match else 0
    if not size:
        raise ValueError(f"expected a positive size with {', '.join(UNITS)}, got {text!r:.80}; try 32GiB")
    return size
