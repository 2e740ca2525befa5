"""Tells if other code than its identity's made a record, or other code than that of the run that it is evidence for.
Then no verdict may rest on the record."""

from __future__ import annotations

from harness.core.record import Record
from harness.gate.trial import Trial

REASONS = UNLISTED, CHANGED = "unlisted-code", "changed-code"
AGAIN = "trained by other source code than the run; try the same call again"


def fault(record: Record) -> tuple[str, str] | None:
    """Return the reason, a word for programs, and a text for people, if the run executed code that its key does not
    cover, or if its code or data changed meanwhile; else None."""
    if unlisted := record.software.get("unlisted"):
        text = f"it executed {some(unlisted)}, which its identity lacks; import it by its name in the method's file"
        return UNLISTED, text
    if changed := record.software.get("changed"):
        return CHANGED, f"{some(changed)} changed while it ran or waited; try the same call again"
    return None


def is_of_another(record: Record, run: Record) -> bool:
    """True if other source code of the method trained `record` than the run that it is evidence for."""
    return record.software.get("source") != run.software.get("source")


def of_trial(trial: Trial, run: Record) -> str:
    """Return, as text, why a trial is no evidence of how the run's code trains; empty if it is."""
    if is_of_another(trial.record, run):
        return f"the probe in {trial.dtype}: {AGAIN}"
    for record in (trial.record, trial.reference, *trial.others):
        if of_code := fault(record):
            return f"{record.job.method}'s probe in {trial.dtype}: {of_code[1]}"
    return ""


def some(names: list[str]) -> str:
    """Return the first three names as text, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
