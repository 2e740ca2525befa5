"""From records to points: the records that count, one frame of them, and a row for each job (FigureRow).

record_frame() has a row for each record. Figures of any runs, comparisons, the fairness table and the page's tables are
views of this frame, and harness.load() returns it for notebooks and scripts. points() has a row for each job, made from
the job's repeats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import method
from harness.core.job import Job, Workload, gib
from harness.core.record import Record, read_all
from harness.devices.machine import PACKAGES
from harness.jobs.job_key import files_read_by, method_context, method_identity
from papers.figures.point import FigureRow, machine_of, row_of

if TYPE_CHECKING:
    from pandas import DataFrame

RECORD_COLUMN = "record"  # name of the column of Record objects, which only this project's own code reads
BUDGET_FIELDS = ("device_bytes", "host_bytes", "disk_bytes", "seconds", "link_bytes_per_second")
# Columns in which all records of the same job are equal.
JOB_COLUMNS = [
    "method",
    *(field.name for field in dataclasses.fields(Workload)),
    "options",
    "device",
    *(f"budget_{name}" for name in BUDGET_FIELDS),
    "steps",
    "warmup",
]
SPEED_COLUMNS = (
    "samples_per_second",
    "median_step_seconds",
)  # columns that have a value only if the gate passed
# Types of the columns in which all values may be missing, so that pandas cannot infer the type.
COLUMN_TYPES = {
    **dict.fromkeys(
        (*SPEED_COLUMNS, "first_step_seconds", "load_average", *(f"budget_{name}" for name in BUDGET_FIELDS)),
        "float",
    ),
    "is_reference": "bool",
    "is_result": "bool",
    "started": "datetime64[us, UTC]",
}
WORKLOAD_FACTS = (
    "dtype",
    "hidden_size",
    "num_heads",
    "batch_size",
    "micro_batches",
    "seq_len",
    "vocab_size",
    "dropout",
)
# columns that must be equal in all runs of a figure
FACTS_OF_FIGURE = ("origin", "machine", "device", *WORKLOAD_FACTS, "device_memory", "host_memory")
SELECTABLE_FACTS = (
    *FACTS_OF_FIGURE,
    "window_size",
    "num_layers",
    "method",
    "steps",
)  # names that --where accepts


def load_frame(folder: Path | str) -> DataFrame:
    """Return the records of a folder, oldest first. Warns of files that are not valid records. Raises ValueError if
    there is no such folder."""
    if not Path(folder).is_dir():
        raise ValueError(f"expected a folder of records, got {folder}; try results, which ./run.sh writes")
    records, complaints = read_all(Path(folder))
    for complaint in complaints:
        warnings.warn(complaint, stacklevel=3)
    return (
        record_frame(records.values())
        .assign(file=[path.name for path in records])
        .drop(columns=RECORD_COLUMN)
    )


def record_frame(records: Iterable[Record]) -> DataFrame:
    """Return a row for each record, in the given order. The column `record` holds the Record objects."""
    import pandas

    rows = [_frame_row(record) for record in records]
    # an empty frame has the columns of any record
    example = _frame_row(Record(Job(method.reference(), Workload()), "", "ok"))
    return pandas.DataFrame(rows, columns=None if rows else list(example)).astype(COLUMN_TYPES)


def _frame_row(record: Record) -> dict[str, Any]:
    job, workload = record.job, record.job.workload
    load_average = record.machine.get("load_average")
    return {
        "method": job.method,
        **dataclasses.asdict(workload),
        "num_params": workload.num_params,
        "options": record_options_text(record),
        "device": job.device,
        **{f"budget_{name}": getattr(job.budget, name) for name in BUDGET_FIELDS},
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
        RECORD_COLUMN: record,
    }


def record_options_text(record: Record) -> str:
    """Return a record's options as text. `world_size=1` is left out, because it is the default of every method."""
    options = record.job.options.items()
    return ", ".join(f"{name}={value}" for name, value in options if (name, value) != ("world_size", 1))


def record_facts(record: Record) -> dict[str, str | None]:
    """Return a record's facts as text, with the names and values that --where accepts. A fact is None if an imported
    log does not give it."""
    job, workload = record.job, record.job.workload
    window = job.options.get("window_size")
    values: dict[str, str | None] = {
        "origin": record.origin,
        "machine": machine_of(record) or "unknown",
        "device": job.device,
        **{name: str(getattr(workload, name)) for name in WORKLOAD_FACTS},
        "device_memory": _memory_text(job.budget.device_bytes),
        "host_memory": _memory_text(job.budget.host_bytes),
        "window_size": str(window) if window else None,
        "num_layers": str(workload.num_layers),
        "method": job.method,
        "steps": str(job.steps),
    }
    unsaid = set(WORKLOAD_FACTS).intersection(record.evidence.get("unsaid", ()))
    return values | dict.fromkeys(unsaid)


