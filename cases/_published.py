"""The published numbers as rows: claims/published.csv, one line for each of the artifact's runs that a figure draws.

Times are medians over iterations 11 to 50 of one process, from its logs; of the killed run, its only interval.
"""

from __future__ import annotations

import csv

from harness.core.job import Workload
from harness.core.method import ROOT
from harness.figures.point import Row

FILE = ROOT / "claims" / "published.csv"
MACHINE = "V100-32GB, virtual machine"


def rows(metric: str, case: int) -> list[Row]:
    """The rows of a case in the file's order, in `metric`."""
    with FILE.open(newline="") as lines:
        return [_row(metric, line) for line in csv.DictReader(lines) if str(case) in line["cases"].split()]


def _row(metric: str, line: dict[str, str]) -> Row:
    workload = Workload(num_layers=int(line["num_layers"]))
    seconds = float(line["step_ms"]) / 1000
    values = {
        "params": float(workload.num_params),
        "step_seconds": seconds,
        "samples_per_second": workload.batch_size / seconds,
    }
    return Row(
        metric, line["method"], workload.num_layers, workload.hidden_size, int(line["window_size"] or 0) or None,
        values[metric], valid=not line["reason"], reason=line["reason"], status=line["status"], origin="published",
        machine=MACHINE, clock="cuda",
    )  # fmt: skip
