"""A case's figure of whatever records a folder holds: runs made by hand, of any sizes, and imported logs.

A figure has one machine, device, dtype, size of a step and budget. Where records differ in these, nothing is drawn: the
error says what differs, and how to choose. Which of the rows a figure shows is the case's pick(rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.core.job import gib
from harness.core.record import Record
from harness.figures import case
from harness.figures.point import FigureRow, machine_of, row_of

NAME = "folder"  # in place of a profile's
OF_WORKLOAD = ("dtype", "hidden_size", "num_heads", "batch_size", "micro_batches", "seq_len", "vocab_size", "dropout")
ALIKE = ("origin", "machine", "device", *OF_WORKLOAD, "device_memory", "host_memory")  # within a figure
CHOICES = (*ALIKE, "window_size", "num_layers", "method", "steps")  # names that --where takes


def facts(record: Record) -> dict[str, str]:
    """What tells records apart, as --where spells it. Fields that an imported log does not tell are left out."""
    job, unsaid = record.job, record.evidence.get("unsaid", ())
    told: dict[str, Any] = {name: getattr(job.workload, name) for name in OF_WORKLOAD if name not in unsaid}
    sizes = {"device_memory": job.budget.device_bytes, "host_memory": job.budget.host_bytes}
    told |= {name: gib(size).replace(" ", "") if size else "none" for name, size in sizes.items()}
    told |= {"origin": record.origin, "machine": machine_of(record) or "unknown", "device": job.device}
    told |= {"num_layers": job.workload.num_layers, "method": job.method, "steps": job.steps}
    if window := job.options.get("window_size"):
        told["window_size"] = window
    return {name: str(value) for name, value in told.items()}


def table(number: int, records: Sequence[Record], where: Sequence[str] = ()) -> list[FigureRow]:
    """The rows of a case. Raises ValueError where there are none, or where they would mix what must not be mixed."""
    module, chosen = case.load(number), dict(map(_choice, where))
    if not hasattr(module, "pick"):
        raise ValueError(
            f"case {number} is of runs that it makes itself; try {case.call(number)} first, or name their --profile"
        )
    wanted = [
        record
        for record in records
        if record.job.method in module.METHODS
        and record.is_result
        and all(facts(record).get(name, value) == value for name, value in chosen.items())
    ]
    if not wanted:
        told = f" with {' and '.join(where)}" if where else ""
        names = ", ".join(module.METHODS)
        raise ValueError(f"no record here of {names}{told}; try {case.call(number)} first, or run one by hand")
    _check_alike(number, ALIKE, [facts(record) for record in wanted])
    jobs = [record.job for index, record in enumerate(wanted) if record.job not in [one.job for one in wanted[:index]]]
    rows = [row_of(module.METRIC, case.repeats(job, wanted)) for job in jobs]
    found: list[FigureRow] = module.pick(rows)
    if getattr(module, "AXIS", "") != "window_size" and module.METRIC != "params":
        windows = [{"window_size": str(row.window_size)} for row in found if row.status == "ok" and row.window_size]
        _check_alike(number, ("window_size",), windows)
    return found


def _choice(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in CHOICES:
        raise ValueError(f"--where: expected NAME=VALUE with a name of {', '.join(CHOICES)}, got {text!r}")
    return name, value


def _check_alike(number: int, names: Sequence[str], told: Sequence[dict[str, str]]) -> None:
    values = {name: sorted({each[name] for each in told if name in each}) for name in names}
    differing = {name: found for name, found in values.items() if len(found) > 1}
    if differing:
        name, found = next(iter(differing.items()))
        parts = "; ".join(f"{key} ({', '.join(each)})" for key, each in differing.items())
        raise ValueError(
            f"case {number}: these records differ in {parts}, and a figure shows one of each: choose, as with"
            f" --where '{name}={found[0]}', or keep them in folders of their own and name one with --results"
        )
