"""A place to train: a machine with a name, a GPU described by numbers, or this machine. Its memories, as text."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from typing import Any

from harness.base.console import counted
from harness.core.job import Budget, Room, Workload, gib
from harness.core.rates import NEEDED_FACTS
from harness.devices import machine, named_machines
from harness.devices.named_machines import Machine
from harness.devices.room import imports_text, less_imports, room_at, room_within

# 16-bit dtypes, the preferred one first; a place takes the first in which its GPU can compute
HALF_DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class TrainingPlace:
    """A place to train, and the budgets that the call gives for it.

    `entry`: an entry of machines.yaml, or None. This machine's entry is the one with the same GPU; the entry's rates
    are used until this machine's own rates are measured.
    """

    name: str | None  # name of another machine; None: this machine
    about: str
    device: str
    budget: Budget
    entry: Machine | None = None

    def room_for(self, workload: Workload, num_ranks: int = 1) -> Room:
        """Return the memories that one rank's plan may fill, if `num_ranks` ranks share a host."""
        if self.name is not None:
            assert self.entry
            return room_at(self.entry, self.budget, workload, num_ranks)
        whole = room_within(self.budget, self.device, workload, num_ranks)
        room = less_imports(whole, self.budget, self.device)
        disk_bytes = room.disk_bytes or shutil.disk_usage(tempfile.gettempdir()).free
        rates = room.rates or (self.entry.rates(workload.dtype) if self.entry else None)
        return replace(room, disk_bytes=disk_bytes, rates=rates)

    def peak_flops(self, dtype: str) -> float | None:
        return self.entry.datasheet.peak_flops(dtype) if self.entry and self.entry.datasheet else None

    @property
    def dtype(self) -> str:
        """Return the dtype to train in if the call gives none: bf16 on a GPU, fp16 on a GPU without bf16, fp32 on any
        other device."""
        if self.device != "cuda":
            return "fp32"
        if self.entry and self.entry.datasheet:
            return next((half for half in HALF_DTYPES if self.peak_flops(half)), "fp32")
        return "bf16" if self.name or machine.has_bf16() else "fp16"

    def with_host(self, host_bytes: int) -> TrainingPlace:
        return replace(self, budget=replace(self.budget, host_bytes=host_bytes))


def named_place(name: str, budget: Budget, facts: dict[str, Any] | None = None) -> TrainingPlace:
    """Return the place of a machine in machines.yaml, or of a GPU that the call describes by numbers. `facts`: numbers
    named as in machines.yaml, which replace those of the entry. Raises ValueError if a needed number is missing."""
    facts = facts or {}
    if name in named_machines.names() or not facts:
        try:
            entry = named_machines.load(name)
        except ValueError as error:
            remedy = f"give the GPU's numbers: --device-memory 24GB {example_facts_text()}"
            raise ValueError(
                f"{error}; or {remedy}; or what ./run.sh rates prints there, with --machines FILE"
            ) from error
        about = f"{entry.about}; {', '.join(facts)} of the call" if facts else entry.about
        return TrainingPlace(name, about, "cuda", budget, replace(entry, facts=(entry.facts or {}) | facts))
    if missing := [fact for fact in NEEDED_FACTS if fact not in facts]:
        raise ValueError(
            f"expected the facts {', '.join(missing)} of {name}, got none: try {example_facts_text()}"
        )
    if budget.device_bytes is None:
        raise ValueError(f"expected the memory of {name}, got none: try --device-memory 24GB")
    return TrainingPlace(name, f"{name}, by the numbers of the call", "cuda", budget, Machine(facts=facts))


def example_facts_text() -> str:
    """Return, as text, example options that describe a GPU missing from machines.yaml. The numbers are those of a
    desktop computer."""
    examples = {"gpu_tflops": 80, "link_gb_per_second": 20, "host_adam_gparams_per_second": 2}
    return " ".join(f"--fact {fact}={examples[fact]}" for fact in NEEDED_FACTS)


def this_place(budget: Budget) -> TrainingPlace:
    device = machine.devices()[0]
    if device == "cpu" and budget.device_bytes:
        device = "sim"
    facts = machine.facts()
    about = f"this machine: {facts.get('gpu') or facts['cpu']}, {counted(facts['cores'], 'core')}"
    known = named_machines.of_gpu(facts.get("gpu"), facts.get("gpu_bytes")) if device == "cuda" else None
    return TrainingPlace(None, about, device, budget, named_machines.load(known) if known else None)


def memories_text(name: str | None, budget: Budget, room: Room, device: str) -> str:
    """Return a line of text on the memories of a named machine; if `name` is None, of this machine. A second line has
    what machines.yaml tells of a named machine. `budget`: that of the call. `room`: the memories that plans fill."""
    about = named_machines.load(name).about if name in named_machines.names() else ""
    host = "not limited" if room.host_bytes is None else gib(room.host_bytes)
    less = imports_text(budget, device) if name is None else ""
    host += f" ({', '.join(filter(None, (_host_source_text(name, budget), less)))})"
    line = f"memories that plans fill: device {_device_text(name, budget, room, device)}; host {host}"
    return f"{line}\n{name}: {about}" if about else line


def device_source_text(name: str) -> str:
    """Return, as text, the size of a named machine's device memory, and where this number comes from."""
    size = named_machines.load(name).device_memory
    source = named_machines.source(name)
    return f"{source}: {size}, less a reserve" if size else f"{source}: none"


def _device_text(name: str | None, budget: Budget, room: Room, device: str) -> str:
    if room.device_bytes is None:
        return "not limited" if device == "sim" else "shares the host's"
    if budget.device_bytes:
        source = "--device-memory"
    elif name:
        source = device_source_text(name)
    else:
        source = "this machine's GPU"
    if device == "cuda" and (budget.device_bytes or not name):
        source += ", less the context and a reserve"
    return f"{gib(room.device_bytes)} ({source})"


def _host_source_text(name: str | None, budget: Budget) -> str:
    if budget.host_bytes:
        return "--host-memory"
    if name is None:
        return "this machine's; try --host-memory for another"
    if name not in named_machines.names():
        return "assumed; try --host-memory"
    if named_machines.load(name).room.host_bytes:
        return named_machines.source(name)
    return f"assumed: {named_machines.source(name)} has none; try --host-memory"
