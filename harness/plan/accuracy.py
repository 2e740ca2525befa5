"""Compares the step times that are predicted from a machine's rates with the step times that its records measured."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.console import counted
from harness.core import method
from harness.core.job import Workload
from harness.core.rates import Rates
from harness.core.record import Record
from harness.devices import machine, named_machines
from harness.plan.resources import Forecast, predicted


class Accuracy(NamedTuple):
    """The error of a method's predictions: measured step seconds divided by predicted ones, minus 1. `median`, `worst`:
    the median error of `num_runs` runs, and the largest one."""

    num_runs: int
    median: float
    worst: float


class Error(NamedTuple):
    """The error that a forecast may have: the largest error of forecasts that were compared with measurements. `text`
    says which runs were compared."""

    worst: float  # measured seconds divided by predicted ones, minus 1
    text: str


def error_of(name: str, accuracies: Mapping[str, Accuracy], folders: tuple[Path, ...] = ()) -> Error:
    """Return the error that a method's forecast for a machine may have.

    The error is taken from the first of these that exist: the method's runs on that machine, other methods' runs there,
    the method's runs elsewhere, other methods' runs elsewhere. `there`: by method, the accuracy of its runs on that
    machine.
    """

    def error_text(worst: float) -> str:
        return f"took up to {abs(worst):.0%} {'more' if worst > 0 else 'less'} time than foretold"

    if measured := accuracies.get(name):
        return Error(
            measured.worst, f"its {counted(measured.num_runs, 'run')} there {error_text(measured.worst)}"
        )
    if accuracies:
        worst = max((other.worst for other in accuracies.values()), key=abs)
        return Error(
            worst,
            f"no run of {name} has tested that; runs of {' and '.join(accuracies)} there {error_text(worst)}",
        )
    if test := method.load(name, folders).forecast_test:
        return Error(
            test.worst, f"{counted(test.num_runs, 'run')} elsewhere {error_text(test.worst)} ({test.source})"
        )
    tested = {
        other: cls.forecast_test for other, cls in method.loadable(folders).items() if cls.forecast_test
    }
    worst = max((other.worst for other in tested.values()), key=abs)
    return Error(
        worst,
        f"no run of {name} has tested that; runs of {' and '.join(tested)} elsewhere {error_text(worst)}",
    )


def rates_of_record(record: Record) -> Rates | None:
    """Return the rates of the machine that made a record; None if they are not known. This machine's rates come from
    its calibration, another machine's rates from machines.yaml. Imported logs count as made by the published
    machine."""
    workload = record.job.workload
    if is_here(record):
        return machine.rates(record.job.device, workload)
    name = entry_of(record)
    return named_machines.load(name).rates(workload.dtype) if name else None


def is_here(record: Record) -> bool:
    """True if the record was measured on this machine."""
    facts = machine.compared_facts()
    same = all(str(record.machine.get(name)) == facts[name] for name in ("cpu", "cores", "gpu"))
    return record.origin != "imported" and same


def entry_of(record: Record) -> str | None:
    """Return the name in machines.yaml of the machine that made a record. An imported log's machine is the published
    machine; any other record's machine is found by its GPU. None if no entry has that GPU."""
    if record.origin == "imported":
        return named_machines.PUBLISHED
    return named_machines.of_gpu(str(record.machine.get("gpu") or ""), record.machine.get("gpu_bytes"))


def ran_on(record: Record, name: str) -> bool:
    """True if a record was made on the GPU of the machine `name`, or is an imported log of that machine."""
    if record.origin == "imported":
        return name == named_machines.PUBLISHED
    return named_machines.has_gpu(name, record.machine.get("gpu"))


def forecast_of_record(record: Record, folders: tuple[Path, ...] = ()) -> Forecast | None:
    """Return the predicted step time of a run. None if the run has no throughput, if its machine's rates are not known,
    if its method or one of its options no longer exists, or if an option names a file."""
    rates, job = rates_of_record(record) if record.samples_per_second else None, record.job
    if rates is None:
        return None
    try:
        trained = method.create(job.method, job.options, folders).as_timed(job, record.grad_norms)
        if trained.names_file():
            return None
        room = dataclasses.replace(job.budget.share(job.world_size).room, rates=rates)
        return predicted(trained, job.workload, trained.plan(job.workload, room), rates, job.world_size)
    except ValueError:  # the method or one of its options no longer exists
        return None


def accuracy(records: Iterable[Record], folders: tuple[Path, ...] = ()) -> dict[str, Accuracy]:
    """Return the accuracy of each method's predictions, over its runs that trained on one device. A method without such
    runs is left out."""
    ratios: dict[str, list[float]] = {}
    for record in records:
        if record.job.world_size > 1:
            continue
        foretold, measured = forecast_of_record(record, folders), record.median_step_seconds
        if foretold and measured:
            ratios.setdefault(record.job.method, []).append(measured / foretold.seconds - 1)
    return {
        name: Accuracy(len(errors), statistics.median(errors), max(errors, key=abs))
        for name, errors in ratios.items()
    }


def has_disk(record: Record) -> bool:
    return bool(record.predicted.get("disk"))


def measured_for(
    records: Iterable[Record], name: str, workload: Workload, machine_name: str | None, on_disk: bool
) -> list[float]:
    """Return the step seconds of the runs that trained this workload by the method `name`. `there`: a machine of
    machines.yaml, whose GPU the runs must have; None: runs on this machine. `on_disk`: True for runs with states on a
    disk, False for runs without."""

    def is_there(record: Record) -> bool:
        return is_here(record) if machine_name is None else ran_on(record, machine_name)

    key = (name, workload, on_disk)
    same = [record for record in records if (record.job.method, record.job.workload, has_disk(record)) == key]
    seconds: list[Any] = [
        record.median_step_seconds for record in same if record.samples_per_second and is_there(record)
    ]
    return seconds
