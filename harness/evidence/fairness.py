"""What each method ran with, side by side, from the records: its implementation, kernels, precision, clipping, data."""

from __future__ import annotations

import textwrap

from harness.core.record import Record

UNSAID = "not said"
COLUMNS = ("implementation", "model", "attention", "optimizer", "precision", "recompute", "clipping")


def rows(records: list[Record]) -> list[dict[str, str]]:
    """One row for each method, set of options and dtype: its newest record that trained."""
    newest = {}
    for record in records:
        if record.status == "ok" and record.origin == "run":
            options = ", ".join(f"{name}={value}" for name, value in record.job.options.items())
            newest[record.job.method, options, record.job.workload.dtype] = record
    return [
        {
            "method": f"{name} {dtype}" + (f" ({options})" if options else ""),
            **{column: record.description.get(column, UNSAID) for column in COLUMNS},
            "version": _version(record),
            "kernels seen": ", ".join(record.kernels) or "not watched",
            "data": f"{record.data_sha256[:8]}, in order",
            "gate": record.gate.verdict,
        }
        for (name, options, dtype), record in sorted(newest.items())
    ]


def _version(record: Record) -> str:
    """The version of the package that implements the method, or else this project's commit."""
    implementation = record.description.get("implementation", "")
    package = next((name for name in ("deepspeed", "megatron-core", "torch") if name in implementation), "commit")
    return f"{package} {record.software.get(package)}"


def lines(table_rows: list[dict[str, str]], width: int) -> list[str]:
    """Each column as a heading, then each answer with the methods that give it: a line has no room for all columns.
    Options are named only where they change a method's answer. At the foot which methods do not answer."""
    import pandas as pd

    table = pd.DataFrame(table_rows)
    method = table["method"].str.partition(" (")[0]
    found = []
    for aspect in table.columns.drop("method"):
        varies = table.groupby(method)[aspect].transform("nunique") > 1
        found.append(aspect)
        for answer, names in method.mask(varies, table["method"]).groupby(table[aspect], sort=False):
            if answer != UNSAID:
                who = f"all {len(table)}" if len(names) == len(table) else ", ".join(names.unique())
                found += _wrapped(f"{answer}: {who}", width)
    unsaid = (table == UNSAID).any(axis=1)
    if unsaid.any():
        found += [
            "what is not said",
            *_wrapped(f"a method tells it by describe(): {', '.join(method[unsaid].unique())}", width),
        ]
    return found


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
