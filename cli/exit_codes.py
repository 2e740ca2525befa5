"""The exit codes of a call, which README's table explains, and the rules that give one exit code for several jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.core.record import Record

if TYPE_CHECKING:
    from papers.claims.baseline import BaselineComparison

OK, CHECK_FAILED, USAGE, CRASH, MEMORY, GATE_FAILED, TIMEOUT, UNAVAILABLE, SLOWER = range(9)
INTERRUPTED = 130
BY_STATUS = {
    "crash": CRASH,
    "killed": CRASH,
    "oom-device": MEMORY,
    "oom-host": MEMORY,
    "does-not-fit": MEMORY,
    "timeout": TIMEOUT,
    "unavailable": UNAVAILABLE,
    "interrupted": INTERRUPTED,
}
# codes that are errors even among several jobs; the other codes are then results
SERIOUS = {CRASH, GATE_FAILED, INTERRUPTED}


def of_records(records: Sequence[Record], is_sweep: bool) -> int:
    """Return the one exit code for these jobs. For a single job, every failure is an error.

    For several jobs, or for a sweep (`is_sweep`), only these are errors: a crash of a run or of its reference, a failed
    gate of a method that is declared exact, and an interruption. All other failures are results.
    """
    several = is_sweep or len(records) > 1
    codes = {BY_STATUS.get(record.status, OK) for record in records}
    for record in records:
        if record.status == "ok" and not record.gate.passed and (record.is_exact or not several):
            reference = BY_STATUS.get(record.gate.evidence.get("reference_ended", ""))
            codes.add(CRASH if reference == CRASH else GATE_FAILED)
    return min((codes & SERIOUS if several else codes) - {OK}, default=OK)


def of_baseline(comparisons: Sequence[BaselineComparison], missing_points: Sequence[str]) -> int:
    """Return the exit code of `compare --baseline`. The worst finding decides: first a point that trains differently
    from the baseline, then a point that is missing or could not be compared, then a slower point."""
    if any(comparison.trains_otherwise for comparison in comparisons):
        return GATE_FAILED
    if missing_points or not comparisons or not all(comparison.is_compared for comparison in comparisons):
        return CHECK_FAILED
    return SLOWER if any(comparison.is_slower for comparison in comparisons) else OK
