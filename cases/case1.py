"""Figure 6a: how large a model does each method train in the same memories?

The largest depth is searched by real runs; a cross is the smallest depth that failed above it. The paper's profile also
tries the published sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.core.job import Job
from harness.core.record import Record
from harness.figures import case, plot
from harness.figures.point import FigureRow, row_of
from harness.figures.profile import Profile

METRIC = "params"
METHODS = ("megatron-lm", "l2l", "zero-offload", "zero-infinity", "stronghold")  # in the figure's order
SEARCHES = METHODS
RUNS = {"paper": {"megatron-lm": 32, "l2l": 78, "zero-offload": 48, "zero-infinity": 48, "stronghold": 100}}


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    return [used.probe(name, depth) for name, depth in RUNS.get(used.kind, {}).items()]


def table(records: Sequence[Record], used: Profile) -> list[FigureRow]:
    """For each method its largest size, then the smallest above it that failed."""
    rows = []
    for name in METHODS:
        is_final = case.is_searched(name, records)
        rows += [replace(row_of(METRIC, part), is_final=is_final) for part in case.largest(name, records) if part]
    return rows


def pick(rows: Sequence[FigureRow]) -> list[FigureRow]:
    """For each method the largest size that trained, with a passed gate if there is one, then the next that failed."""
    found = []
    for name in METHODS:
        own = sorted((row for row in rows if row.method == name), key=lambda row: row.value or 0.0)
        trained = [row for row in own if plot.succeeded(row)]
        best = next((row for row in reversed(trained) if row.valid), trained[-1] if trained else None)
        failed = [
            row for row in own if not plot.succeeded(row) and (best is None or (row.value or 0.0) > (best.value or 0.0))
        ]
        found += [replace(best, is_final=bool(failed))] if best else []
        found += failed[:1]
    return found
