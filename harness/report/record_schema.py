"""docs/records.md, made from the types that check every record: it names the command that writes it."""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from harness.core import record, record_parts
from harness.core.job import Budget, Job, Workload
from harness.core.rates import Rates
from harness.core.record import Gate, Record

HEAD = """# What a record holds

One JSON file is one attempt at a job. It is checked against these types when it is read; a field that is not listed is
an error, except in the parts that say otherwise. Numbers that JSON lacks are text (`"nan"`, `"inf"`). This page is made
from the types: `.venv/bin/python -m harness.report.record_schema > docs/records.md`.

Beside `schema_version` (now {version}) the file has the fields of Record. `gate` also has `{speed}`, where the gate
passed, for other readers: it is derived anew when a record is read. `origin` is `run`, or `imported` from a log;
`software.source` is the hash of the code that decides how the method trains. The reference's own records are those of
the method that `is_reference`; `harness.load()` marks them in a column.
"""
# Of a class: a field's name, its type and default, and the remark beside it.
FIELD = re.compile(r"^    ([a-z]\w*): ([^#\n]+?)(?: *# *(.*))?$", re.MULTILINE)
PARTS = (Record, Job, Workload, Budget, Rates, Gate, record_parts.Tensor, record_parts.Other, record_parts.Evidence,
         record_parts.Machine, record_parts.Schedule)  # fmt: skip


def page() -> str:
    head = HEAD.format(version=record.SCHEMA_VERSION, speed=record.SPEED)
    return "\n".join([head, *map(_table, PARTS)])


def _table(kind: Any) -> str:
    """Its fields as its source declares them, with the remark beside each."""
    rows = [
        f"## {kind.__name__}",
        "",
        textwrap.fill(_plain(inspect.getdoc(kind) or ""), 118),
        "",
        "| field | type | |",
        "|---|---|---|",
    ]
    for name, declared, remark in FIELD.findall(inspect.getsource(kind)):
        type_text, _, default = declared.partition(" = ")
        is_required = name in vars(kind).get("__required_keys__", [] if default else [name])
        note = "; ".join(part for part in ("required" if is_required else "", _plain(remark)) if part)
        rows.append(f"| `{name}` | {_plain(type_text.strip()).replace(' / ', ' or ')} | {note} |")
    return "\n".join([*rows, ""])


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


if __name__ == "__main__":
    print(page(), end="")
