"""Makes one pandas frame of records, with a row for each record. Figures of any runs, comparisons, the fairness table
and the page's tables are views of this frame. harness.load() returns it for notebooks and scripts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import method
from harness.core.job import Job, Workload
from harness.core.record import Record, read_all
from papers.figures.point import machine_of

if TYPE_CHECKING:
    from pandas import DataFrame

RECORD = "record"  # name of the column of Record objects, which only this project's own code reads
BUDGETS = ("device_bytes", "host_bytes", "disk_bytes", "seconds", "link_bytes_per_second")
# Columns in which all records of the same job are equal.
JOB = [
    "method",
    *(field.name for field in dataclasses.fields(Workload)),
    "options",
    "device",
    *(f"budget_{name}" for name in BUDGETS),
    "steps",
    "warmup",
]
SPEEDS = ("samples_per_second", "median_step_seconds")  # columns that have a value only if the gate passed
# Types of the columns in which all values may be missing, so that pandas cannot infer the type.
TYPES = {
    **dict.fromkeys(
        (*SPEEDS, "first_step_seconds", "load_average", *(f"budget_{name}" for name in BUDGETS)), "float"
    ),
    "is_reference": "bool",
    "is_result": "bool",
    "started": "datetime64[us, UTC]",
}


def load(folder: Path | str) -> DataFrame:
    """Return the records of a folder, oldest first. Warns of files that are not valid records. Raises ValueError if
    there is no such folder."""
    if not Path(folder).is_dir():
        raise ValueError(f"expected a folder of records, got {folder}; try results, which ./run.sh writes")
    records, complaints = read_all(Path(folder))
    for complaint in complaints:
        warnings.warn(complaint, stacklevel=3)
    return of(records.values()).assign(file=[path.name for path in records]).drop(columns=RECORD)


def of(records: Iterable[Record]) -> DataFrame:
    """Return a row for each record, in the given order. The column `record` holds the Record objects."""
    import pandas

    rows = [_row(record) for record in records]
    # gives the names of the columns if there are no records
    nothing = _row(Record(Job(method.reference(), Workload()), "", "ok"))
    return pandas.DataFrame(rows, columns=None if rows else list(nothing)).astype(TYPES)


def _row(record: Record) -> dict[str, Any]:
    job, load = record.job, record.job.workload
    load_average = record.machine.get("load_average")
    return {
        "method": job.method,
        **dataclasses.asdict(load),
        "num_params": load.num_params,
        "options": options(record),
        "device": job.device,
        **{f"budget_{name}": getattr(job.budget, name) for name in BUDGETS},
        "steps": job.steps,
        "warmup": job.warmup,
        "origin": record.origin,
        "machine": machine_of(record),
        "place": record.machine.get("on", ""),
        # a record may hold any value here
        "load_average": load_average if isinstance(load_average, float) else None,
        "source": record.software.get("source", ""),
        "commit": record.software.get("commit", ""),
        "key": record.key,
        "started": datetime.fromtimestamp(record.started, UTC) if record.started else None,
        "clock": record.clock,
        "status": record.status,
        "phase": record.phase,
        "verdict": record.gate.verdict,
        "samples_per_second": record.samples_per_second,
        "median_step_seconds": record.median_step_seconds if record.samples_per_second else None,
        "first_step_seconds": record.first_step_seconds,
        "step_seconds": record.step_seconds,
        "num_timed_steps": len(record.timed_seconds),
        **{f"{name}_bytes": size for name, size in record.peaks.items()},
        "reason": record.reason or record.gate.text,
        "is_reference": job.method == method.reference(),
        "is_result": record.is_result,
        RECORD: record,
    }


def options(record: Record) -> str:
    """Return a record's options as text. `world_size=1` is left out, because it is the default of every method."""
    told = {name: value for name, value in record.job.options.items() if (name, value) != ("world_size", 1)}
    return ", ".join(f"{name}={value}" for name, value in told.items())
