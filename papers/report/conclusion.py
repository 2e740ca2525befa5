"""The two sentences with which a report begins: what was measured on which machine, and which claims hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.base.console import counted
from harness.core.record import Record
from papers.claims import judge
from papers.claims.examine import OPEN
from papers.claims.judge import Finding
from papers.figures import plot

MOST_NAMED = 2  # most claims of one kind that are quoted
ENDS = {
    "oom-device": "ran out of device memory",
    "oom-host": "ran out of host memory",
    "does-not-fit": "did not fit by plan",
    "timeout": "took too long",
    "crash": "crashed",
    "unavailable": "lacked an engine",
}
KINDS = (
    ((judge.PASS, judge.XPASS), "holds", "hold"),
    ((judge.FAIL, judge.XFAIL), "does not hold", "do not hold"),
    ((OPEN,), "cannot be told from noise", "cannot be told from noise"),
)


def sentences(records: Sequence[Record], findings: Sequence[Finding], machines: Sequence[str]) -> list[str]:
    """Return the two sentences. `machines`: a text for each machine that made a run; empty if all records are imported
    logs."""
    return [_runs_sentence(records, machines), _claims_sentence(findings)]


def _runs_sentence(records: Sequence[Record], machines: Sequence[str]) -> str:
    runs = [record for record in records if record.origin == "run"]
    shown = runs or list(records)
    clocks = dict.fromkeys(plot.CLOCKS.get(record.clock, record.clock) for record in runs)
    where = (
        f"On {'; and on '.join(machines)}, by the clock {' and '.join(clocks)}"
        if runs
        else "In imported logs"
    )
    methods = len({record.job.method for record in shown})
    trained = sum(record.status == "ok" and record.gate.passed for record in shown)
    parts = [
        f"{trained} of {counted(len(shown), 'run')} of {counted(methods, 'method')} trained as the reference does"
    ]
    parts += [f"{failed} failed the gate" for failed in [sum(map(_has_failed, shown))] if failed]
    ends = [record.status for record in shown if record.status != "ok"]
    parts += [
        f"{ends.count(status)} {ENDS.get(status, f'ended as {status}')}" for status in dict.fromkeys(ends)
    ]
    return f"{where}, {_joined(parts)}."


def _has_failed(record: Record) -> bool:
    return record.status == "ok" and record.gate.verdict == "failed"


def _claims_sentence(findings: Sequence[Finding]) -> str:
    parts = []
    for verdicts, one, several in KINDS:
        texts = [_headline(finding.claim.text) for finding in findings if finding.verdict in verdicts]
        if texts:
            left = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
            quoted = "; ".join(f'"{text}"' for text in texts[:MOST_NAMED])
            parts.append(f"{len(texts)} {one if len(texts) == 1 else several} ({quoted}{left})")
    if not parts:
        return f"None of {counted(len(findings), 'claim')} of the papers could be tested by them."
    num_decided = sum(finding.verdict in verdicts for verdicts, *_ in KINDS for finding in findings)
    return (
        f"Of {counted(len(findings), 'claim')} of the papers {num_decided} could be tested: {_joined(parts)}."
    )


def _headline(text: str) -> str:
    """Return the main statement of a claim: the text up to the first semicolon or period."""
    return re.split(r"[;.] ", text)[0].rstrip(".")


def _joined(texts: Sequence[str]) -> str:
    return ", and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
