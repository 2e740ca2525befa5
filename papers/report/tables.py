"""Makes the tables of the report's page from records, rows of figures and findings on claims. A table is a pandas
DataFrame whose values are of the class Cell; `DataFrame.attrs` holds its caption."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame

from harness.base.console import counted
from harness.core import method
from harness.core.job import gib, params_text
from harness.core.record import Record
from harness.jobs.command import repeat_command
from harness.plan.accuracy import has_disk
from harness.plan.advise import Advice, errors_text, fits_text, method_text
from papers.claims import judge
from papers.claims.judge import Finding, value_text
from papers.figures import points
from papers.figures.point import METRICS, FigureRow

GOOD, BAD, OPEN, DOUBT, PUBLISHED_LOOK = "good", "bad", "open", "doubt", "there"
LOOK_OF_VERDICT = {
    judge.PASS: GOOD,
    judge.FAIL: BAD,
    judge.XPASS: BAD,
    judge.XFAIL: OPEN,
    judge.OPEN: OPEN,
    judge.SIMULATED: OPEN,
    judge.NOT_TESTED: OPEN,
    judge.OTHER_MACHINE: OPEN,
}
TENSORS_FIELD, FAILED_VERDICT = "tensors", "failed"
IMPORTED_LOG_TEXT = "imported log"
CLAIM_TABLES = {
    "": "Claims that these records decide",
    judge.SIMULATED: "Claims that only a simulation speaks of",
    judge.NOT_TESTED: "Claims that nothing here tests",
    judge.OTHER_MACHINE: "Claims that are said of another machine",
}
MOST_SIZES = 6  # most columns of sizes in one table, so that it fits a screen


@dataclass(frozen=True)
class Cell:
    """A cell of a table. `number`: the number by which the column is sorted; None: by the text. `links`: the numbers of
    the records to which the cell links. `more`: small print, which is folded if it is long or if the cell has no
    text."""

    text: str = ""
    number: float | None = None
    look: str = ""
    links: tuple[int, ...] = ()
    more: str = ""


@dataclass(frozen=True)
class Entry:
    """A record, and its number on the page."""

    number: int
    path: Path
    record: Record

    @property
    def verdict(self) -> Cell:
        """Return the gate's verdict as a cell; for a run that did not end well, how it ended."""
        record = self.record
        if record.status != "ok":
            return Cell(f"ended: {record.status}", look=OPEN if record.is_result else BAD)
        if record.gate.passed:
            return Cell(f"passed ({record.gate.verdict})", look=GOOD)
        return (
            Cell("FAILED THE GATE", look=BAD)
            if record.gate.verdict == FAILED_VERDICT
            else Cell("not judged", look=OPEN)
        )

    @property
    def title(self) -> str:
        load = self.record.job.workload
        size = f"{counted(load.num_layers, 'layer')}, {load.params_text} parameters"
        return f"{self.record.job.method}, {size}" + (
            "" if self.record.origin == "run" else f" ({IMPORTED_LOG_TEXT})"
        )

    @property
    def when(self) -> str:
        return (
            time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.record.started))
            if self.record.started
            else ""
        )

    @property
    def facts(self) -> list[tuple[str, str]]:
        record, gate = self.record, self.record.gate
        facts = {
            "ended": _joined_with_colons(
                f"{record.status}, in phase {record.phase or 'unknown'}", record.reason
            ),
            "gate": _joined_with_colons(gate.verdict, gate.reason, gate.text),
            "run again": _run_again(record) if record.origin == "run" else "",
            "origin": f"{record.origin}, {self.when}, clock {record.clock}",
            "options": points.record_options_text(record),
            "peaks": ", ".join(
                f"{name.replace('_', ' ')} {gib(size)}" for name, size in record.peaks.items()
            ),
            "device memory": record.slowed_by,
            "limits": facts_text(record.limits),
            "machine": facts_text(record.machine),
            "software": facts_text(record.software),
            "phases": ", ".join(f"{name} {seconds:.3g} s" for name, seconds in record.phase_seconds.items()),
            "kernels": ", ".join(record.kernels),
            "method": facts_text(record.description),
            "data": record.data_sha256,
            "key": record.key,
            "file": self.path.name,
        }
        return [(name, text) for name, text in facts.items() if text]

    @property
    def raw(self) -> str:
        """Return the record as JSON, one field on each line. Its tensors, which take most of a record, are replaced by
        their number."""
        fields = self.record.to_dict()
        tensors = fields.pop(TENSORS_FIELD)
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        return (
            "{\n" + ",\n".join([*lines, f' "{TENSORS_FIELD}": "{len(tensors)}, in {self.path.name}"']) + "\n}"
        )


