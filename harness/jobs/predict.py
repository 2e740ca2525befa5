"""Seconds of a step by a plan and a machine's rates, and how far such predictions have been off.

A plan that knows its schedule gives the seconds itself. For the others a step is the sum of its parts, one after the
other, but for what the method says that it hides behind compute. That is a model: beside it stands what was measured.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from harness.core import method
from harness.core.job import Plan, Workload
from harness.core.rates import ADAM_BYTES, Rates
from harness.core.record import Record
from harness.devices import machine, named_machines

MOMENT_BYTES = 8  # a parameter: what no optimizer here does without
PUBLISHED_ON = "v100-vm"  # the machine of imported logs
COMPUTE, ON_DEVICE, COPIES, ON_HOST, DISK = (
    "compute",
    "the device's updates",
    "copies",
    "the host's updates",
    "the disk",
)


class Prediction(NamedTuple):
    seconds: float
    binds: str  # the part that takes longest


class Accuracy(NamedTuple):
    """Measured seconds over predicted ones, less 1: by the middle and by the worst of so many runs."""

    num_runs: int
    median: float
    worst: float


def predict(trained: method.Method, workload: Workload, plan: Plan, rates: Rates) -> Prediction:
    """A step on one device."""
    if plan.step_seconds:
        return Prediction(plan.step_seconds, plan.binds)
    states = plan.host.get("optimizer", 0) + plan.disk.get("optimizer", 0)
    at_host = min(workload.num_params, states / MOMENT_BYTES) if plan.updates_on_host else 0.0
    adam = ADAM_BYTES[workload.dtype]
    link = (rates.inbound_bytes_per_second + rates.outbound_bytes_per_second) / 2
    parts = {
        COMPUTE: sum(rates.compute_seconds(workload.flops_per_step, workload.head_flops_per_step)),
        ON_DEVICE: adam * (workload.num_params - at_host) / rates.device_bytes_per_second,
        COPIES: plan.moved_bytes / link,
        ON_HOST: max(at_host / rates.host_adam_params_per_second, adam * at_host / rates.host_bytes_per_second),
        DISK: plan.disk_bytes * (1 / rates.disk_read_bytes_per_second + 1 / rates.disk_write_bytes_per_second),
    }
    hidden = sum(parts[part] for word, part in (("copies", COPIES), ("updates", ON_HOST)) if word in trained.hides)
    computed = parts[COMPUTE] + parts[ON_DEVICE]
    seconds = sum(parts.values()) - min(hidden, computed)
    return Prediction(seconds, max(parts, key=lambda part: parts[part]))


def rates_of(record: Record) -> Rates | None:
    """The rates of the machine of a record: this one's by calibration, the published one's for imported logs, a named
    one's by its GPU; None where they are not known."""
    workload = record.job.workload
    if is_here(record):
        return machine.rates(record.job.device, workload)
    name = entry_of(record)
    return named_machines.load(name).rates(workload.dtype) if name else None


def is_here(record: Record) -> bool:
    """Whether it was measured on this machine."""
    facts = machine.checked()
    same = all(str(record.machine.get(name)) == facts[name] for name in ("cpu", "cores", "gpu"))
    return record.origin != "imported" and same


def entry_of(record: Record) -> str | None:
    """The machine of a record in machines.yaml, by its GPU; of imported logs the published one."""
    if record.origin == "imported":
        return PUBLISHED_ON
    gpu = plain(str(record.machine.get("gpu") or ""))
    return max((name for name in named_machines.names() if plain(name) in gpu), key=len, default=None)


def plain(name: str) -> str:
    """A GPU's name as this page and the driver both spell it."""
    return "".join(character for character in name.lower() if character.isalnum())


def of_record(record: Record, folders: tuple[Path, ...] = ()) -> Prediction | None:
    """What would have been predicted for a run that trained; None for others and where rates are not known."""
    rates = rates_of(record) if record.samples_per_second and record.job.world_size == 1 else None
    if rates is None:
        return None
    job = record.job
    try:
        trained = method.create(job.method, job.options, folders)
        budget = dataclasses.replace(job.budget, rates=rates)
        return predict(trained, job.workload, trained.plan(job.workload, budget), rates)
    except ValueError:  # a method or an option that is no more
        return None


def accuracy(records: Iterable[Record], folders: tuple[Path, ...] = ()) -> dict[str, Accuracy]:
    """By method, over the runs that trained."""
    ratios: dict[str, list[float]] = {}
    for record in records:
        predicted, measured = of_record(record, folders), record.median_step_seconds
        if predicted and measured:
            ratios.setdefault(record.job.method, []).append(measured / predicted.seconds - 1)
    return {name: Accuracy(len(found), statistics.median(found), max(found, key=abs)) for name, found in ratios.items()}


def measured_for(records: Iterable[Record], name: str, workload: Workload, gpu: str | None) -> list[float]:
    """Step seconds of the runs of this method and workload that trained: on this machine, or on a GPU of that name."""

    def is_there(record: Record) -> bool:
        return is_here(record) if gpu is None else plain(gpu) in plain(str(record.machine.get("gpu") or ""))

    same = [record for record in records if (record.job.method, record.job.workload) == (name, workload)]
    found: list[Any] = [record.median_step_seconds for record in same if record.samples_per_second and is_there(record)]
    return found
