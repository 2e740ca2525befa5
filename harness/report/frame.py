"""A folder of records as a DataFrame, a row each: what a notebook or a script of one's own begins with."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from pandas import DataFrame

from harness.core import method
from harness.core.job import Job, Workload
from harness.core.record import Record, read_all
from harness.report.tables import options


def load(folder: Path | str) -> DataFrame:
    """Oldest first. A speed stands only where the gate passed; warns of files that are no records. Raises ValueError
    where there is no such folder."""
    if not Path(folder).is_dir():
        raise ValueError(f"expected a folder of records, got {folder}; try results, which ./run.sh writes")
    records, complaints = read_all(Path(folder))
    for complaint in complaints:
        warnings.warn(complaint, stacklevel=3)
    reference = method.reference()
    rows = [_row(path, record) | {"is_reference": record.job.method == reference} for path, record in records.items()]
    if not rows:  # the columns are there
        job = Job(reference, Workload())
        nothing = _row(Path(), Record(job, "", "ok")) | {"is_reference": True}
        return DataFrame(columns=list(nothing)).astype({"samples_per_second": float, "is_reference": bool})
    return DataFrame(rows).astype({"samples_per_second": float})


def _row(path: Path, record: Record) -> dict[str, Any]:
    job, load = record.job, record.job.workload
    return {
        "method": job.method,
        **dataclasses.asdict(load),
        "num_params": load.num_params,
        "options": options(record),
        "device": job.device,
        "steps": job.steps,
        "warmup": job.warmup,
        "origin": record.origin,
        "status": record.status,
        "verdict": record.gate.verdict,
        "samples_per_second": record.samples_per_second,
        "num_timed_steps": len(record.timed_seconds),
        **{f"{name}_bytes": size for name, size in record.peaks.items()},
        "reason": record.reason or record.gate.text,
        "file": path.name,
    }
