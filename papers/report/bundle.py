"""The archive of results: packs everything that was measured (records, logs, figures, report) with a manifest of sha256
sums, and adds an archive, or a folder of results, that others send.

To pack, the names of hosts, users and folders are removed first. Figures and report are then made from the cleaned
records. The same results give the same bytes. Every verb that has --results can read the unpacked folder.

To add, only records, logs of runs and trainings of probes are taken; figures and reports are made anew. Everything is
read and checked before anything is written. Each run is judged again by the records that came with it. The results are
stored in a folder beside one's own records.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cases import overlap
from harness.base.console import counted, readable
from harness.base.foreign_file import (
    LISTABLE_NAME,
    MOST_FILES,
    parsed_json,
    read_archive,
    read_bytes,
    read_text,
)
from harness.base.whole_file import check_replaceable, own_folder, write_whole
from harness.core import method
from harness.core.job import params_text
from harness.core.record import ADDED, STATUSES, VERDICTS, Record, added_folders, marks, read_all
from harness.devices import named_machines
from harness.devices.machine import PACKAGES
from harness.gate import probe
from harness.gate.archive import Archive
from harness.models import named_models
from harness.run import timeline
from papers.claims import verify
from papers.figures import case, case_files
from papers.figures import profile as scaled
from papers.figures.point import machine_of
from papers.report import page, redact
from papers.report.redact import Names

FOLDER, MANIFEST, ABOUT = "bundle", "MANIFEST.sha256", "README.txt"
# attributes of every archived file
PLAIN_ATTRIBUTES: Any = {"mtime": 0, "mode": 0o644, "uid": 0, "gid": 0, "uname": "", "gname": ""}
GZIP_HEAD = b"\x1f\x8b"  # how an archive begins
# endings of the files that an archive may hold
ENDINGS = (".json", ".txt", ".csv", ".pdf", ".png", ".html", ".md")
TAKEN_NAMES = re.compile(rf"(?:{probe.FOLDER}/)?log_[\w .,+=@~-]+\.json|log_[\w .,+=@~-]+\.txt")
README_TEXT = (Path(__file__).parent / "bundle_readme.txt").read_text()


def write_archive(results: Path, out: Path | None = None, names: Names | None = None) -> Path:
    """Write the archive of these results, and return its path.

    `out`: the archive's path; None: a file in `results`. `names`: the names to remove from all files; None: those of
    this machine. Raises ValueError if there is no record, OSError if the archive cannot be written.
    """
    archive = out or results / f"{FOLDER}.tar.gz"
    check_replaceable(archive, GZIP_HEAD)
    with tempfile.TemporaryDirectory(prefix="bundle-") as folder:
        stage = Path(folder) / FOLDER
        stage.mkdir()
        records = list(read_all(results)[0].values())
        hosts = [
            host
            for record in records
            for host in redact.hosts_of_node_list(str(record.machine.get("nodes", "")))
        ]
        _fill_archive(stage, results, names or redact.names_to_remove(known_words(records), hosts))
        paths = sorted(path.relative_to(stage) for path in stage.rglob("*") if path.is_file())
        lines = [
            f"{hashlib.sha256((stage / path).read_bytes()).hexdigest()}  {path.as_posix()}\n"
            for path in paths
        ]
        (stage / MANIFEST).write_text("".join(lines))
        packed = _packed(stage, [Path(MANIFEST), *paths])
    archive.parent.mkdir(parents=True, exist_ok=True)
    write_whole(archive, packed)
    return archive


def known_words(records: Iterable[Record]) -> set[str]:
    """Return the words that have a meaning in records. Redaction keeps these words, even if a host or a user has such a
    name."""
    machines = named_machines.names()
    known = {*STATUSES, *VERDICTS, *method.names(), *PACKAGES, *scaled.PROFILE_NAMES, *machines}
    known |= {f"{name}_{on}" for name in scaled.PROFILE_NAMES for on in machines}
    for record in records:
        known |= {
            record.job.method,
            record.job.device,
            record.clock,
            record.origin,
            record.phase,
            record.gate.reason,
        }
        known |= set(_keys(record.to_dict()))
        known |= {
            value for value in record.job.options.values() if isinstance(value, str) and "/" not in value
        }
    return known


def _keys(value: Any) -> Iterable[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _keys(item)


def _fill_archive(stage: Path, results: Path, names: Names) -> None:
    """Write the records and logs into `stage`, with `names` removed. Then, for each machine, make figures and a report
    from the written records."""
    recorded, complaints = page.read_records(results)
    for complaint in complaints:
        print(f"warning: {complaint}", file=sys.stderr)
    paths = list(_listable(recorded))
    records = [Record.from_dict(names.value(recorded[path].to_dict())) for path in paths]
    for path, record in zip(paths, records, strict=True):
        record.write(stage / names.text(path.name))
    _fill_probes(stage / probe.FOLDER, results / probe.FOLDER, names)
    for path in _listable(sorted(results.glob("log_*.txt"))):
        _put_text(path, stage / names.text(path.name), names)
    traces = results / "traces"
    if traces.is_symlink():
        print(f"left out: {traces}: expected a folder, got a symbolic link", file=sys.stderr)
    else:
        for path in _listable(sorted(traces.glob("*.json"))):
            _put_trace(path, stage, names)
    machines = sorted({machine_of(record) for record in records if record.origin == "run"})
    for machine in machines or (None,):
        # each of several machines has a folder of its own for figures and report
        subfolder = re.sub(r"[^\w.-]+", "-", machine) if machine and len(machines) > 1 else ""
        machine_records = verify.of_one_machine(records, machine if subfolder else None)
        for case_profile, number, _ in page.case_tables(machine_records, results):
            for path in case.load_case(number).kept(case_profile, results):
                if path.resolve() == path and [*_listable([path])]:
                    # skip links, which could lead out of the folder
                    _put_text(path, stage / path.relative_to(results.resolve()), names)
            figures = stage / "figures" / subfolder
            table = case_files.extract(number, case_profile, machine_records, figures, results)
            case_files.draw(number, table)
        for profile, timelines in page.traced_timelines(machine_records, stage):
            overlap.write_timeline_table(timelines, profile, stage / "figures" / subfolder)
            overlap.draw_timelines(timelines, profile, stage / "figures" / subfolder)
        machine_name = machine if subfolder else None
        page.write_report(stage, stage / "report" / subfolder / page.PAGE, None, machine_name)
    (stage / ABOUT).write_text(README_TEXT.format(records=counted(len(records), "record"), manifest=MANIFEST))


def _fill_probes(stage: Path, probes: Path, names: Names) -> None:
    """Write the records of the gate's probes, with `names` removed. With these records, whoever receives the archive
    can judge the runs again."""
    if probes.is_symlink():
        print(f"left out: {probes}: expected a folder, got a symbolic link", file=sys.stderr)
        return
    for path, record in read_all(probes)[0].items():
        for listable_path in _listable([path]):
            stage.mkdir(exist_ok=True)
            Record.from_dict(names.value(record.to_dict())).write(stage / names.text(listable_path.name))


def _listable(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the paths whose names fit on one line of the manifest; print a line about each other path."""
    for path in paths:
        if LISTABLE_NAME.fullmatch(path.name):
            yield path
        else:
            problem = "expected a file name of letters, digits, blanks and . , + = @ ~ -"
            print(f"left out: {path!s}: {problem}".replace("\n", "\\n"), file=sys.stderr)


