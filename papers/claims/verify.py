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
from papers.claims.judge import IMPORTED, NUMBERS_SENTENCE_ENDS, PUBLISHED, VERDICTS, Finding, is_of_logs
from papers.figures import case
from papers.figures.point import FigureRow, machine_of, row_of
from papers.figures.points import of_newest_key

# profiles whose rows may test a claim, the nearest to the claims' sizes first: name, machine with its memories
PROFILES = (
    ("paper", claims.PAPER_MACHINE),
    ("paper", None),
    ("quick", None),
    ("fit", claims.PAPER_MACHINE),
    ("fit", None),
    ("demo", None),
)
PAPER_MACHINE_FACTS = named_machines.load(claims.PAPER_MACHINE)


def rows_of(number: int, records: Sequence[Record]) -> dict[str, list[FigureRow]]:
    """Return the rows of a case by name of the profile, beginning with the profile nearest to the claims' sizes.
    Imported logs are used only if there are no runs of this project."""
    runs = [record for record in records if record.origin == "run"]
    if not runs:
        return {IMPORTED: _rows_of_logs(number, records)}
    return {
        case_profile.name: case.measured_rows(number, case_profile, runs)
        for case_profile in case.possible_profiles(PROFILES, runs[-1].machine)
    }


def _rows_of_logs(number: int, records: Sequence[Record]) -> list[FigureRow]:
    """Return the rows of imported logs for those points that the original published in this case."""
    rows = []
    for point in case.published_rows(number):
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
    all_claims = claims.load_claims(*places)
    if against == PUBLISHED:
        tables = {
            number: {PUBLISHED: case.published_rows(number)}
            for number in {claim.case for claim in all_claims}
        }
        return [
            judge.judge_claim(claim, tables[claim.case], judge.is_on_claimed_machine) for claim in all_claims
        ]
    records = of_one_machine(records_of(results), machine)
    num_logs = sum(record.origin == IMPORTED for record in records)
    if 0 < num_logs < len(records):
        print(
            f"not judged beside runs measured here: {counted(num_logs, 'imported log')}; try a folder of their own with"
            " --results",
            file=sys.stderr,
        )
    emulated_keys = {record.key for record in records if _has_paper_budget(record)}

    def is_on_its_machine(claim: Claim, row: FigureRow) -> bool:
        return judge.is_on_claimed_machine(claim, row, bool(row.keys) and emulated_keys.issuperset(row.keys))

    tables = {number: rows_of(number, records) for number in {claim.case for claim in all_claims}}
    if machine:  # the original's logs name no machine: take them to be of the machine that --machine names
        for rows_by_profile in tables.values():
            for rows in rows_by_profile.values():
                rows[:] = [row if row.machine else dataclasses.replace(row, machine=machine) for row in rows]
    return [judge.judge_claim(claim, tables[claim.case], is_on_its_machine) for claim in all_claims]


def of_one_machine(records: list[Record], machine: str | None) -> list[Record]:
    """Return all imported logs, and the runs of the machine whose name contains `machine`. None: all runs, which must
    be of one machine. Raises ValueError if they are of several machines, or if no record remains."""
    machines = sorted({machine_of(record) for record in records if record.origin != IMPORTED})
    if machine is None and len(machines) > 1:
        raise ValueError(
            f"expected runs of one machine, got runs of {len(machines)}: try --machine with one of {machines}"
        )
    is_paper = machine == claims.PAPER_MACHINE
    kept = [
        record
        for record in records
        if record.origin == IMPORTED
        or (machine or "").lower() in machine_of(record).lower()
        or (is_paper and (_has_paper_budget(record) or "v100" in machine_of(record).lower()))
    ]
    if records and not kept:
        raise ValueError(
            f"no record of machine {machine!r}: try --machine with one of {machines}, or a part of its name"
        )
    return kept


def _has_paper_budget(record: Record) -> bool:
    budget, paper_budget = record.job.budget, PAPER_MACHINE_FACTS.budget_on(record.job.device)
    memories = (budget.device_bytes, budget.host_bytes)
    return memories == (paper_budget.device_bytes, paper_budget.host_bytes)


def has_bad_verdict(findings: list[Finding]) -> bool:
    return any(finding.verdict in judge.BAD_VERDICTS for finding in findings)


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
    print_table(list(widths), map(_finding_cells, findings), title, widths=widths, has_lines=True)
    for line in closing_lines(findings):
        print(line)


def _finding_cells(finding: Finding) -> list[str]:
    claim, values = finding.claim, finding.values_text
    if finding.is_untrained and finding.numbers_verdict:
        values += f"\nnumbers by themselves {NUMBERS_SENTENCE_ENDS[finding.numbers_verdict]}"
    limits = f"\n{claim.expected.text}" if finding.values_text else ""
    return [claim.id, finding.verdict, values, claim.text + limits, _grounds(finding)]


def _grounds(finding: Finding) -> str:
    """Return a short text on the rows that a verdict rests on, followed by the finding's note."""
    rows = finding.rests_on
    if not rows:
        return finding.note
    names = [judge.row_label(row) for row in (rows if len(rows) <= 3 else (rows[0], rows[-1]))]
    text = f"{len(rows)} rows, {names[0]} to {names[1]}" if len(rows) > 3 else "; ".join(names)
    return f"{text} ({finding.profile})" + (f"\n{finding.note}" if finding.note else "")


def closing_lines(findings: list[Finding]) -> list[str]:
    """Return a line for each verdict that occurs, with its claims. Claims that rest on runs that did not train have
    lines of their own, one for each verdict that their numbers alone would give."""
    untrained = "FAIL, rests on a run that did not train, whose numbers by themselves {}"
    groups: dict[str, list[str]] = {
        heading: [] for heading in (*VERDICTS, *map(untrained.format, NUMBERS_SENTENCE_ENDS.values()))
    }
    for finding in findings:
        untrained_heading = untrained.format(NUMBERS_SENTENCE_ENDS[finding.numbers_verdict])
        groups[untrained_heading if finding.is_untrained else finding.verdict].append(finding.claim.id)
    return [
        f"{heading}: {len(identifiers)} of {len(findings)}: {', '.join(identifiers)}"
        for heading, identifiers in groups.items()
        if identifiers
    ]
