"""Machines by name: the budgets of --machine, from machines.yaml. To add a machine is to add an entry there."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.core.job import GIB, Budget
from harness.core.method import ROOT
from harness.core.rates import of_facts

FILE = ROOT / "machines.yaml"
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
BUDGETS = {"device_memory": "device_bytes", "host_memory": "host_bytes", "disk_memory": "disk_bytes"}


@dataclass(frozen=True)
class Profile:
    """A machine: what there is to use, and facts, of which rates are made."""

    name: str
    budget: Budget
    about: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def names(file: Path = FILE) -> list[str]:
    return sorted(_read(file))


def load(name: str, file: Path = FILE) -> Profile:
    """The machine of this name. Raises ValueError that names the nearest one, or the entry that makes no sense."""
    machines = _read(file)
    if name not in machines:
        near = difflib.get_close_matches(name, machines, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"no machine {name!r}: {hint}choose one of {', '.join(sorted(machines))}, or add it to {file}")
    entry = machines[name]
    unknown = set(entry) - {"about", "facts", *BUDGETS} if isinstance(entry, dict) else {entry}
    if unknown:
        raise ValueError(
            f"{file}: {name} has {', '.join(map(str, unknown))}: known are about, facts, {', '.join(BUDGETS)}"
        )
    facts = entry.get("facts") or {}
    sizes: dict[str, Any] = {"rates": of_facts(facts)}
    for key, attribute in BUDGETS.items():
        if key in entry:
            sizes[attribute] = size_bytes(str(entry[key]))
            if sizes[attribute] is None:
                raise ValueError(f"{file}: {name}'s {key} is {entry[key]!r}: a size is a number with a unit, as 32GiB")
    return Profile(name, Budget(**sizes), str(entry.get("about", "")), facts)


def size_bytes(text: str) -> int | None:
    """Bytes of a positive size with its unit, as 32GiB; None where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(KiB|MiB|GiB|TiB)", text)
    return int(float(match[1]) * UNITS[match[2]]) or None if match else None


def _read(file: Path) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise ValueError(
            "machines by name need PyYAML: pip install PyYAML, or name budgets by --device-memory"
        ) from error
    try:
        machines = yaml.safe_load(file.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file} does not load: {' '.join(str(error).split())}") from error
    if not isinstance(machines, dict):
        raise ValueError(f"{file} must hold machines by name, as v100-vm: {{device_memory: 32GiB}}")
    return machines
