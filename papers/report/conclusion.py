"""The two sentences with which a report begins: what was measured on which machine, and which claims hold."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.base.console import counted
from harness.core.record import Record
from papers.claims import judge
from papers.claims.judge import OPEN, Finding
from papers.figures import plot

MOST_QUOTED = 2  # most claims of one kind that are quoted
END_TEXTS = {
    "oom-device": "ran out of device memory",
    "oom-host": "ran out of host memory",
    "does-not-fit": "did not fit by plan",
    "timeout": "took too long",
    "crash": "crashed",
    "unavailable": "lacked an engine",
}
VERDICT_KINDS = (
    ((judge.PASS, judge.XPASS), "holds", "hold"),
    ((judge.FAIL, judge.XFAIL), "does not hold", "do not hold"),
    ((OPEN,), "cannot be told from noise", "cannot be told from noise"),
)


def opening_sentences(
    records: Sequence[Record], findings: Sequence[Finding], machines: Sequence[str]
) -> list[str]:
    """Return the two sentences. `machines`: a text for each machine that made a run; empty if all records are imported
    logs."""
    return [_runs_sentence(records, machines), _claims_sentence(findings)]


def _runs_sentence(records: Sequence[Record], machines: Sequence[str]) -> str:
    runs = [record for record in records if record.origin == "run"]
    counted_records = runs or list(records)
    clocks = dict.fromkeys(plot.CLOCKS.get(record.clock, record.clock) for record in runs)
    where = "In imported logs"
    if runs:
        where = f"On {'; and on '.join(machines)}, by the clock {' and '.join(clocks)}"
    num_methods = len({record.job.method for record in counted_records})
    num_trained = sum(record.status == "ok" and record.gate.passed for record in counted_records)
    runs_text, methods_text = counted(len(counted_records), "run"), counted(num_methods, "method")
    parts = [f"{num_trained} of {runs_text} of {methods_text} trained as the reference does"]
    if num_failed := sum(map(_has_failed, counted_records)):
        parts.append(f"{num_failed} failed the gate")
    ends = [record.status for record in counted_records if record.status != "ok"]
    for status in dict.fromkeys(ends):
        parts.append(f"{ends.count(status)} {END_TEXTS.get(status, f'ended as {status}')}")
    return f"{where}, {_joined_by_and(parts)}."


def _has_failed(record: Record) -> bool:
    return record.status == "ok" and record.gate.verdict == "failed"


def _claims_sentence(findings: Sequence[Finding]) -> str:
    parts = []
    for verdicts, singular, plural in VERDICT_KINDS:
        texts = [_headline(finding.claim.text) for finding in findings if finding.verdict in verdicts]
        if texts:
            more_text = f"; and {len(texts) - MOST_QUOTED} more" if len(texts) > MOST_QUOTED else ""
            quoted = "; ".join(f'"{text}"' for text in texts[:MOST_QUOTED])
            parts.append(f"{len(texts)} {singular if len(texts) == 1 else plural} ({quoted}{more_text})")
    if not parts:
        return f"None of {counted(len(findings), 'claim')} of the papers could be tested by them."
    num_decided = sum(finding.verdict in verdicts for verdicts, *_ in VERDICT_KINDS for finding in findings)
    return f"Of {counted(len(findings), 'claim')} of the papers {num_decided} could be tested: {_joined_by_and(parts)}."


def _headline(text: str) -> str:
    """Return the main statement of a claim: the text up to the first semicolon or period."""
    return re.split(r"[;.] ", text)[0].rstrip(".")


def _joined_by_and(texts: Sequence[str]) -> str:
    return ", and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
