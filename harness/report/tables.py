"""Records, rows and findings as tables of a page: a cell has its text, what it sorts by, and the records behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.job import gib, params_text
from harness.core.record import Record
from harness.evidence import examine, judge, verify
from harness.evidence.examine import value_text
from harness.evidence.judge import Finding
from harness.figures.point import METRICS, Row
from harness.jobs.command import command

GOOD, BAD, OPEN, DOUBT, THERE = "good", "bad", "open", "doubt", "there"
LOOKS = {
    judge.PASS: GOOD, judge.FAIL: BAD, judge.XPASS: BAD, judge.XFAIL: OPEN, examine.OPEN: OPEN,
    judge.NOT_TESTED: OPEN, judge.OTHER_MACHINE: OPEN,
}  # fmt: skip
TENSORS, FAILED = "tensors", "failed"
LOG = "imported log"


@dataclass(frozen=True)
class Cell:
    """`number` is what it sorts by where that is not its text; `links`: numbers of records; `more`: small print."""

    text: str = ""
    number: float | None = None
    look: str = ""
    links: tuple[int, ...] = ()
    more: str = ""


@dataclass(frozen=True)
class Table:
    caption: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Entry:
    """A record by its number on the page."""

    number: int
    path: Path
    record: Record

    @property
    def verdict(self) -> Cell:
        return trained(self.record)

    @property
    def title(self) -> str:
        load = self.record.job.workload
        size = f"{load.num_layers} layers, {params_text(load.num_params)} parameters"
        return f"{self.record.job.method}, {size}" + ("" if self.record.origin == "run" else f" ({LOG})")

    @property
    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.record.started)) if self.record.started else ""

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The essentials in words."""
        record, job = self.record, self.record.job
        phases = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in record.phase_seconds.items())
        peaks = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in record.peaks.items())
        told = {
            "ended": f"{record.status}, in phase {record.phase or 'unknown'}" + _after(record.reason),
            "gate": f"{record.gate.verdict}" + _after(record.gate.reason) + _after(record.gate.text),
            "run again": command(job) if record.origin == "run" else "",
            "origin": f"{record.origin}, {self.when}, clock {record.clock}",
            "options": options(record),
            "peaks": peaks,
            "limits": pairs(record.limits),
            "machine": pairs(record.machine),
            "software": pairs(record.software),
            "phases": phases,
            "kernels": ", ".join(record.kernels),
            "method": pairs(record.description),
            "data": record.data_sha256,
            "key": record.key,
            "file": self.path.name,
        }
        return [(name, text) for name, text in told.items() if text]

    @property
    def raw(self) -> str:
        """The record as JSON, a field a line; of its tensors only how many there are, for they are most of it."""
        fields = self.record.to_dict()
        told = fields.pop(TENSORS)
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        return "{\n" + ",\n".join([*lines, f' "{TENSORS}": "{len(told)}, in {self.path.name}"']) + "\n}"


def _after(text: str) -> str:
    return f": {text}" if text else ""


def pairs(facts: Mapping[str, Any]) -> str:
    """Facts in a line; what is counted in bytes reads as people read it."""
    told = {
        name.removesuffix("_bytes"): gib(value) if name.endswith("_bytes") and isinstance(value, int) else value
        for name, value in facts.items()
    }
    return ", ".join(f"{name} {value}" for name, value in told.items() if value not in (None, "", {}, []))


def options(record: Record) -> str:
    return ", ".join(f"{name}={value}" for name, value in record.job.options.items())


def machine(record: Record) -> str:
    """The machine of a record in a line, as its headline has it."""
    facts = record.machine
    parts = [facts.get("gpu"), facts.get("cpu"), f"{facts['cores']} cores" if facts.get("cores") else None]
    memory = f"{gib(facts['host_bytes'])} of host memory" if facts.get("host_bytes") else None
    return ", ".join(str(part) for part in (*parts, memory) if part) or "an unnamed machine"


def trained(record: Record) -> Cell:
    """The gate's word, or how the run ended."""
    if record.status != "ok":
        return Cell(f"ended: {record.status}", look=OPEN if record.is_result else BAD)
    if record.gate.passed:
        return Cell(f"passed ({record.gate.verdict})", look=GOOD)
    is_failed = record.gate.verdict == FAILED
    return Cell("FAILED THE GATE" if is_failed else "not judged", look=BAD if is_failed else OPEN)


def outcome(record: Record) -> str:
    """The same in the words of a count."""
    if record.status != "ok":
        return f"ended as {record.status}"
    return (
        "trained and passed the gate"
        if record.gate.passed
        else f"ran and {FAILED} the gate"
        if record.gate.verdict == FAILED
        else "ran and was not judged"
    )


