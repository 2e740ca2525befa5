"""Packs everything that was measured into one archive: records, logs, figures and report, with a manifest of sha256
sums.

The names of hosts, users and folders are removed first. Figures and report are then made from the cleaned records. The
same results give the same bytes. Every verb that has --results can read the unpacked folder.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cases import overlap
from harness.base.console import counted
from harness.base.foreign_file import LISTABLE_NAME, read_text
from harness.base.whole_file import check_replaceable, write_whole
from harness.core import method
from harness.core.record import STATUSES, VERDICTS, Record, read_all
from harness.devices import named_machines
from harness.devices.machine import PACKAGES
from harness.gate import probe
from harness.run import timeline
from papers.claims import verify
from papers.figures import case, case_files
from papers.figures import profile as scaled
from papers.figures.point import machine_of
from papers.report import page, redact
from papers.report.redact import Names

FOLDER, MANIFEST, ABOUT = "bundle", "MANIFEST.sha256", "README.txt"
# attributes of every archived file
NOBODYS: Any = {"mtime": 0, "mode": 0o644, "uid": 0, "gid": 0, "uname": "", "gname": ""}
GZIP = b"\x1f\x8b"  # how an archive begins
TEXT = (Path(__file__).parent / "bundle_readme.txt").read_text()


def write(results: Path, out: Path | None = None, names: Names | None = None) -> Path:
    """Write the archive of these results, and return its path.

    `out`: the archive's path; None: a file in `results`. `names`: the names to remove from all files; None: those of
    this machine. Raises ValueError if there is no record, OSError if the archive cannot be written.
    """
    archive = out or results / f"{FOLDER}.tar.gz"
    check_replaceable(archive, GZIP)
    with tempfile.TemporaryDirectory(prefix="bundle-") as folder:
        stage = Path(folder) / FOLDER
        stage.mkdir()
        records = list(read_all(results)[0].values())
        hosts = [host for record in records for host in redact.nodes(str(record.machine.get("nodes", "")))]
        _fill(stage, results, names or redact.names_here(known_words(records), hosts))
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
    known = {*STATUSES, *VERDICTS, *method.names(), *PACKAGES, *scaled.NAMES, *machines}
    known |= {f"{name}_{on}" for name in scaled.NAMES for on in machines}
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


def _fill(stage: Path, results: Path, names: Names) -> None:
    """Write the records and logs into `stage`, with `names` removed. Then, for each machine, make figures and a report
    from the written records."""
    recorded, complaints = page.recorded(results)
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
    for name in machines or (None,):
        part = re.sub(r"[^\w.-]+", "-", name) if name and len(machines) > 1 else ""
        chosen = verify.of_one_machine(records, name if part else None)
        for case_profile, number, _ in page.tables(chosen, results):
            for path in case.load(number).kept(case_profile, results):
                if path.resolve() == path and [*_listable([path])]:
                    # skip links, which could lead out of the folder
                    _put_text(path, stage / path.relative_to(results.resolve()), names)
            case_files.draw(
                number, case_files.extract(number, case_profile, chosen, stage / "figures" / part, results)
            )
        for profile, shown in page.traces(chosen, stage):
            overlap.extract(shown, profile, stage / "figures" / part)
            overlap.draw(shown, profile, stage / "figures" / part)
        page.write(stage, stage / "report" / part / page.PAGE, None, name if part else None)
    (stage / ABOUT).write_text(TEXT.format(records=counted(len(records), "record"), manifest=MANIFEST))


def _fill_probes(stage: Path, probes: Path, names: Names) -> None:
    """Write the records of the gate's probes, with `names` removed. With these records, whoever receives the archive
    can judge the runs again."""
    if probes.is_symlink():
        print(f"left out: {probes}: expected a folder, got a symbolic link", file=sys.stderr)
        return
    for path, record in read_all(probes)[0].items():
        for kept in _listable([path]):
            stage.mkdir(exist_ok=True)
            Record.from_dict(names.value(record.to_dict())).write(stage / names.text(kept.name))


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
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as zipped,
        tarfile.open(mode="w", fileobj=zipped, format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in paths:  # deep=False: a deep copy of an entry would copy the whole archive
            tar.add(
                stage / path,
                f"{FOLDER}/{path.as_posix()}",
                filter=lambda it: it.replace(**NOBODYS, deep=False),
            )
    return buffer.getvalue()
