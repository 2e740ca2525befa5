"""Holds the record of a run against the identity that the run had when it began: what its processes executed, and
whether its code or data changed meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.base.executed_code import Executed
from harness.core.job import Job
from harness.core.record import Record
from harness.core.source_hash import Listed


def code_facts(
    before: Listed, executed: Sequence[Executed], identify: Callable[[], Listed]
) -> dict[str, Any]:
    """Return the facts of a record's `software` about the code that the run executed.

    `before`: the code's identity when the run began; `executed`: the notes of all its processes; `identify`: returns
    the present identity. A run always notes some code, so a run without notes has lost them.
    """
    code: dict[str, Any] = {"source": before.source}
    if unlisted := before.lacks(executed) if executed else ["code that it did not note"]:
        code["unlisted"] = unlisted
    try:
        after = identify()
    except (OSError, ValueError) as error:  # the method's file is gone
        return code | {"changed": [str(error)]}
    changed = before.changed(executed, after)
    if changed or after.source != before.source:
        code["changed"] = changed or ["its code"]
    return code


def marked(
    paths: Sequence[Path], jobs: Sequence[tuple[Job, str]], key: Callable[[Job], str]
) -> Sequence[Path]:
    """Let the records of jobs that ran at another place say so if a job's key has changed meanwhile: the place ran the
    code of this checkout. `jobs`: the jobs with the keys that they had before."""
    for path, (job, _) in zip(paths, jobs, strict=True):
        unless_changed(Record.read(path), partial(key, job)).write(path)
    return paths


def unless_changed(record: Record, key: Callable[[], str]) -> Record:
    """Return the record, which says so if its key is no longer the job's: the data or the machine have changed. `key`:
    returns the job's present key."""
    try:
        after = key()
    except (OSError, ValueError) as error:  # a file of the data is gone
        after = str(error)
    if after == record.key or "changed" in record.software:
        return record
    return dataclasses.replace(
        record, software={**record.software, "changed": [f"its key, {record.key} to {after}"]}
    )
