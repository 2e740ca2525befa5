"""Writes docs/records.md from the types by which every record is checked. The page itself names the command that writes
it."""

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
from the types: `.venv/bin/python -m papers.report.record_schema > docs/records.md`.

Beside `schema_version` (now {version}) the file has the fields of Record. `gate` also has `{speed}`, where the gate
passed, for other readers: it is derived anew when a record is read. `origin` is `run`, or `imported` from a log;
`software.source` is the hash of the code that decides how the method trains. The reference's own records are those of
the method that `is_reference`; `harness.load()` marks them in a column.

## What makes two runs the same

`key` is a hash of what made a run. A record of the same key answers the same call; any change below is another run.

In it are

- the job: method, every option, workload, steps, warm-up, device, budgets of memory and of the link's rate; of folders,
  of the corpus and of the folder of weights the names, too;
- the source: the code that the method's file imports, directly or not, within the project and beside the file; of an
  installed package its version, of one that lies elsewhere on Python's path a hash of its code, also in archives and
  compiled files, and of the packages that it imports; `sitecustomize` and `usercustomize`, where Python has them;
- the corpus: of its two files the sizes and 256 blocks, and the samples that are trained on, 1,024 at most;
- the weights that `--weights` names: of each file the size and 16,384 blocks, which are all of one up to 64 MiB;
- the machine: CPU or GPU, how many and which cores the run may use, versions of Python (such as 3.12), torch, numpy,
  DeepSpeed and megatron-core, variables that change kernels or threads, such as `OMP_NUM_THREADS`, and those of torch's
  allocator on a GPU;
- the place: for containers, Slurm, Kubernetes and torchrun, what names the image and the nodes.

The key is taken when it is the run's turn at the device, and again after the run. If it changed, or if a process of the
run executed a file in another state, the record says what changed, the run is `untested`, and the same call runs it
again. A run is also `untested`, and says why, if one of its processes (the worker, each rank, their forks) executed
other code than the source above: a file whose name is computed, a text by `exec()`, a program or another Python that
the method's code starts. Not seen are libraries that are opened by ctypes, programs that an installed package starts,
what an installed package executes on a method's behalf, and lines of `.pth` files.

Not in it are the time limit, the trace, the folder of `--save`, the extent of the probe, comments, docstrings and
layout of Python (docstrings count in a file that mentions `__doc__`), the harness around the method, the operating
system, compilers, drivers, clocks and temperatures, and whatever else runs: a record tells what of these it saw, under
`machine` and `software`. Nor are variables that a method reads by itself, data files other than texts (such as .json,
.yaml, .csv) that its source names by a constant and that lie beside it, and what the folder of `--resume` holds: after
a change of these measure into a new folder of results.
"""
# Matches a line that declares a field of a class: the comment above it, its name, its type and default, and the comment
# beside it.
FIELD = re.compile(r"(?:^    # (.*)\n)?^    ([a-z]\w*): ([^#\n]+?)(?: *# *(.*))?$", re.MULTILINE)
RECORD_TYPES = (
    Record,
    Job,
    Workload,
    Budget,
    Rates,
    Gate,
    record_parts.Tensor,
    record_parts.Other,
    record_parts.Evidence,
    record_parts.MachineFacts,
    record_parts.SoftwareFacts,
    record_parts.ScheduleFacts,
)


def page() -> str:
    head = HEAD.format(version=record.SCHEMA_VERSION, speed=record.SPEED)
    return "\n".join([head, *map(_table, RECORD_TYPES)])


def _table(kind: Any) -> str:
    """Return, in Markdown, a table of a class's fields as the source declares them, with each one's comment."""
    rows = [
        f"## {kind.__name__}",
        "",
        textwrap.fill(_table_text(inspect.getdoc(kind) or ""), 118),
        "",
        "| field | type | meaning |",
        "|---|---|---|",
    ]
    for above, name, declared, beside in FIELD.findall(inspect.getsource(kind)):
        type_text, _, default = declared.partition(" = ")
        type_text, mark = _type_and_mark(type_text.strip())
        is_required = mark == "Required" or not (mark or default or getattr(kind, "__total__", True) is False)
        note = "; ".join(
            part for part in ("required" if is_required else "", _table_text(beside or above)) if part
        )
        rows.append(f"| `{name}` | {_table_text(type_text).replace(' / ', ' or ')} | {note} |")
    return "\n".join([*rows, ""])


def _type_and_mark(type_text: str) -> tuple[str, str]:
    """Return the type of a dictionary's key without its mark, and the mark: Required, NotRequired or ""."""
    match = re.fullmatch(r"(Required|NotRequired)\[(.*)\]", type_text)
    return (match[2], match[1]) if match else (type_text, "")


def _table_text(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


if __name__ == "__main__":
    print(page(), end="")