def record_table(entries: Sequence[Entry]) -> Table:
    columns = (
        "record", "method", "options", "layers", "hidden", "batch", "clock", "trained?", "samples/s", "device peak",
        "host peak", "why", "started",
    )  # fmt: skip
    return Table("Every record, oldest first", columns, [_record_row(entry) for entry in entries])


def _record_row(entry: Entry) -> list[Cell]:
    record, load = entry.record, entry.record.job.workload
    speed, device = record.samples_per_second, record.peaks.get("device_allocated")
    gate = ": ".join(part for part in (record.gate.reason, record.gate.text) if part)
    why = record.reason if record.status != "ok" else gate
    return [
        Cell("", entry.number, links=(entry.number,)),
        Cell(record.job.method, more="" if record.origin == "run" else LOG),
        Cell(options(record)),
        Cell(str(load.num_layers), load.num_layers),
        Cell(str(load.hidden_size), load.hidden_size),
        Cell(str(load.batch_size), load.batch_size),
        Cell(record.clock),
        trained(record),
        Cell("" if speed is None else f"{speed:.4g}", speed),
        Cell("" if device is None else gib(device), device),
        Cell(gib(record.host_peak_bytes), record.host_peak_bytes) if record.host_peak_bytes else Cell(),
        Cell(why),
        Cell(entry.when, record.started),
    ]


def row_table(caption: str, rows: Sequence[Row], entries: Sequence[Entry]) -> Table:
    """Rows of a figure, ours and the published, of what claims are about."""
    columns = ("method", "layers", "hidden", "window", "value", "95 % interval", "processes", "trained?", "why",
               "origin", "records")  # fmt: skip
    return Table(caption, columns, [_row(row, entries) for row in rows if row.metric in METRICS])


def _row(row: Row, entries: Sequence[Entry]) -> list[Cell]:
    bounds = "" if row.low is None or row.high is None else f"{row.low:.4g} to {row.high:.4g}"
    has_ended = row.status != "ok"
    size = f"failed at {value_text(row)}" if row.metric == "params" and row.value else ""
    judged = "passed" if row.valid else "FAILED THE GATE" if row.is_judged else "not judged yet"
    word = f"ended: {row.status}" if has_ended else judged
    searched = "" if row.is_final else "search not finished"
    return [
        Cell(row.method, more=row.series),
        Cell(str(row.num_layers), row.num_layers),
        Cell(str(row.hidden_size), row.hidden_size),
        Cell(str(row.window_size or ""), row.window_size),
        Cell(size if has_ended else value_text(row), row.value, look="" if row.valid else DOUBT, more=searched),
        Cell(bounds, row.low),
        Cell(str(row.num_runs), row.num_runs),
        Cell(word, look=OPEN if has_ended or not row.is_judged else GOOD if row.valid else BAD),
        Cell(row.reason),
        Cell(row.origin),
        Cell(links=numbers_of(row.keys, entries)),
    ]


def numbers_of(keys: Sequence[str], entries: Sequence[Entry]) -> tuple[int, ...]:
    return tuple(entry.number for entry in entries if entry.record.key in keys)


def claim_table(here: Sequence[Finding], published: Sequence[Finding], entries: Sequence[Entry]) -> Table:
    """Each claim as found here, and as the original's own numbers have it."""
    where = ("imported logs", "seen in the logs") if verify.is_of_logs(here) else ("here", "seen here")
    columns = ("claim", "said", "expected", *where, "records", "published", "seen there")
    there = {finding.claim.id: finding for finding in published}
    rows = []
    for finding in here:
        claim, other = finding.claim, there[finding.claim.id]
        keys = tuple(key for row in finding.rests_on for key in row.keys)
        rows.append([
            Cell(claim.id),
            Cell(f"{claim.text} ({claim.source})"),
            Cell(claim.expected.text),
            Cell(finding.verdict, look=LOOKS[finding.verdict]),
            Cell(finding.seen, more=why(finding)),
            Cell(links=numbers_of(keys, entries)),
            Cell(other.verdict, look=f"{LOOKS[other.verdict]} {THERE}"),
            Cell(other.seen, more=why(other)),
        ])  # fmt: skip
    return Table("Claims of the papers", columns, rows)


def why(finding: Finding) -> str:
    """The note, with the profile that it rests on, and what the numbers alone would say of a run that did not train."""
    alone = finding.numbers if finding.is_untrained else ""
    measured = finding.profile not in ("", verify.PUBLISHED, verify.IMPORTED)
    parts = [f"profile {finding.profile}" if measured else "", finding.note,
             f"its numbers by themselves {verify.NUMBERS_WORDS[alone]}" if alone else ""]  # fmt: skip
    return "; ".join(part for part in parts if part)


def plain_table(caption: str, rows: Sequence[dict[str, str]]) -> Table:
    return Table(caption, tuple(rows[0]) if rows else (), [[Cell(text) for text in row.values()] for row in rows])
