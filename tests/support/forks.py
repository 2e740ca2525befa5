"""A fresh process without a fresh import: forked from one that has imported torch, and run nothing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from harness.core.job import Job
from harness.core.record import new_stem

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.support.on_sim", "harness.run.inspect_training", "harness.run.worker"])


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a new process; return, or raise, what it did."""
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        return pool.submit(function, *arguments).result()


def launch(
    job: Job, key: str, results: Path, folders: tuple[Path, ...], report: Callable[[dict[str, Any]], None],
    recorded: Callable[[], Path | None],
) -> Path:  # fmt: skip
    """In place of harness.run.launch: what the worker tells and records, less what its parent sees of its process."""
    if found := recorded():
        return found
    path = Path(f"{new_stem(results, job)}.json")
    for event in call(_train, job, key, folders, path):
        report(event)
    return path


def _train(job: Job, key: str, folders: tuple[Path, ...], path: Path) -> list[dict[str, Any]]:
    """Leave the record; return the events."""
    from harness.run import worker

    events: list[dict[str, Any]] = []
    worker.run(job, key, folders, events.append).write(path)
    return events
