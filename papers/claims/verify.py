"""The verb `verify`: judges every claim of the papers by the records of a folder, or by the numbers that the original
published."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.base.console import counted, print_table
from harness.core.record import Record, records_of
from harness.devices import named_machines
from papers.claims import claims, judge
from papers.claims.claims import Claim
from papers.claims.examine import BROKEN, HOLD, OPEN
from papers.claims.judge import Finding
from papers.figures import case
from papers.figures.point import FigureRow, machine_of, row_of
from papers.figures.points import of_newest_key

PROFILES = (
    ("paper", claims.PAPER_MACHINE),
    ("paper", None),
    ("quick", None),
    ("fit", claims.PAPER_MACHINE),
    ("fit", None),
    ("demo", None),
)
PUBLISHED, IMPORTED = "published", "imported"
VERDICTS = (
    judge.PASS,
    judge.FAIL,
    judge.XFAIL,
    judge.XPASS,
    OPEN,
    judge.SIMULATED,
    judge.NOT_TESTED,
    judge.OTHER_MACHINE,
)
NUMBERS_WORDS = {
    HOLD: "would hold",
    BROKEN: "would fail, too",
    OPEN: "are not distinguishable",
    "": "are missing",
}
PAPER = named_machines.load(claims.PAPER_MACHINE)


def rows_of(number: int, records: Sequence[Record]) -> dict[str, list[FigureRow]]:
    """Return the rows of a case by name of the profile, beginning with the profile nearest to the claims' sizes.
    Imported logs are used only if there are no runs of this project."""
    runs = [record for record in records if record.origin == "run"]
    if not runs:
        return {IMPORTED: _imported(number, records)}
    return {
        case_profile.name: case.measured(number, case_profile, runs)
        for case_profile in case.possible(PROFILES, runs[-1].machine)
    }


def _imported(number: int, records: Sequence[Record]) -> list[FigureRow]:
    """Return the rows of imported logs for those points that the original published in this case."""
    rows = []
    for point in case.published(number):
        size = (point.method, point.num_layers, point.hidden_size)
        matches = [
            record
            for record in records
            if record.origin == IMPORTED
            and (record.job.method, record.job.workload.num_layers, record.job.workload.hidden_size) == size
            and point.window_size in (None, record.job.options.get("window_size"))
        ]
        if matches:
            rows.append(row_of(point.metric, of_newest_key(matches)))
    return rows


def findings(results: Path, against: str | None, machine: str | None, *places: Path) -> list[Finding]:
    """Return a finding for each claim, in the order of the claims files. Raises ValueError if the records are of
    several machines."""
    all_claims = claims.load(*places)
    if against == PUBLISHED:
        tables = {
            number: {PUBLISHED: case.published(number)} for number in {claim.case for claim in all_claims}
        }
        return [judge.judge(claim, tables[claim.case], judge.holds_there) for claim in all_claims]
    records = of_one_machine(records_of(results), machine)
    logs = sum(record.origin == IMPORTED for record in records)
    if 0 < logs < len(records):
        print(
            f"not judged beside runs measured here: {counted(logs, 'imported log')}; try a folder of their own with"
            " --results",
            file=sys.stderr,
        )
    emulated = {record.key for record in records if _has_paper_budget(record)}

    def is_there(claim: Claim, row: FigureRow) -> bool:
        return judge.holds_there(claim, row, bool(row.keys) and emulated.issuperset(row.keys))

    tables = {number: rows_of(number, records) for number in {claim.case for claim in all_claims}}
    if machine:  # the original's logs name no machine: take them to be of the machine that --machine names
        for rows in (rows for profiles in tables.values() for rows in profiles.values()):
            rows[:] = [row if row.machine else dataclasses.replace(row, machine=machine) for row in rows]
    return [judge.judge(claim, tables[claim.case], is_there) for claim in all_claims]


def is_of_logs(findings: Sequence[Finding]) -> bool:
    """True if the findings rest on imported logs instead of runs of this project."""
    return any(finding.profile == IMPORTED for finding in findings)


def of_one_machine(records: list[Record], machine: str | None) -> list[Record]:
    """Return all imported logs, and the runs of the machine whose name contains `asked`. None: all runs, which must be
    of one machine. Raises ValueError if they are of several machines, or if no record remains."""
    machines = sorted({machine_of(record) for record in records if record.origin != IMPORTED})
    if machine is None and len(machines) > 1:
        raise ValueError(
            f"expected runs of one machine, got runs of {len(machines)}: try --machine with one of {machines}"
        )
    is_paper = machine == claims.PAPER_MACHINE
    chosen = [
        record
        for record in records
        if record.origin == IMPORTED
        or (machine or "").lower() in machine_of(record).lower()
        or (is_paper and (_has_paper_budget(record) or "v100" in machine_of(record).lower()))
    ]
    if records and not chosen:
        raise ValueError(
            f"no record of machine {machine!r}: try --machine with one of {machines}, or a part of its name"
        )
    return chosen


def _has_paper_budget(record: Record) -> bool:
    budget, papers = record.job.budget, PAPER.budget_on(record.job.device)
    return (budget.device_bytes, budget.host_bytes) == (papers.device_bytes, papers.host_bytes)


def failed(findings: list[Finding]) -> bool:
    return any(finding.verdict in judge.BAD for finding in findings)


def print_findings(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        for finding in findings:
            print(json.dumps(finding.to_dict()))
        return
    of_logs = is_of_logs(findings)
    widths = {
        "claim": 27,
        "verdict": 19,
        "seen in the logs" if of_logs else "seen": 38,
        "expected": 38,
        "rests on, and why": 70,
    }
    title = "Judged by imported logs: nothing of this was measured here" if of_logs else None
    print_table(list(widths), map(_cells, findings), title, widths=widths, has_lines=True)
    for line in closing_lines(findings):
        print(line)


def _cells(finding: Finding) -> list[str]:
    is_told = finding.is_untrained and finding.numbers
    alone = f"\nnumbers by themselves {NUMBERS_WORDS[finding.numbers]}" if is_told else ""
    limits = f"\n{finding.claim.expected.text}" if finding.seen else ""
    said = finding.claim.text + limits
    return [finding.claim.id, finding.verdict, finding.seen + alone, said, _grounds(finding)]


def _grounds(finding: Finding) -> str:
    """Return a short text on the rows that a verdict rests on, followed by the finding's note."""
    rows = finding.rests_on
    if not rows:
        return finding.note
    names = [judge.label(row) for row in (rows if len(rows) <= 3 else (rows[0], rows[-1]))]
    text = f"{len(rows)} rows, {names[0]} to {names[1]}" if len(rows) > 3 else "; ".join(names)
    return f"{text} ({finding.profile})" + (f"\n{finding.note}" if finding.note else "")


def closing_lines(findings: list[Finding]) -> list[str]:
    """Return a line for each verdict that occurs, with its claims. Claims that rest on runs that did not train have
    lines of their own, one for each verdict that their numbers alone would give."""
    untrained = "FAIL, rests on a run that did not train, whose numbers by themselves {}"
    groups: dict[str, list[str]] = {
        heading: [] for heading in (*VERDICTS, *map(untrained.format, NUMBERS_WORDS.values()))
    }
    for finding in findings:
        by_numbers = untrained.format(NUMBERS_WORDS[finding.numbers])
        groups[by_numbers if finding.is_untrained else finding.verdict].append(finding.claim.id)
    return [
        f"{heading}: {len(identifiers)} of {len(findings)}: {', '.join(identifiers)}"
        for heading, identifiers in groups.items()
        if identifiers
    ]
