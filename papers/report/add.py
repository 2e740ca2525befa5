"""Takes in results that others send: an archive that `bundle` wrote, or a folder of results. The results are stored in
a folder beside one's own records.

Only records, logs of runs and trainings of probes are taken; figures and reports are made anew. Everything is read and
checked before anything is written. Each run is judged again by the records that came with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.base.console import counted, readable
from harness.base.foreign_file import LISTABLE_NAME, MOST_FILES, parsed_json, read_archive, read_bytes
from harness.base.whole_file import own_folder
from harness.core.job import params_text
from harness.core.record import ADDED, Record, added_folders, marks, read_all
from harness.gate import probe
from harness.gate.archive import Archive
from harness.models import named_models
from papers.figures.point import machine_of
from papers.report.bundle import FOLDER, MANIFEST

# endings of the files that an archive may hold
ENDINGS = (".json", ".txt", ".csv", ".pdf", ".png", ".html", ".md")
TAKEN = re.compile(rf"(?:{probe.FOLDER}/)?log_[\w .,+=@~-]+\.json|log_[\w .,+=@~-]+\.txt")


def add(source: Path, results: Path) -> Iterator[str]:
    """Write the new records of an archive or a folder into new folders in `results`, one for each machine. Yield a line
    for each record, and the path of each new folder.

    Raises ValueError, before anything is written, if a file is not as this project writes it, or if no record is new.
    """
    files = _of_folder(source) if source.is_dir() else read_archive(source, FOLDER, MANIFEST, ENDINGS)
    taken = {name: data for name, data in files.items() if TAKEN.fullmatch(name)}
    sent = {name: _record(source, name, data) for name, data in taken.items() if name.endswith(".json")}
    configs = _known_configs(results)
    kept = {name: record for name, record in sent.items() if record.job.workload.config in configs}
    probes = {name: record for name, record in kept.items() if name.startswith(f"{probe.FOLDER}/")}
    runs = {name: record for name, record in kept.items() if name not in probes and record.origin == "run"}
    new = _new(runs, results)
    if not new:
        problem = (
            f"expected a new run, got {len(runs)} known" if runs else "expected a record of a run, got none"
        )
        others = f" of a model that is known here; {_of_others(sent, kept)}" if len(kept) < len(sent) else ""
        raise ValueError(f"{source}: {problem}{others}; nothing was added")
    archive = Archive(list(runs.values()), list(probes.values()))
    judged = {name: _judged(source, name, record, archive) for name, record in new.items()}
    if len(new) < len(runs):
        yield f"left out: {len(runs) - len(new)} of {counted(len(runs), 'run')}, there already"
    if len(kept) < len(sent):
        yield f"{_of_others(sent, kept)}, then add again"
    if logs := len(kept) - len(runs) - len(probes):
        yield f"left out: {counted(logs, 'imported log')}: ask for the logs, which ./run.sh import reads"
    for machine in sorted({machine_of(record) for record in new.values()}):
        machine_records = {name: record for name, record in judged.items() if machine_of(record) == machine}
        beside_it = {name: record for name, record in probes.items() if machine_of(record) == machine}
        texts = {
            name: taken[name]
            for name in (f"{path.removesuffix('.json')}.txt" for path in machine_records)
            if name in taken
        }
        for name, record in machine_records.items():
            yield _line(record, new[name])
        yield str(_write(results, machine, {**machine_records, **beside_it}, texts))


def _known_configs(results: Path) -> set[str | None]:
    """Return the configurations of models whose records are taken: those of models.yaml and of the records in
    `results`; None stands for the GPT. To learn another model's sizes, its modules must be made, with tensors as large
    as the sender chose."""
    named = (named_models.load(name) for name in named_models.names())
    recorded = (record.job.workload.config for record in read_all(results)[0].values())
    return {None, *recorded, *(model.sizes.get("config") for model in named)}


def _of_others(sent: dict[str, Record], taken: dict[str, Record]) -> str:
    names = sorted(
        {f"{record.job.workload.model_name:.60}" for name, record in sent.items() if name not in taken}
    )
    first_names = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    records = counted(len(sent) - len(taken), "record")
    return f"left out: {records} of models that are not known here ({first_names}): train them first"


def _of_folder(folder: Path) -> dict[str, bytes]:
    """Return the records and logs of a folder of results, by their paths in it. Raises ValueError if one of them is a
    link or a device."""
    paths = [
        *folder.glob("log_*.json"),
        *folder.glob("log_*.txt"),
        *(folder / probe.FOLDER).glob("log_*.json"),
    ]
    if len(paths) > MOST_FILES:
        raise ValueError(f"{folder}: expected at most {MOST_FILES} records and logs, got {len(paths)}")
    if (folder / probe.FOLDER).is_symlink():
        raise ValueError(f"{folder / probe.FOLDER}: expected a folder, got a symbolic link")
    files = {}
    for path in paths:
        if not LISTABLE_NAME.fullmatch(path.name):
            raise ValueError(f"{path}: expected a file name of letters, digits, blanks and . , + = @ ~ -")
        try:
            files[path.relative_to(folder).as_posix()] = read_bytes(path)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; nothing was added") from error
    return files


def _record(source: Path, name: str, data: bytes) -> Record:
    try:
        return Record.from_dict(parsed_json(data.decode(errors="replace")))
    except ValueError as error:
        raise ValueError(f"{source}: {name} is not a record: {error}; nothing was added") from error


def _new(runs: dict[str, Record], results: Path) -> dict[str, Record]:
    """Return the runs that are new: not in `results`, nor in a folder that was added to it. Of equal runs, one is
    kept."""
    folders = (results, *added_folders(results))
    known: set[Any] = set()
    for folder in folders:
        for record in read_all(folder)[0].values():
            known.update(marks(record))
    new = {}
    for name, record in sorted(runs.items()):
        if not known.intersection(run_marks := marks(record)):
            new[name] = record
        known.update(run_marks)
    return new


def _judged(source: Path, name: str, record: Record, archive: Archive) -> Record:
    try:
        return dataclasses.replace(record, gate=archive.judge(record))
    except ValueError as error:
        raise ValueError(f"{source}: {name}: {error}; nothing was added") from error


def _write(results: Path, machine: str, records: dict[str, Record], texts: dict[str, bytes]) -> Path:
    """Write the records of one machine, and the texts of their logs, into a new folder; return its path. Other programs
    see the folder only when it is complete."""
    identity = hashlib.sha256(
        "".join(sorted(f"{record.key}{record.started}" for record in records.values())).encode()
    )
    name = re.sub(r"[^A-Za-z0-9]+", "-", machine).strip("-")[:60] or "unnamed"
    folder = own_folder(results / ADDED) / f"{name}-{identity.hexdigest()[:8]}"
    stage = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder.parent))
    try:
        (stage / probe.FOLDER).mkdir()
        for path, record in records.items():
            record.write(stage / path)
        for path, text in texts.items():
            (stage / path).write_text(readable(text.decode(errors="replace")))
        stage.chmod(0o755)
        stage.rename(folder)
    except BaseException:
        shutil.rmtree(stage)
        raise
    return folder


def _line(record: Record, sent: Record) -> str:
    load, speed = record.job.workload, record.samples_per_second
    size = (
        f"{record.job.method}, {counted(load.num_layers, 'layer')}, {params_text(load.num_params)} parameters"
    )
    if record.status != "ok":
        return f"{size}: ended as {record.status}"
    gate_text = f"gate {record.gate.verdict}: {record.gate.text}"
    was = f" (sent as {sent.gate.verdict})" if sent.gate.verdict != record.gate.verdict else ""
    return f"{size}: {f'{speed:.4g} samples/s' if speed else 'no throughput'}; {gate_text}{was}"
