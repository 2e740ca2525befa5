"""The verb `verify`: judge every claim by what was measured here, or by what the original published."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from harness.core.console import print_table
from harness.core.record import Record, read_all
from harness.devices import named_machines
from harness.evidence import claims, judge
from harness.evidence.claims import Claim
from harness.evidence.examine import BROKEN, HOLD, OPEN
from harness.evidence.judge import Finding
from harness.figures import case
from harness.figures.point import Row, machine_of, row

PROFILES = (
    ("paper", claims.PAPER_MACHINE), ("paper", None), ("quick", None), ("fit", claims.PAPER_MACHINE), ("fit", None),
    ("demo", None),
)  # fmt: skip
PUBLISHED, IMPORTED = "published", "imported"
VERDICTS = (judge.PASS, judge.FAIL, judge.XFAIL, judge.XPASS, OPEN, judge.NOT_TESTED, judge.OTHER_MACHINE)
NUMBERS_WORDS = {
    HOLD: "would hold", BROKEN: "would fail, too", OPEN: "are not distinguishable", "": "are missing",
}  # fmt: skip
PAPER_BUDGET = named_machines.load(claims.PAPER_MACHINE).budget


def rows_of(number: int, records: Sequence[Record]) -> dict[str, list[Row]]:
    """The rows of a case by profile, the nearest to the claims first. Imported logs count only without runs of ours."""
    tables = {}
    runs = [record for record in records if record.origin == "run"]
    if runs:
        for name, on in PROFILES:
            try:
                used = case.profile_of(name, on, runs[-1].machine)
            except (ValueError, KeyError):  # such as the sizes of a GPU on a machine without one
                continue
            tables[used.name] = case.measured(number, used, runs)
    return tables if runs else {IMPORTED: _imported(number, records)}


def _imported(number: int, records: Sequence[Record]) -> list[Row]:
    """Imported logs of the points that the original published in this case."""
    rows = []
    for point in case.published(number):
        found = [record for record in records if record.origin == IMPORTED and _is_at(record, point)]
        if found:
            rows.append(row(point.metric, [record for record in found if record.key == found[-1].key]))
    return rows


def _is_at(record: Record, point: Row) -> bool:
    load, window = record.job.workload, record.job.options.get("window_size")
    same = (record.job.method, load.num_layers, load.hidden_size)
    return same == (point.method, point.num_layers, point.hidden_size) and point.window_size in (None, window)


def findings(results: Path, against: str | None, machine: str | None, folder: Path = claims.FOLDER) -> list[Finding]:
    """A finding for each claim, in the order of the files. Raises ValueError for records of several machines."""
    told = claims.load(folder)
    if against == PUBLISHED:
        tables = {number: {PUBLISHED: case.published(number)} for number in {claim.case for claim in told}}
        return [judge.judge(claim, tables[claim.case], judge.holds_there) for claim in told]
    found, complaints = read_all(results)
    for complaint in complaints:
        print(f"left out: {complaint}", file=sys.stderr)
    records = of_one_machine(list(found.values()), machine)
    logs = sum(record.origin == IMPORTED for record in records)
    if 0 < logs < len(records):
        print(
            f"{logs} imported logs are not judged beside runs measured here: import them into a folder of their own and"
            " name it with --results", file=sys.stderr,
        )  # fmt: skip
    emulated = {record.key for record in records if _has_paper_budget(record)}
    tables = {number: rows_of(number, records) for number in {claim.case for claim in told}}
    if machine:  # logs of the original name no machine: take the user's
        for profiles in tables.values():
            for profile, rows in profiles.items():
                profiles[profile] = [row if row.machine else dataclasses.replace(row, machine=machine) for row in rows]
    return [judge.judge(claim, tables[claim.case], partial(_holds_there, emulated)) for claim in told]


def is_of_logs(found: Sequence[Finding]) -> bool:
    """True where imported logs were judged."""
    return any(finding.profile == IMPORTED for finding in found)


def _holds_there(emulated: set[str], claim: Claim, row: Row) -> bool:
    return judge.holds_there(claim, row, bool(row.keys) and emulated.issuperset(row.keys))


def of_one_machine(records: list[Record], asked: str | None) -> list[Record]:
    """The runs of the machine asked for, or of the only one, and all imported logs."""
    there = sorted({machine_of(record) for record in records if record.origin != IMPORTED})
    if asked is None and len(there) > 1:
        raise ValueError(f"runs of {len(there)} machines are not judged together: --machine takes one of {there}")
    chosen = [record for record in records if record.origin == IMPORTED or _is_of(record, asked or "")]
    if records and not chosen:
        raise ValueError(f"no record of machine {asked!r}: --machine takes one of {there}, or a part of the name")
    return chosen


def _is_of(record: Record, asked: str) -> bool:
    name = machine_of(record).lower()
    is_paper = asked == claims.PAPER_MACHINE and (_has_paper_budget(record) or "v100" in name)
    return is_paper or asked.lower() in name


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
    of_logs = is_of_logs(found)
    widths = {"claim": 27, "verdict": 19, "seen in the logs" if of_logs else "seen": 38, "expected": 38,
              "rests on, and why": 70}  # fmt: skip
    title = "Judged by imported logs: nothing of this was measured here" if of_logs else None
    print_table(list(widths), map(_cells, found), title, widths=widths, has_lines=True)
    for line in closing_lines(found):
        print(line)


def _cells(finding: Finding) -> list[str]:
    alone = f"\nnumbers by themselves {NUMBERS_WORDS[finding.numbers]}" if finding.numbers else ""
    limits = f"\n{finding.claim.expected.text}" if finding.seen else ""
    return [
        finding.claim.id, finding.verdict, finding.seen + (alone if finding.is_untrained else ""),
        finding.claim.text + limits, _grounds(finding),
    ]  # fmt: skip


def _grounds(finding: Finding) -> str:
    """The rows in a few words, and the note."""
    rows = finding.rests_on
    if not rows:
        return finding.note
    names = [judge.label(row) for row in (rows if len(rows) <= 3 else (rows[0], rows[-1]))]
    text = f"{len(rows)} rows, {names[0]} to {names[1]}" if len(rows) > 3 else "; ".join(names)
    return f"{text} ({finding.profile})" + (f"\n{finding.note}" if finding.note else "")


def closing_lines(found: list[Finding]) -> list[str]:
    """The claims by verdict; those that rest on runs that did not train, by what their numbers alone would say."""
    groups = {
        verdict: [one for one in found if one.verdict == verdict and not one.is_untrained] for verdict in VERDICTS
    }
    for numbers, alone in NUMBERS_WORDS.items():
        told = f"FAIL, rests on a run that did not train, whose numbers by themselves {alone}"
        groups[told] = [one for one in found if one.is_untrained and one.numbers == numbers]
    return [
        f"{told}: {len(own)} of {len(found)}: {', '.join(one.claim.id for one in own)}"
        for told, own in groups.items()
        if own
    ]
