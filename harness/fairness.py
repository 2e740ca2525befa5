"""What each method ran with, side by side, from the records: who implements it, kernels, precision, clipping, data."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from harness.record import Record

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
