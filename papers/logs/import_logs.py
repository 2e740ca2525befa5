"""Imports logs as records of origin `imported`: finds the logs, reads them, judges them and writes the records.

A log is judged together with all logs of its folder, even those that this call does not import. So its verdict does not
depend on the order of calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from harness.base.console import counted
from harness.base.foreign_file import parsed_json
from harness.core import method
from harness.core.job import Room, Workload, params_text
from harness.core.log_lines import BUILD_LOG
from harness.core.record import Record, log_stem, read_all
from papers.logs import judge_curves
from papers.logs.parse import LOG_NAME, NotALog, read_log
from papers.logs.to_record import to_record

SUFFIXES = (".txt", ".log")  # endings of the files in a folder that may be logs
BUILD_LOGS = BUILD_LOG.format("*")  # names of compilers' logs, which are not logs of a training


def import_logs(
    paths: Iterable[Path], results: Path, reference: str | None, skipped: Callable[[Path, str], None]
) -> Iterator[tuple[Record, bool]]:
    """Yield the judged record of each log, and True if the record is new in `results`.

    `skipped`: called with each file that is no log, and the reason. `reference`: name of the method whose logs the
    others are compared with; None: a method that keeps everything on the device. Raises ValueError if no log is of the
    named method.
    """
    paths_by_folder: dict[Path, list[Path]] = {}
    for path in _find(paths):
        paths_by_folder.setdefault(path.parent, []).append(path)
    path_of_key: dict[str, Path] = {}  # by key of a record: the log that this call read it from
    imported = {
        record.key: path for path, record in read_all(results)[0].items() if record.origin == "imported"
    }
    by_folder = {folder: _read_folder(folder, logs) for folder, logs in paths_by_folder.items()}
    names = sorted({record.job.method for records, _ in by_folder.values() for record in records.values()})
    if reference is not None and names and reference not in names:
        raise ValueError(
            f"--reference: expected a method of these logs ({', '.join(names)}), got {reference!r}"
        )
    for folder, (records, complaints) in by_folder.items():
        gates = judge_curves.judge_all(list(records.values()), references(records.values(), reference))
        gate_of_path = dict(zip(records, gates, strict=True))
        for path in paths_by_folder[folder]:
            if path in complaints:
                skipped(path, complaints[path])
                continue
            record = dataclasses.replace(records[path], gate=gate_of_path[path])
            first_path = path_of_key.setdefault(record.key, path)
            if first_path != path:
                skipped(path, f"the same log as {first_path.name}")
                continue
            try:
                Record.from_dict(parsed_json(json.dumps(record.to_dict())))
            except ValueError as error:
                skipped(path, f"no verb could read its record: {error}")
                continue
            yield record, _write_record(record, path, results, imported)


def references(records: Iterable[Record], reference: str | None = None) -> list[str]:
    """Return the methods that may be the reference for a folder's logs, best first.

    `reference`: the only method to return; None: return all methods whose plan keeps everything on the device, this
    project's own reference first.
    """
    if reference is not None:
        return [reference]
    known_methods = {record.job.method for record in records} & set(method.names())
    plans = {name: method.create(name, {}).plan(Workload(), Room()) for name in known_methods}
    resident = [name for name, plan in plans.items() if not plan.host_bytes and not plan.disk_bytes]
    return sorted(resident, key=lambda name: (name != method.reference(), name))


def _find(paths: Iterable[Path]) -> list[Path]:
    """Return the files in `paths` and, for each folder in `paths`, the possible logs in it; each path only once."""
    files: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            files[Path(os.path.abspath(path))] = None
            continue
        for folder, _, names in sorted(os.walk(path)):
            for name in sorted(names):
                if name.endswith(SUFFIXES) and not fnmatchcase(name, BUILD_LOGS):
                    files[Path(os.path.abspath(folder), name)] = None
    return list(files)


def _read_folder(folder: Path, paths: list[Path]) -> tuple[dict[Path, Record], dict[Path, str]]:
    """Read all logs in the folder, whether they were asked for or not. Return the records by path and, for each file
    that is no log, the reason."""
    records, complaints = {}, {}
    logs_in_folder: set[Path] = set()
    with contextlib.suppress(OSError):
        # the files of a folder may be readable although the folder cannot be listed
        logs_in_folder = {path for path in folder.iterdir() if LOG_NAME.fullmatch(path.name)}
    for path in sorted({*paths, *logs_in_folder}):
        try:
            if not path.is_file():
                raise NotALog("not a file")
            # from_dict() checks the record, as if it were read from a file
            records[path] = Record.from_dict(to_record(read_log(path), path.name).to_dict())
        except (OSError, ValueError) as error:
            complaints[path] = str(getattr(error, "strerror", None) or error)
    return records, complaints


def _write_record(record: Record, log: Path, results: Path, imported: dict[str, Path]) -> bool:
    """Write the record to a file whose name follows the published pattern. Return False, and write nothing, if the same
    record is there already."""
    path = imported.get(record.key)
    if path is not None and json.loads(path.read_text()) == json.loads(json.dumps(record.to_dict())):
        return False
    path = path or _free_path(results, record, log)
    record.write(path)
    imported[record.key] = path
    return True


def _free_path(results: Path, record: Record, log: Path) -> Path:
    """Return a path that follows the published pattern and is free. The time in its name is the record's start, plus as
    many seconds as are needed to make the name free."""
    for second in itertools.count(int(record.started)):
        stem = log_stem(record.job, record.evidence["named_window"], second)
        paths = [results / f"{stem}{suffix}" for suffix in (".json", *SUFFIXES)]
        if not any(os.path.lexists(path) and path != log for path in paths):
            return paths[0]
    raise AssertionError("seconds do not end")


def record_line(record: Record) -> str:
    """Return one line of text about an imported log: method, size, status, logged medians, verdict and its reason."""
    job, logged = record.job, record.evidence["samples_per_second"]
    options = "".join(f" {name}={value}" for name, value in job.options.items())
    size = f"{counted(job.workload.num_layers, 'layer')}, {params_text(job.workload.num_params)} parameters"
    speed = f", median {statistics.median(logged):.5f} samples/s logged" if logged else ""
    times = zip(record.evidence["iterations"], record.evidence["elapsed_ms"], strict=True)
    steady_ms = [elapsed for iteration, elapsed in times if elapsed and iteration > record.interval_steps]
    steady = f", {statistics.median(steady_ms):.1f} ms a step after the first interval" if steady_ms else ""
    verdict = f"passed ({record.gate.verdict})" if record.gate.passed else record.gate.verdict
    reason = f" ({record.gate.reason})" if record.gate.reason else ""
    status = record.status + (f" {record.reason}" if record.reason else "")
    doubts = "".join(f"; but {doubt}" for doubt in record.evidence["doubts"])
    return f"{job.method}{options}, {size}: {status}{speed}{steady}; gate {verdict}{reason}: {record.gate.text}{doubts}"
