"""How a call ends: the one table of exit codes, which README shows, and what a call of several jobs makes of theirs."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.record import Record

OK, CHECK_FAILED, USAGE, CRASH, MEMORY, GATE_FAILED, TIMEOUT, UNAVAILABLE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 7, 130
BY_STATUS = {
    "crash": CRASH, "killed": CRASH, "oom-device": MEMORY, "oom-host": MEMORY, "does-not-fit": MEMORY,
    "timeout": TIMEOUT, "unavailable": UNAVAILABLE, "interrupted": INTERRUPTED,
}  # fmt: skip
SERIOUS = {CRASH, GATE_FAILED, INTERRUPTED}  # also of one of several jobs; the others are results


def of_records(records: Sequence[Record], is_sweep: bool) -> int:
    """Of several jobs, a run without a verdict is a result, and so is a failed gate of a method that is not exact by
    its own description; a crash, of the reference too, or any other failed gate is an error."""
    several = is_sweep or len(records) > 1
    codes = {BY_STATUS.get(record.status, OK) for record in records}
    for record in records:
        if record.status == "ok" and not record.gate.passed and (record.is_exact or not several):
            reference = BY_STATUS.get(record.gate.evidence.get("reference_ended", ""))
            codes.add(CRASH if reference == CRASH else GATE_FAILED)
    return min((codes & SERIOUS if several else codes) - {OK}, default=OK)