def _put_text(path: Path, copy: Path, names: Names) -> None:
    try:
        text = read_text(path)
    except OSError as error:
        print(f"left out: {path}: {error.strerror}", file=sys.stderr)
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(names.text(text))


def _put_trace(path: Path, stage: Path, names: Names) -> None:
    """Copy a timeline into `stage`, with the names removed from its description; its spans contain no names."""
    try:
        trace = timeline.read_timeline(path)
    except ValueError as error:
        print(f"left out: {error}", file=sys.stderr)
        return
    (stage / path.parent.name).mkdir(exist_ok=True)
    timeline.write_timeline(
        trace._replace(about=names.value(trace.about)), stage / path.parent.name / path.name
    )


def _packed(stage: Path, paths: Iterable[Path]) -> bytes:
    """Return a gzipped tar of these files that holds no times and no owners, so that the same files give the same
    bytes."""
    buffer = io.BytesIO()

    def with_plain_attributes(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        # deep=False: a deep copy of an entry would copy the whole archive
        return entry.replace(**PLAIN_ATTRIBUTES, deep=False)

    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as zipped,
        tarfile.open(mode="w", fileobj=zipped, format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in paths:
            tar.add(stage / path, f"{FOLDER}/{path.as_posix()}", filter=with_plain_attributes)
    return buffer.getvalue()


def add_results(source: Path, results: Path) -> Iterator[str]:
    """Write the new records of an archive or a folder into new folders in `results`, one for each machine. Yield a line
    for each record, and the path of each new folder.

    Raises ValueError, before anything is written, if a file is not as this project writes it, or if no record is new.
    """
    files = _files_of_folder(source) if source.is_dir() else read_archive(source, FOLDER, MANIFEST, ENDINGS)
    taken_files = {name: data for name, data in files.items() if TAKEN_NAMES.fullmatch(name)}
    sent = {
        name: _checked_record(source, name, data)
        for name, data in taken_files.items()
        if name.endswith(".json")
    }
    configs = _known_configs(results)
    known_records = {name: record for name, record in sent.items() if record.job.workload.config in configs}
    probes = {name: record for name, record in known_records.items() if name.startswith(f"{probe.FOLDER}/")}
    runs = {
        name: record
        for name, record in known_records.items()
        if name not in probes and record.origin == "run"
    }
    new_runs = _new_runs(runs, results)
    left_out_text = _left_out_text(sent, known_records) if len(known_records) < len(sent) else ""
    if not new_runs:
        raise ValueError(f"{source}: {_problem_text(len(runs), left_out_text)}; nothing was added")
    archive = Archive(list(runs.values()), list(probes.values()))
    judged = {name: _judged_again(source, name, record, archive) for name, record in new_runs.items()}
    if len(new_runs) < len(runs):
        yield f"left out: {len(runs) - len(new_runs)} of {counted(len(runs), 'run')}, there already"
    if left_out_text:
        yield f"{left_out_text}, then add again"
    if num_logs := len(known_records) - len(runs) - len(probes):
        yield f"left out: {counted(num_logs, 'imported log')}: ask for the logs, which ./run.sh import reads"
    for machine in sorted({machine_of(record) for record in new_runs.values()}):
        machine_records = _records_of_machine(judged, machine)
        texts = _texts_of_logs(machine_records, taken_files)
        for name, record in machine_records.items():
            yield _record_line(record, new_runs[name])
        machine_records |= _records_of_machine(probes, machine)
        yield str(_write_results(results, machine, machine_records, texts))


def _texts_of_logs(records: dict[str, Record], files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the logs of these records, by name of the log, as far as the files hold them."""
    log_names = (f"{path.removesuffix('.json')}.txt" for path in records)
    return {name: files[name] for name in log_names if name in files}


def _problem_text(num_runs: int, left_out_text: str) -> str:
    """Return why nothing is added. `left_out_text`: text on the records of unknown models; empty: there are none."""
    problem = (
        f"expected a new run, got {num_runs} known" if num_runs else "expected a record of a run, got none"
    )
    return f"{problem} of a model that is known here; {left_out_text}" if left_out_text else problem


def _records_of_machine(records: dict[str, Record], machine: str) -> dict[str, Record]:
    return {name: record for name, record in records.items() if machine_of(record) == machine}


def _known_configs(results: Path) -> set[str | None]:
    """Return the configurations of models whose records are taken: those of models.yaml and of the records in
    `results`; None stands for the GPT. To learn another model's sizes, its modules must be made, with tensors as large
    as the sender chose."""
    named = (named_models.load(name) for name in named_models.names())
    recorded = (record.job.workload.config for record in read_all(results)[0].values())
    return {None, *recorded, *(model.sizes.get("config") for model in named)}


def _left_out_text(sent: dict[str, Record], known_records: dict[str, Record]) -> str:
    """Return a text on the records of models that are not known here, which are left out."""
    names = sorted(
        {
            f"{record.job.workload.model_name:.60}"
            for name, record in sent.items()
            if name not in known_records
        }
    )
    first_names = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
    records = counted(len(sent) - len(known_records), "record")
    return f"left out: {records} of models that are not known here ({first_names}): train them first"


def _files_of_folder(folder: Path) -> dict[str, bytes]:
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


def _checked_record(source: Path, name: str, data: bytes) -> Record:
    try:
        return Record.from_dict(parsed_json(data.decode(errors="replace")))
    except ValueError as error:
        raise ValueError(f"{source}: {name} is not a record: {error}; nothing was added") from error


def _new_runs(runs: dict[str, Record], results: Path) -> dict[str, Record]:
    """Return the runs that are new: not in `results`, nor in a folder that was added to it. Of equal runs, one is
    kept."""
    folders = (results, *added_folders(results))
    known_marks: set[Any] = set()
    for folder in folders:
        for record in read_all(folder)[0].values():
            known_marks.update(marks(record))
    new_runs = {}
    for name, record in sorted(runs.items()):
        if not known_marks.intersection(run_marks := marks(record)):
            new_runs[name] = record
        known_marks.update(run_marks)
    return new_runs


def _judged_again(source: Path, name: str, record: Record, archive: Archive) -> Record:
    try:
        return dataclasses.replace(record, gate=archive.judge(record))
    except ValueError as error:
        raise ValueError(f"{source}: {name}: {error}; nothing was added") from error


def _write_results(results: Path, machine: str, records: dict[str, Record], texts: dict[str, bytes]) -> Path:
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


def _record_line(record: Record, sent: Record) -> str:
    load, speed = record.job.workload, record.samples_per_second
    layers, params = counted(load.num_layers, "layer"), params_text(load.num_params)
    run_text = f"{record.job.method}, {layers}, {params} parameters"
    if record.status != "ok":
        return f"{run_text}: ended as {record.status}"
    gate_text = f"gate {record.gate.verdict}: {record.gate.text}"
    sent_verdict = f" (sent as {sent.gate.verdict})" if sent.gate.verdict != record.gate.verdict else ""
    speed_text = f"{speed:.4g} samples/s" if speed else "no throughput"
    return f"{run_text}: {speed_text}; {gate_text}{sent_verdict}"
