"""Every claim beside what was measured here, or beside what the original itself published."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness.core.record import Record, read_all
from harness.devices import named_machines
from harness.evidence import claims, judge
from harness.evidence.claims import Claim
from harness.evidence.judge import Finding
from harness.figures import case
from harness.figures.point import Row, machine_of, row

PROFILES = (
    ("paper", claims.PAPER_MACHINE), ("paper", None), ("quick", None), ("fit", claims.PAPER_MACHINE), ("fit", None),
    ("demo", None),
)  # fmt: skip
PUBLISHED, IMPORTED = "published", "imported"
PAPER_BUDGET = named_machines.load(claims.PAPER_MACHINE).budget


def rows_of(number: int, records: Sequence[Record]) -> dict[str, list[Row]]:
    """The rows of a case by profile, the nearest to the claims first: the one seam between records and claims. Logs
    of others are no measurement of ours: they count where there is nothing else."""
    tables = {}
    runs = [record for record in records if record.origin == "run"]
    if runs:
        for name, on in PROFILES:
            try:
                used = case.profile_of(name, on, runs[-1].machine)
            except (ValueError, KeyError):  # such as the sizes of a GPU that this machine has not
                continue
            tables[used.name] = case.load(number).table(case.select(number, used, runs), used)
    return tables if runs else {IMPORTED: _imported(number, records)}


def published_rows(number: int) -> list[Row]:
    """What the original published, with the word of its logs on whether it trained."""
    return case.load(number).PUBLISHED


def _imported(number: int, records: Sequence[Record]) -> list[Row]:
    """Logs of the original, run here or elsewhere: those of the points that it published in this case."""
    rows = []
    for point in published_rows(number):
        found = [record for record in records if record.origin == IMPORTED and _is_at(record, point)]
        if found:
            rows.append(row(point.metric, [record for record in found if record.key == found[-1].key]))
    return rows


def _is_at(record: Record, point: Row) -> bool:
    load, window = record.job.workload, record.job.options.get("window_size")
    same = (record.job.method, load.num_layers, load.hidden_size)
    return same == (point.method, point.num_layers, point.hidden_size) and point.window_size in (None, window)


def findings(results: Path, against: str | None, machine: str | None, folder: Path = claims.FOLDER) -> list[Finding]:
    """A finding for each claim, in the order of the files. Raises ValueError where records of machines would mix."""
    told = claims.load(folder)
    if against == PUBLISHED:
        tables = {case: {PUBLISHED: published_rows(case)} for case in {claim.case for claim in told}}
        return [judge.judge(claim, tables[claim.case], judge.holds_there) for claim in told]
    found, complaints = read_all(results)
    for complaint in complaints:
        print(f"left out: {complaint}", file=sys.stderr)
    records = of_one_machine(list(found.values()), machine)
    logs = sum(record.origin == IMPORTED for record in records)
    if 0 < logs < len(records):
        print(
            f"{logs} imported logs are not judged beside what was measured here: import them into a folder of their"
            " own, and name it with --results", file=sys.stderr,
        )  # fmt: skip
    emulated = {record.key for record in records if _has_paper_budget(record)}
    tables = {case: rows_of(case, records) for case in {claim.case for claim in told}}
    if machine:  # the logs of the original name no machine: the user's word stands
        for profiles in tables.values():
            for profile, rows in profiles.items():
                profiles[profile] = [row if row.machine else dataclasses.replace(row, machine=machine) for row in rows]
    return [judge.judge(claim, tables[claim.case], partial(_holds_there, emulated)) for claim in told]


def is_of_logs(found: Sequence[Finding]) -> bool:
    """Whether imported logs are what was judged."""
    return any(finding.profile == IMPORTED for finding in found)


def _holds_there(emulated: set[str], claim: Claim, row: Row) -> bool:
    return judge.holds_there(claim, row, bool(row.keys) and emulated.issuperset(row.keys))


def of_one_machine(records: list[Record], asked: str | None) -> list[Record]:
    """The runs of the machine asked for, or of the only one there is, and what was imported."""
    there = sorted({machine_of(record) for record in records if record.origin != IMPORTED})
    if asked is None and len(there) > 1:
        raise ValueError(f"runs of {len(there)} machines are not judged together: --machine takes one of {there}")
    chosen = [record for record in records if record.origin == IMPORTED or _is_of(record, asked or "")]
    if records and not chosen:
        raise ValueError(f"no record of machine {asked!r}: --machine takes one of {there}, or a part of the name")
    return chosen


def _is_of(record: Record, asked: str) -> bool:
    if asked == claims.PAPER_MACHINE and _has_paper_budget(record):
        return True
    return asked.lower() in machine_of(record).lower() or (asked == claims.PAPER_MACHINE and _is_v100(record))


def _is_v100(record: Record) -> bool:
    return "v100" in machine_of(record).lower()


def _has_paper_budget(record: Record) -> bool:
    budget = record.job.budget
    return (budget.device_bytes, budget.host_bytes) == (PAPER_BUDGET.device_bytes, PAPER_BUDGET.host_bytes)


def failed(found: list[Finding]) -> bool:
    return any(finding.verdict in judge.BAD for finding in found)


def show(found: list[Finding], as_json: bool) -> None:
    if as_json:
        for finding in found:
            print(json.dumps(finding.to_dict()))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    of_logs = is_of_logs(found)
    title = "Judged by imported logs: nothing of this was measured here" if of_logs else None
    table = Table(show_lines=True, title=title, title_justify="left", title_style="bold")
    seen = "seen in the logs" if of_logs else "seen"
    for column, width in (("claim", 27), ("verdict", 19), (seen, 38), ("expected", 38), ("rests on, and why", 70)):
        table.add_column(column, overflow="fold", max_width=width)
    for finding in found:
        limits = f"\n{finding.claim.expected.text}" if finding.seen else ""
        alone = (
            f"\nnumbers by themselves {NUMBERS_WORDS[finding.numbers]}"
            if finding.numbers and _untrained(finding)
            else ""
        )
        table.add_row(finding.claim.id, finding.verdict, finding.seen + alone, finding.claim.text + limits,
                      _grounds(finding))  # fmt: skip
    console.print(table)
    for line in closing_lines(found):
        print(line)


def closing_lines(found: list[Finding]) -> list[str]:
    """Which claims ended how; of those that rest on runs that did not train, what their numbers alone would say."""
    untrained = [finding for finding in found if _untrained(finding)]
    lines = []
    for verdict in VERDICT_WORDS:
        names = [finding.claim.id for finding in found if finding.verdict == verdict and finding not in untrained]
        if names:
            lines.append(f"{verdict}: {len(names)} of {len(found)}: {', '.join(names)}")
    for numbers in (judge.HOLD, judge.BROKEN, judge.OPEN, ""):
        names = [finding.claim.id for finding in untrained if finding.numbers == numbers]
        said = f"whose numbers by themselves {NUMBERS_WORDS[numbers]}"
        if names:
            lines.append(
                f"FAIL, rests on a run that did not train, {said}: {len(names)} of {len(found)}: {', '.join(names)}"
            )
    return lines


VERDICT_WORDS = (
    judge.PASS, judge.FAIL, judge.XFAIL, judge.XPASS, judge.OPEN, judge.NOT_TESTED,
    judge.OTHER_MACHINE,
)  # fmt: skip
NUMBERS_WORDS = {
    judge.HOLD: "would hold", judge.BROKEN: "would fail, too", judge.OPEN: "are not distinguishable",
    "": "are missing",
}  # fmt: skip


def _untrained(finding: Finding) -> bool:
    return finding.note.startswith(judge.UNTRAINED)


def _grounds(finding: Finding) -> str:
    """The rows in a few words, and the note."""
    rows = finding.rests_on
    if not rows:
        return finding.note
    names = [judge.label(row) for row in (rows if len(rows) <= 3 else (rows[0], rows[-1]))]
    text = f"{len(rows)} rows, {names[0]} to {names[1]}" if len(rows) > 3 else "; ".join(names)
    return f"{text} ({finding.profile})" + (f"\n{finding.note}" if finding.note else "")
