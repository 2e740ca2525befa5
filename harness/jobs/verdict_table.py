"""Makes a table of the gate's verdicts of a sweep, with a row for each method and a column for each model; can write it
as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base.console import counted
from harness.base.whole_file import write_page
from harness.core.job import Job, Workload
from harness.core.record import Record
from harness.devices import machine

TABLE_TITLE = "The gate's verdicts, methods by models"
Outcome = Record | str  # a job's record, or the reason why its method refused the job


@dataclass(frozen=True)
class Table:
    """A table for a page, with a title above it and notes below it. `heads`: the heads of its columns."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def model_heads(jobs: Sequence[Job]) -> dict[Workload, str] | None:
    """Return the head of each model's column: its name; if two names are equal, its name and number of layers; if two
    of these heads are equal, too, its width beside them. None if two models have the same layers and width."""
    models = list(dict.fromkeys(job.workload for job in jobs))
    names = [load.model_name for load in models]
    layers = [load.layers_text for load in models]
    layers_and_widths = [f"{load.layers_text} x {load.hidden_size}" for load in models]
    for heads in (names, layers, layers_and_widths):
        if len(set(heads)) == len(heads):
            return dict(zip(models, heads, strict=True))
    return None


def verdict_rows(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return the rows of the table, one for each method with its options as asked: a title, and the verdict on each
    model in the order of model_heads(); "-" for a model that was not asked of this method with these options."""
    verdicts: dict[str, dict[Workload, str]] = {}
    for job, outcome in zip(jobs, outcomes, strict=True):
        title = " ".join([job.method, *(f"{name}={value}" for name, value in job.options.items())])
        verdicts.setdefault(title, {})[job.workload] = verdict_text(outcome)
    models = list(dict.fromkeys(job.workload for job in jobs))
    return [[title, *(cells.get(model, "-") for model in models)] for title, cells in verdicts.items()]


def verdict_text(outcome: Outcome) -> str:
    """Return the gate's verdict on a run, or how the run ended if it has no verdict.

    A verdict other than exact comes with the largest relative difference of a loss, if the gate measured it.
    """
    if isinstance(outcome, str):
        return "refused"
    if outcome.status != "ok":
        return outcome.status
    gate = outcome.gate
    difference = gate.evidence.get("loss_difference")
    if gate.verdict == "exact" or difference is None:
        return gate.verdict
    return f"{gate.verdict}, {difference:.1e}"


def write_markdown(path: Path, command: str, table: Table) -> None:
    """Write a file with the table's title, the command that made the table, this machine's CPU, the table and its
    notes."""
    about = f"By `{command}` on {machine.facts()['cpu']}, {counted(machine.facts()['cores'], 'core')}."
    lines = [f"# {table.title}", "", about, ""]
    for cells in (table.heads, ["---"] * len(table.heads), *table.rows):
        lines.append(f"| {' | '.join(cells)} |")
    if table.notes:
        lines += ["", *(f"- {note}" for note in table.notes)]
    write_page(path, "\n".join([*lines, ""]))
