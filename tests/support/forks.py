"""A fresh process without a fresh import: forked from one that has imported torch, and run nothing."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from harness.base import fork_server
from harness.core.job import Job
from harness.core.record import new_stem

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.support.preloaded"])


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a new process, on this one's cores; return, or raise, what it did."""
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        return pool.submit(_on_cores, os.sched_getaffinity(0), function, arguments).result()


def _on_cores(cores: set[int], function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    os.sched_setaffinity(0, cores)  # the server may have been started on others
    return function(*arguments)


def ask(module: str, arguments: Any) -> Any:
    """In place of harness.base.child_process.ask(): the module's answer, in a process that has torch already."""
    try:
        return json.loads(call(answer, module, json.dumps(arguments)).splitlines()[-1])
    except Exception as error:
        raise ValueError(f"{module} failed: {type(error).__name__}: {error}") from error


def answer(module: str, arguments: str) -> str:
    """Return what the module's main() prints."""
    sys.stdin, output = io.StringIO(arguments), io.StringIO()
    with contextlib.redirect_stdout(output):
        importlib.import_module(module).main()
    return output.getvalue()


@contextlib.contextmanager
def own_server() -> Iterator[None]:
    """Let another process fork workers, and end it; the one before, which took seconds to start, is kept."""
    before, fork_server._server = fork_server._server, None
    try:
        yield
    finally:
        fork_server.close()
        fork_server._server = before


def launch(
    job: Job,
    key: Callable[[], str],
    results: Path,
    folders: tuple[Path, ...],
    report: Callable[[dict[str, Any]], None],
    recorded: Callable[[str], Path | None],
    **turn: Any,
) -> Path:
    """In place of harness.run.launch: what the worker tells and records, less what its parent sees of its process."""
    if existing := recorded(before := key()):
        return existing
    path = Path(f"{new_stem(results, job)}.json")
    for event in call(_train, job, before, folders, path):
        report(event)
    return path


def _train(job: Job, key: str, folders: tuple[Path, ...], path: Path) -> list[dict[str, Any]]:
    """Leave the record; return the events."""
    from harness.run import worker

    events: list[dict[str, Any]] = []
    worker.train_here(job, key, folders, events.append).write(path)
    return events