def _run_again(record: Record) -> str:
    """Return the call that measures a record's job once more. If the method's file is not in methods/, the call names
    its folder."""
    file = method.REGISTRY.files().get(record.job.method)
    added = []
    if file is not None and file.parent != method.REGISTRY.project_path:
        added = ["--methods", str(file.parent)]
    return f"{repeat_command(record)} {shlex.join([*added, '--rerun'])}"


def _joined_with_colons(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def facts_text(facts: Mapping[str, Any]) -> str:
    """Return facts as one line of text, with bytes in readable units. Empty facts are left out."""
    sizes = {
        name: gib(value)
        for name, value in facts.items()
        if name.endswith("_bytes") and isinstance(value, int)
    }
    values = {name.removesuffix("_bytes"): value for name, value in {**facts, **sizes}.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items() if value not in (None, "", {}, []))


def machine_text(record: Record) -> str:
    """Return the machine of a record as one line of text."""
    gpu, cpu, cores, memory = (record.machine.get(name) for name in ("gpu", "cpu", "cores", "host_bytes"))
    parts = (gpu, cpu, cores and counted(cores, "core"), memory and f"{gib(memory)} of host memory")
    return ", ".join(str(part) for part in parts if part) or "an unnamed machine"


def outcome_text(record: Record) -> str:
    """Return how a run ended, in words that can follow a number, as in "3 trained and passed the gate"."""
    if record.status != "ok":
        return f"ended as {record.status}"
    if record.gate.passed:
        return "trained and passed the gate"
    return (
        f"ran and {FAILED_VERDICT} the gate"
        if record.gate.verdict == FAILED_VERDICT
        else "ran and was not judged"
    )


def make_table(caption: str, rows: Iterable[Mapping[str, Cell | str]]) -> DataFrame:
    """Return a table of these rows. A row has, by the column's name, a cell or a text that becomes a cell."""
    cells = DataFrame(list(rows), dtype=object)
    cells = cells.map(lambda cell: cell if isinstance(cell, Cell) else Cell(cell))
    cells.attrs["caption"] = caption
    return cells


def cell_texts(cells: DataFrame) -> DataFrame:
    """Return the texts of a table's cells, without the column of links to records."""
    return cells.drop(columns="records", errors="ignore").map(lambda cell: cell.text)


def record_row(entry: Entry) -> dict[str, Cell | str]:
    record, load = entry.record, entry.record.job.workload
    speed, device, host = (
        record.samples_per_second,
        record.peaks.get("device_allocated"),
        record.host_peak_bytes,
    )
    return {
        "record": Cell("", entry.number, links=(entry.number,)),
        "method": Cell(record.job.method, more="" if record.origin == "run" else IMPORTED_LOG_TEXT),
        "options": Cell(more=points.record_options_text(record)),
        "layers": Cell(str(load.num_layers), load.num_layers),
        "hidden": Cell(str(load.hidden_size), load.hidden_size),
        "batch": Cell(str(load.batch_size), load.batch_size),
        "clock": record.clock,
        "trained?": entry.verdict,
        "samples/s": Cell("" if speed is None else f"{speed:.4g}", speed, more=record.slowed_by),
        "device peak": Cell("" if device is None else gib(device), device),
        "host peak": Cell(gib(host), host) if host else "",
        "why": record.reason
        if record.status != "ok"
        else _joined_with_colons(record.gate.reason, record.gate.text),
        "started": Cell(entry.when, record.started),
    }


def row_table(caption: str, rows: Sequence[FigureRow], entries: Sequence[Entry]) -> DataFrame:
    """Return a table of a figure's rows, ours and the published ones. Rows whose metric is not in METRICS are left
    out."""
    return make_table(caption, [_figure_row(row, entries) for row in rows if row.metric in METRICS])


def _figure_row(row: FigureRow, entries: Sequence[Entry]) -> dict[str, Cell | str]:
    has_ended = row.status != "ok"
    trained = Cell("passed" if row.valid else "FAILED THE GATE", look=GOOD if row.valid else BAD)
    if has_ended:
        trained = Cell(f"ended: {row.status}", look=OPEN)
    elif not row.is_judged:
        trained = Cell("passed" if row.valid else "not judged yet", look=OPEN)
    size = f"failed at {value_text(row)}" if row.metric == "params" and row.value else ""
    bounds = "" if row.low is None or row.high is None else f"{row.low:.4g} to {row.high:.4g}"
    return {
        "method": Cell(row.method, more=row.series),
        "layers": Cell(str(row.num_layers), row.num_layers),
        "hidden": Cell(str(row.hidden_size), row.hidden_size),
        "window": Cell(str(row.window_size or ""), row.window_size),
        "value": Cell(
            size if has_ended else value_text(row),
            row.value,
            look="" if row.valid else DOUBT,
            more="" if row.is_final else "search not finished",
        ),
        "95 % interval": Cell(bounds, row.low),
        "processes": Cell(str(row.num_runs), row.num_runs),
        "trained?": trained,
        "why": row.reason,
        "origin": row.origin,
        "records": Cell(links=numbers_of(row.keys, entries)),
    }


def numbers_of(keys: Iterable[str], entries: Sequence[Entry]) -> tuple[int, ...]:
    return tuple(entry.number for entry in entries if entry.record.key in keys)


def claim_table(
    findings: Sequence[Finding], published: Sequence[Finding], entries: Sequence[Entry]
) -> DataFrame:
    """Return a table of claims, with two verdicts for each: by our records, and by the numbers that the original
    published."""
    verdict_heading, values_heading = "here", "seen here"
    if judge.is_of_logs(findings):
        verdict_heading, values_heading = "imported logs", "seen in the logs"
    published_by_id = {finding.claim.id: finding for finding in published}
    rows: list[dict[str, Cell | str]] = []
    for finding in findings:
        claim, keys = finding.claim, {key for row in finding.rests_on for key in row.keys}
        by_published = published_by_id[claim.id]
        published_look = f"{LOOK_OF_VERDICT[by_published.verdict]} {PUBLISHED_LOOK}"
        rows.append(
            {
                "claim": claim.id,
                "said": f"{claim.text} ({claim.source})",
                "expected": claim.expected.text,
                verdict_heading: Cell(finding.verdict, look=LOOK_OF_VERDICT[finding.verdict]),
                values_heading: Cell(finding.values_text, more=finding_reason_text(finding)),
                "records": Cell(links=numbers_of(keys, entries)),
                "published": Cell(by_published.verdict, look=published_look),
                "seen there": Cell(by_published.values_text, more=finding_reason_text(by_published)),
            }
        )
    return make_table("Claims of the papers", rows)


def shown_claim_tables(
    findings: Sequence[Finding], published: Sequence[Finding], entries: Sequence[Entry]
) -> list[DataFrame]:
    """Return up to three tables of claims: those that the records decide, in the order of `verify`; those that no
    record tests; and those about another machine. An empty table is left out."""
    published_by_id = {finding.claim.id: finding for finding in published}
    where = "imported logs" if judge.is_of_logs(findings) else "here"
    by_verdict = sorted(findings, key=lambda finding: judge.VERDICTS.index(finding.verdict))
    tables = []
    for kind, caption in CLAIM_TABLES.items():
        table_findings = [finding for finding in by_verdict if kind == _table_of(finding)]
        if table_findings:
            rows = [
                _claim_row(finding, published_by_id[finding.claim.id], where, entries)
                for finding in table_findings
            ]
            tables.append(make_table(caption, rows))
            tables[-1].attrs["is_open"] = not kind
    return tables


def _table_of(finding: Finding) -> str:
    """Return the key in CLAIM_TABLES of the table that shows the finding."""
    return finding.verdict if finding.verdict in CLAIM_TABLES else ""


def _claim_row(finding: Finding, other: Finding, where: str, entries: Sequence[Entry]) -> dict[str, Cell]:
    claim = finding.claim
    keys = {key for row in finding.rests_on for key in row.keys}
    return {
        "sentence": Cell(claim.text, more=f"{claim.source}. {claim.id}: {claim.expected.text}"),
        "published": Cell(
            other.values_text or "no number",
            more=_joined_with_colons(other.verdict, finding_reason_text(other)) if other.rests_on else "",
        ),
        where: Cell(finding.values_text, links=numbers_of(keys, entries)),
        "verdict": Cell(
            finding.verdict, look=LOOK_OF_VERDICT[finding.verdict], more=finding_reason_text(finding)
        ),
    }


def summary_table(entries: Sequence[Entry]) -> DataFrame:
    """Return a table with a row for each method and clock. For each size shown, the row has the speed, memory and
    verdict of the newest record that the gate has judged; where it judged none, of the newest one."""
    records = points.record_frame(entry.record for entry in entries).assign(
        did=list(map(_result_cell, entries)), is_judged=[_is_judged_result(entry.record) for entry in entries]
    )
    newest_last = records.sort_values("is_judged", kind="stable")
    newest = newest_last.drop_duplicates(["method", "clock", "num_params"], keep="last")
    did = newest.pivot(index=["method", "clock"], columns="num_params", values="did")
    did = did.loc[list(dict.fromkeys(zip(records["method"], records["clock"], strict=True)))]
    has_clocks = records["clock"].nunique() > 1
    rows = [
        {
            "method": name,
            **({"clock": clock} if has_clocks else {}),
            **{params_text(size): cell if isinstance(cell, Cell) else "" for size, cell in row.items()},
        }
        for (name, clock), row in did[_sizes_shown(did.notna())].iterrows()
    ]
    return make_table(
        "Samples/s, verdict, and peaks of memory of the newest judged record of each method and size", rows
    )


def _is_judged_result(record: Record) -> bool:
    """True if the record is a result, such as out of memory, and if the gate has judged it where it trained."""
    return record.is_result and record.is_judged


def _sizes_shown(is_there: DataFrame) -> list[int]:
    """Return the sizes to show, in ascending order: those without which a method's row would be empty, then the
    largest, at most MOST_SIZES in all.

    `is_there`: a row for each method, a column for each size in ascending order; True where there is a record.
    """
    shown: list[int] = []
    while not (has_cell := is_there[shown].any(axis=1)).all():
        # of the sizes that most of the empty rows have, take the largest
        shown.append(is_there[~has_cell].sum()[::-1].idxmax())
    return sorted(list(dict.fromkeys([*shown, *is_there.columns[::-1]]))[:MOST_SIZES])


def _result_cell(entry: Entry) -> Cell:
    record, verdict = entry.record, entry.verdict
    speed, device, host = (
        record.samples_per_second,
        record.peaks.get("device_allocated"),
        record.host_peak_bytes,
    )
    window = record.job.options.get("window_size")
    facts = [f"window {window}"] if window is not None else []
    facts += [f"{name} {gib(peak)}" for name, peak in (("device", device), ("host", host)) if peak]
    if speed is None:
        return Cell(verdict.text, None, verdict.look, (entry.number,), ", ".join(facts))
    return Cell(
        f"{speed:.4g}/s", speed, verdict.look, (entry.number,), ", ".join([record.gate.verdict, *facts])
    )


def advice_table(advice: Advice, entries: Sequence[Entry]) -> DataFrame:
    """Return a table with a row for each method: its predicted step time on the machine of the records, and the
    measured step times of its runs."""
    load = advice.workload
    size = f"{load.params_text} parameters, {load.batch_size} x {load.seq_len} tokens a step, {load.dtype}"
    rows = []
    for row in advice.decision(list(method.loadable(()))).rows:
        if "error" in row:
            continue
        runs = [
            entry
            for entry in entries
            if (entry.record.job.method, entry.record.job.workload) == (row["method"], load)
            and entry.record.samples_per_second
            and has_disk(entry.record) == bool(row["disk"])
        ]
        took = min((seconds for entry in runs if (seconds := entry.record.median_step_seconds)), default=None)
        predicted = row["step_seconds"] if row["fits"] or runs else None
        rows.append(
            {
                "method": method_text(row),
                "fits": Cell(fits_text(row), look=GOOD if row["fits"] and not row["missing"] else OPEN),
                "predicted s": Cell("" if predicted is None else f"{predicted:.3g}", predicted),
                "measured s": Cell(
                    "" if took is None else f"{took:.3g}", took, links=tuple(entry.number for entry in runs)
                ),
                "binds": (row["binds"] or "") if predicted else "",
                "largest -l": Cell(str(row["largest_layers"]), row["largest_layers"]),
                "beside the others": row["reason"],
                "predictions off by": errors_text(row),
            }
        )
    cells = make_table(f"A step of {size}, on {advice.place.about}", rows)
    return cells[[name for name in cells if any(cell.text or cell.links for cell in cells[name])]]


def finding_reason_text(finding: Finding) -> str:
    """Return the reasons for a finding as text: the profile of its rows, its note and, if one of its runs did not
    train, the verdict by the numbers alone."""
    measured = (
        f"profile {finding.profile}" if finding.profile not in ("", judge.PUBLISHED, judge.IMPORTED) else ""
    )
    alone = finding.numbers_verdict if finding.is_untrained else ""
    numbers_text = f"its numbers by themselves {judge.NUMBERS_SENTENCE_ENDS[alone]}" if alone else ""
    return "; ".join(part for part in (measured, finding.note, numbers_text) if part)
