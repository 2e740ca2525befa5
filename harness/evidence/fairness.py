"""What each method ran with, side by side, from the records: who implements it, kernels, precision, clipping, data."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.table import Table

from harness.core.record import Record

COLUMNS = ("implementation", "model", "attention", "optimizer", "precision", "recompute", "clipping")


def rows(records: list[Record]) -> list[dict[str, str]]:
    """One row for each method and set of options: its newest record that trained."""
    newest = {}
    for record in records:
        if record.status == "ok" and record.origin == "run":
            options = ", ".join(f"{name}={value}" for name, value in record.job.options.items())
            newest[record.job.method, options, record.job.workload.dtype] = record
    return [
        {
            "method": f"{name} {dtype}" + (f" ({options})" if options else ""),
            **{column: record.description.get(column, "not said") for column in COLUMNS},
            "version": _version(record),
            "kernels seen": ", ".join(record.kernels) or "not watched",
            "data": f"{record.data_sha256[:8]}, in order",
            "gate": record.gate.verdict,
        }
        for (name, options, dtype), record in sorted(newest.items())
    ]


def _version(record: Record) -> str:
    """Of the package that implements the method, where it names one; else this project's commit."""
    implementation = record.description.get("implementation", "")
    package = next((name for name in ("deepspeed", "megatron-core", "torch") if name in implementation), "commit")
    return f"{package} {record.software.get(package)}"


def lines(table_rows: list[dict[str, str]], width: int) -> list[str]:
    """Aspect by aspect each answer and who gives it, for no line has room for all columns: what all share is said once,
    and what differs stands side by side."""
    found = []
    for aspect in list(table_rows[0])[1:]:
        by_answer: dict[str, list[str]] = {}
        for row in table_rows:
            by_answer.setdefault(row[aspect], []).append(_who(row, aspect, table_rows))
        found.append(aspect)
        for answer, names in by_answer.items():
            who = f"all {len(names)}" if len(by_answer) == 1 else ", ".join(dict.fromkeys(names))
            found += textwrap.wrap(
                f"{answer}: {who}", width, initial_indent="  ", subsequent_indent="      ", break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip
    return found


def _who(row: dict[str, str], aspect: str, table_rows: list[dict[str, str]]) -> str:
    """The method, and its options where with others of them it answers otherwise."""
    name = row["method"].partition(" (")[0]
    answers = {other[aspect] for other in table_rows if other["method"].partition(" (")[0] == name}
    return name if len(answers) == 1 else row["method"]


def show(table_rows: list[dict[str, str]]) -> None:
    """The table as text, as wide as the terminal, or 200 columns."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    table = Table(show_lines=True)
    for column in table_rows[0]:
        table.add_column(column, overflow="fold")
    for row in table_rows:
        table.add_row(*row.values())
    console.print(table)
