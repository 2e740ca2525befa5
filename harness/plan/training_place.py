"""A place to train, with the memories that plans may fill there. The place is a machine with a name, a GPU described by
numbers, or this machine."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from typing import Any

from harness.base.counted import counted
from harness.core.job import Budget, Room, Workload
from harness.core.rates import NEEDED
from harness.devices import budgets, cuda_budget, machine, named_machines
from harness.devices.named_machines import Machine
from harness.plan import memories

# 16-bit dtypes, the preferred one first; a place takes the first in which its GPU can compute
HALVES = ("bf16", "fp16")


@dataclass(frozen=True)
class TrainingPlace:
    """A place to train, and the budgets that the call gives for it.

    `entry`: an entry of machines.yaml, or None. This machine's entry is the one with the same GPU; the entry's rates
    are used until this machine's own rates are measured.
    """

    name: str | None  # name of another machine; None: this machine
    about: str
    device: str
    asked: Budget
    entry: Machine | None = None

    def room_for(self, workload: Workload, num_ranks: int = 1) -> Room:
        """Return the memories that one rank's plan may fill, if `num_ranks` ranks share a host. For another machine
        whose host memory neither the call nor the entry states, the plan takes ASSUMED_HOST_BYTES."""
        asked, entry = self.asked, self.entry
        if self.name is None:
            room = budgets.less_reserve(
                machine.room(asked, self.device, workload, num_ranks), asked, self.device
            )
            disk_bytes = room.disk_bytes or shutil.disk_usage(tempfile.gettempdir()).free
            rates = room.rates or (entry.rates(workload.dtype) if entry else None)
            return replace(room, disk_bytes=disk_bytes, rates=rates)
        assert entry
        device = (
            cuda_budget.tensor_bytes(asked.device_bytes) if asked.device_bytes else entry.room.device_bytes
        )
        if device and num_ranks > 1:
            device = max(1, device - cuda_budget.COMMUNICATORS_BYTES)
        disk, rates = asked.disk_bytes or entry.room.disk_bytes, entry.rates(workload.dtype)
        return Room(device, memories.host_bytes(self.name, asked) // num_ranks, disk, rates, page_locks=True)

    def peak_flops(self, dtype: str) -> float | None:
        return self.entry.datasheet.peak_flops(dtype) if self.entry and self.entry.datasheet else None

    @property
    def dtype(self) -> str:
        """Return the dtype to train in if the call gives none: bf16 on a GPU, fp16 on a GPU without bf16, fp32 on any
        other device."""
        if self.device != "cuda":
            return "fp32"
        if self.entry and self.entry.datasheet:
            return next((half for half in HALVES if self.peak_flops(half)), "fp32")
        return "bf16" if self.name or machine.has_bf16() else "fp16"

    def with_host(self, host_bytes: int) -> TrainingPlace:
        return replace(self, asked=replace(self.asked, host_bytes=host_bytes))


def named_place(name: str, asked: Budget, facts: dict[str, Any] | None = None) -> TrainingPlace:
    """Return the place of a machine in machines.yaml, or of a GPU that the call describes by numbers. `facts`: numbers
    named as in machines.yaml, which replace those of the entry. Raises ValueError if a needed number is missing."""
    given = facts or {}
    if name in named_machines.names() or not given:
        try:
            entry = named_machines.load(name)
        except ValueError as error:
            told = f"give the GPU's numbers: --device-memory 24GB {numbers()}; or what ./run.sh rates prints there"
            raise ValueError(f"{error}; or {told}, with --machines FILE") from error
        about = f"{entry.about}; {', '.join(given)} of the call" if given else entry.about
        return TrainingPlace(name, about, "cuda", asked, replace(entry, facts=(entry.facts or {}) | given))
    if missing := [fact for fact in NEEDED if fact not in given]:
        raise ValueError(f"expected the facts {', '.join(missing)} of {name}, got none: try {numbers()}")
    if asked.device_bytes is None:
        raise ValueError(f"expected the memory of {name}, got none: try --device-memory 24GB")
    return TrainingPlace(name, f"{name}, by the numbers of the call", "cuda", asked, Machine(facts=given))


def numbers() -> str:
    """Return, as text, example options that describe a GPU missing from machines.yaml. The numbers are those of a
    desktop computer."""
    examples = {"gpu_tflops": 80, "link_gb_per_second": 20, "host_adam_gparams_per_second": 2}
    return " ".join(f"--fact {fact}={examples[fact]}" for fact in NEEDED)


def this_place(asked: Budget) -> TrainingPlace:
    device = machine.devices()[0]
    if device == "cpu" and asked.device_bytes:
        device = "sim"
    facts = machine.facts()
    about = f"this machine: {facts.get('gpu') or facts['cpu']}, {counted(facts['cores'], 'core')}"
    known = named_machines.of_gpu(facts.get("gpu"), facts.get("gpu_bytes")) if device == "cuda" else None
    return TrainingPlace(None, about, device, asked, named_machines.load(known) if known else None)
