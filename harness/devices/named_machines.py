"""Machines by name: the budgets of --machine, from machines.yaml. To add a machine is to add an entry there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core.checked_data import NO_OTHER_FIELDS
from harness.core.job import GIB, Budget
from harness.core.method import ROOT
from harness.core.named_entries import entries, entry
from harness.core.rates import of_facts
from harness.devices import cuda_budget, machine

FILE = ROOT / "machines.yaml"
EXAMPLE = "v100-vm: {device_memory: 32GiB}"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}


@dataclass(frozen=True)
class Machine:
    """An entry of machines.yaml: sizes with their units, and facts, of which rates are made."""

    __pydantic_config__ = NO_OTHER_FIELDS
    about: str = ""
    device_memory: str | float | None = None
    host_memory: str | float | None = None
    disk_memory: str | float | None = None
    facts: dict[str, Any] | None = field(default_factory=dict)

    @property
    def budget(self) -> Budget:
        sizes = {f"{memory}_bytes": getattr(self, f"{memory}_memory") for memory in ("device", "host", "disk")}
        given: dict[str, Any] = {name: size_bytes(str(size)) for name, size in sizes.items() if size is not None}
        return Budget(**given, rates=of_facts(self.facts or {}))

    def budget_on(self, device: str) -> Budget:
        """The same on a device: a GPU's budget includes its context, which an entry's device_memory does not."""
        budget = self.budget
        if device != "cuda" or budget.device_bytes is None:
            return budget
        whole = budget.device_bytes + cuda_budget.CONTEXT_BYTES
        return replace(budget, device_bytes=min(whole, machine.gpu().get("gpu_bytes", whole)))

    def __post_init__(self) -> None:
        self.budget  # noqa: B018  raises ValueError where a size is wrong


def names(file: Path = FILE) -> list[str]:
    return sorted(entries(file, EXAMPLE))


def load(name: str, file: Path = FILE) -> Machine:
    """The machine of this name. Raises ValueError that names the nearest one, or the entry's wrong fields."""
    return entry(Machine, name, file, EXAMPLE)


def size_bytes(text: str) -> int:
    """Bytes of a size with its unit. Raises ValueError where it is none."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,30})?)(KiB|MiB|GiB|TiB)", text)
    size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if not size:
        raise ValueError(f"expected a positive size with {', '.join(UNITS)}, got {text!r:.80}; try 32GiB")
    return size