def _memory_text(size: int | None) -> str:
    return gib(size).replace(" ", "") if size else "none"


def selected_values(where: Sequence[str]) -> dict[str, str]:
    """Return the values to select, by name of a fact. Each text of `where` is NAME=VALUE. Raises ValueError if one is
    not."""
    values = {}
    for text in where:
        name, equals, value = text.partition("=")
        if not equals or name not in SELECTABLE_FACTS:
            names = ", ".join(SELECTABLE_FACTS)
            raise ValueError(f"--where: expected NAME=VALUE with a name of {names}, got {text!r}")
        values[name] = value
    return values


def has_selected_values(record: Record, values: Mapping[str, str]) -> bool:
    """True if the record's facts have these values. A fact that the record does not give has any value."""
    facts = record_facts(record)
    return all(facts[name] in (None, value) for name, value in values.items())


def check_alike(number: int, values: Mapping[str, Iterable[str | None]]) -> None:
    """Raise ValueError if a setting has several values among the records of case `number`. `values`: by name of a
    setting, its value in each record."""
    texts = {name: sorted({text for text in column if text is not None}) for name, column in values.items()}
    differing = {name: several for name, several in texts.items() if len(several) > 1}
    if differing:
        name, several = next(iter(differing.items()))
        parts = "; ".join(f"{setting} ({', '.join(texts[setting])})" for setting in differing)
        raise ValueError(
            f"case {number}: expected records with one value of each setting, got several: {parts}; try"
            f" --where '{name}={several[0]}', or --results with a folder for each value"
        )


_cached_context_facts = functools.cache(method_context)


def current_key(job: Job) -> str:
    """Return the key that the record of this resolved job would have if the job ran here now."""
    return job.key(**_cached_context_facts(job.method, files_read_by(job)), **method_identity(job))


def is_current(record: Record) -> bool:
    """True if the record's job would get the same key if it ran here now: the code and the machine are still those of
    the record."""
    with contextlib.suppress(ValueError):  # the method no longer has one of the record's options
        return record.job.method in method.names() and record.key == current_key(record.job)
    return False


def of_newest_code(records: Sequence[Record]) -> list[Record]:
    """Return the runs that were made by the code (a method's source, and the packages) of the newest run by the same
    trainer, and those that tell no source, such as refusals by plan. `records`: oldest first."""
    newest_code = {trainer_of(record): _code_of(record) for record in records if _code_of(record)}
    return [
        record
        for record in records
        if not (code := _code_of(record)) or code == newest_code[trainer_of(record)]
    ]


def trainer_of(record: Record) -> tuple[str, str | None]:
    """Return what trained: the method, and the release of its engine if that is not the installed one."""
    with contextlib.suppress(ValueError):  # the method no longer exists
        if option := method.load(record.job.method).release_option:
            return record.job.method, record.job.options.get(option)
    return record.job.method, None


def _code_of(record: Record) -> tuple[str | None, ...]:
    software = record.software
    if not software.get("source"):
        return ()
    return software["source"], *(software.get(name) for name in PACKAGES)


def repeats_of(job: Job, records: Sequence[Record]) -> list[Record]:
    """Return the repeats of a job: its records that have the same key as its newest record.

    A record of the job has the job's options, and may have further ones. If any record is a result, interrupted
    attempts are left out. If any run was started, refusals by plan are left out.
    """
    job_records = [
        record
        for record in records
        if dataclasses.replace(record.job, options={}) == dataclasses.replace(job, options={})
        and job.options.items() <= record.job.options.items()
    ]
    job_records = [record for record in job_records if record.is_result] or job_records
    job_records = [record for record in job_records if record.phase != "plan"] or job_records
    return of_newest_key(job_records)


def of_newest_key(records: Sequence[Record]) -> list[Record]:
    """Return the records that have the key of the last one."""
    return [record for record in records if record.key == records[-1].key]


def rows_of_jobs(
    metric: str, records: Sequence[Record], jobs: Sequence[Job] | None = None
) -> list[FigureRow]:
    """Return a row for each job that has a record; jobs without a record are left out. `jobs`: None: all jobs of the
    records, in the order of their first records."""
    if jobs is None:
        jobs = [record.job for record in record_frame(records).drop_duplicates(JOB_COLUMNS)[RECORD_COLUMN]]
    return [row_of(metric, job_repeats) for job in jobs if (job_repeats := repeats_of(job, records))]
