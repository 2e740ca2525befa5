"""Records as finished runs leave them, made without a run, and a folder that holds them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from harness.core.job import Job
from harness.core.record import Gate, Record

PASSED = Gate("exact")


def record(job: Job, seconds: float = 1.0, **changes: Any) -> Record:
    """The record of a job that trained as the reference does, each step in so many seconds."""
    made = Record(job, "key", "ok", step_seconds=[seconds] * job.steps, losses=[1.0] * job.steps, gate=PASSED)
    return dataclasses.replace(made, **changes)


def write(folder: Path, *records: Record) -> Path:
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(records):
        one.write(folder / f"log_{number}.json")
    return folder
