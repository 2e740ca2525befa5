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
from harness.plan.resources import Forecast, predict_step


class Accuracy(NamedTuple):
    """The error of a method's predictions: measured step seconds divided by predicted ones, minus 1. `median`, `worst`:
    the median error of `num_runs` runs, and the largest one."""

    num_runs: int
    median: float
    worst: float


class ForecastError(NamedTuple):
    """The error that a forecast may have: the largest error of forecasts that were compared with measurements. `text`
    says which runs were compared."""

    worst: float  # measured seconds divided by predicted ones, minus 1
    text: str


def forecast_error(
    name: str, accuracies: Mapping[str, Accuracy], folders: tuple[Path, ...] = ()
) -> ForecastError:
    """Return the error that a method's forecast for a machine may have.

    The error is taken from the first of these that exist: the method's runs on that machine, other methods' runs there,
    the method's runs elsewhere, other methods' runs elsewhere. `accuracies`: by method, the accuracy of its runs on
    that machine.
    """

    def error_text(worst: float) -> str:
        return f"took up to {abs(worst):.0%} {'more' if worst > 0 else 'less'} time than foretold"

    if measured := accuracies.get(name):
        return ForecastError(
            measured.worst, f"its {counted(measured.num_runs, 'run')} there {error_text(measured.worst)}"
        )
    if accuracies:
        worst = max((other.worst for other in accuracies.values()), key=abs)
        return ForecastError(
            worst,
            f"no run of {name} has tested that; runs of {' and '.join(accuracies)} there {error_text(worst)}",
        )
    if test := method.load(name, folders).forecast_test:
        return ForecastError(
            test.worst, f"{counted(test.num_runs, 'run')} elsewhere {error_text(test.worst)} ({test.source})"
        )
    tested = {
        other: cls.forecast_test for other, cls in method.loadable(folders).items() if cls.forecast_test
    }
    worst = max((other.worst for other in tested.values()), key=abs)
    return ForecastError(
        worst,
        f"no run of {name} has tested that; runs of {' and '.join(tested)} elsewhere {error_text(worst)}",
    )


def rates_of_record(record: Record) -> Rates | None:
    """Return the rates of the machine that made a record; None if they are not known. This machine's rates come from
    its calibration, another machine's rates from machines.yaml. Imported logs count as made by the published
    machine."""
    workload = record.job.workload
    if is_of_this_machine(record):
        return machine.rates(record.job.device, workload)
    name = machine_name_of(record)
    return named_machines.load(name).rates(workload.dtype) if name else None


def is_of_this_machine(record: Record) -> bool:
    """True if the record was measured on this machine."""
    facts = machine.compared_facts()
    has_same_facts = all(str(record.machine.get(fact)) == facts[fact] for fact in ("cpu", "cores", "gpu"))
    return record.origin != "imported" and has_same_facts


def machine_name_of(record: Record) -> str | None:
    """Return the name in machines.yaml of the machine that made a record. An imported log's machine is the published
    machine; any other record's machine is found by its GPU. None if no entry has that GPU."""
    if record.origin == "imported":
        return named_machines.PUBLISHED
    return named_machines.of_gpu(str(record.machine.get("gpu") or ""), record.machine.get("gpu_bytes"))


def is_of_machine(record: Record, name: str) -> bool:
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
        configured_method = method.create(job.method, job.options, folders).as_timed(job, record.grad_norms)
        if configured_method.names_file():
            return None
        room = dataclasses.replace(job.budget.share(job.world_size).room, rates=rates)
        plan = configured_method.plan(job.workload, room)
        return predict_step(configured_method, job.workload, plan, rates, job.world_size)
    except ValueError:  # the method or one of its options no longer exists
        return None


def method_accuracies(records: Iterable[Record], folders: tuple[Path, ...] = ()) -> dict[str, Accuracy]:
    """Return the accuracy of each method's predictions, over its runs that trained on one device. A method without such
    runs is left out."""
    errors_by_method: dict[str, list[float]] = {}
    for record in records:
        if record.job.world_size > 1:
            continue
        forecast, measured_seconds = forecast_of_record(record, folders), record.median_step_seconds
        if forecast and measured_seconds:
            errors = errors_by_method.setdefault(record.job.method, [])
            errors.append(measured_seconds / forecast.seconds - 1)
    accuracies = {}
    for name, errors in errors_by_method.items():
        accuracies[name] = Accuracy(len(errors), statistics.median(errors), max(errors, key=abs))
    return accuracies


def has_disk(record: Record) -> bool:
    return bool(record.predicted.get("disk"))


def measured_step_seconds(
    records: Iterable[Record], name: str, workload: Workload, machine_name: str | None, on_disk: bool
) -> list[float]:
    """Return the step seconds of the runs that trained this workload by the method `name`.

    `machine_name`: a machine of machines.yaml, whose GPU the runs must have; None: runs on this machine. `on_disk`:
    True for runs with states on a disk, False for runs without.
    """

    seconds: list[Any] = []
    for record in records:
        is_alike = (record.job.method, record.job.workload, has_disk(record)) == (name, workload, on_disk)
        if not is_alike or not record.samples_per_second:
            continue
        is_there = is_of_this_machine(record) if machine_name is None else is_of_machine(record, machine_name)
        if is_there:
            seconds.append(record.median_step_seconds)
    return seconds
