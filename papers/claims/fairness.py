"""The fairness table, made from the records: what each method ran with (implementation, kernels, precision, clipping,
data)."""

from __future__ import annotations

import textwrap

from harness.core.record import Record
from papers.figures import points

NOT_SAID = "not said"
COLUMNS = ("implementation", "model", "attention", "optimizer", "precision", "recompute", "clipping")


def fairness_rows(records: list[Record]) -> list[dict[str, str]]:
    """Return one row for each combination of method, options and dtype, from the newest record that trained."""
    frame, alike = points.record_frame(records), ["method", "options", "dtype"]
    trained = frame[(frame["status"] == "ok") & (frame["origin"] == "run")]
    newest = trained.drop_duplicates(alike, keep="last").sort_values(alike)
    return [
        {
            "method": f"{name} {dtype}" + (f" ({options})" if options else ""),
            **{column: record.description.get(column, NOT_SAID) for column in COLUMNS},
            "version": _version_of_implementation(record),
            "kernels seen": ", ".join(record.kernels) or "not watched",
            "data": f"{record.data_sha256[:8]}, in order",
            "gate": record.gate.verdict,
        }
        for name, options, dtype, record in newest[[*alike, points.RECORD_COLUMN]].itertuples(index=False)
    ]


def _version_of_implementation(record: Record) -> str:
    """Return the version of the package that implements the method; if no known package does, return this project's
    commit."""
    implementation = record.description.get("implementation", "")
    package = next(
        (name for name in ("deepspeed", "megatron-core", "torch") if name in implementation), "commit"
    )
    return f"{package} {record.software.get(package)}"


def column_answers(table_rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return, for each column, its different values (answers), each with the methods that have this value. A table with
    all columns side by side would be too wide for a page.

    A method's options are named only if its answer depends on them. The last entry lists the methods that lack a value
    in some column.
    """
    import pandas as pd

    table = pd.DataFrame(table_rows)
    if table.empty:
        return []
    method = table["method"].str.partition(" (")[0]
    rows = []
    for aspect in table.columns.drop("method"):
        varies = table.groupby(method)[aspect].transform("nunique") > 1
        for answer, names in method.mask(varies, table["method"]).groupby(table[aspect], sort=False):
            if answer != NOT_SAID:
                who = f"all {len(table)}" if len(names) == len(table) else ", ".join(names.unique())
                rows.append({"what": aspect, "answer": str(answer), "methods": who})
    unsaid = (table == NOT_SAID).any(axis=1)
    if unsaid.any():
        row = {"what": "what is not said", "answer": "a method tells it by describe()"}
        rows.append({**row, "methods": ", ".join(method[unsaid].unique())})
    return rows


def fairness_lines(table_rows: list[dict[str, str]], width: int) -> list[str]:
    """Return the table as lines of text: each column's name as a heading, followed by its answers."""
    texts: list[str] = []
    for row in column_answers(table_rows):
        texts += [row["what"]] * (row["what"] not in texts)
        texts += _wrapped(f"{row['answer']}: {row['methods']}", width)
    return texts


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent="  ",
        subsequent_indent="      ",
        break_long_words=False,
        break_on_hyphens=False,
    )
