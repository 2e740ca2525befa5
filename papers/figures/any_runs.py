"""Makes a case's figure from any records in a folder: runs made by hand, of any sizes, and imported logs.

Runs by other code than their method's newest run are left out. All runs of a figure must have the same machine, device,
dtype, sizes of a step and budget. If records differ in one of these, nothing is drawn: the error tells the difference,
and how to choose records. The case's pick(rows) chooses the rows that its figure shows. If runs of a method differ in
their window, cases about windows or largest sizes use all runs, and other cases use those with the published window.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from harness.core.job import gib
from harness.core.record import Record
from papers.figures import case, frame, measurements
from papers.figures.point import FigureRow
from papers.figures.profile import PUBLISHED_WINDOW

if TYPE_CHECKING:
    from pandas import DataFrame

NAME = "folder"  # stands in file names in place of a profile's name
OF_WORKLOAD = (
    "dtype",
    "hidden_size",
    "num_heads",
    "batch_size",
    "micro_batches",
    "seq_len",
    "vocab_size",
    "dropout",
)
# columns that must be equal in all runs of a figure
ALIKE = ("origin", "machine", "device", *OF_WORKLOAD, "device_memory", "host_memory")
CHOICES = (*ALIKE, "window_size", "num_layers", "method", "steps")  # names that --where accepts


def facts(found: DataFrame) -> DataFrame:
    """Return a row of facts for each run, as text with the names and values that --where accepts. A cell is missing if
    an imported log does not give the fact."""
    unsaid = [record.evidence.get("unsaid", ()) for record in found[frame.RECORD]]
    windows = [record.job.options.get("window_size") for record in found[frame.RECORD]]
    told = found.assign(
        machine=found["machine"].replace("", "unknown"),
        device_memory=found["budget_device_bytes"].map(_memory),
        host_memory=found["budget_host_bytes"].map(_memory),
        window_size=[str(window) if window else None for window in windows],
    )[list(CHOICES)].map(str, na_action="ignore")
    for name in OF_WORKLOAD:
        told.loc[[name in each for each in unsaid], name] = None
    return told


def _memory(size: float) -> str:
    return gib(size).replace(" ", "") if size > 0 else "none"


def table(number: int, records: Sequence[Record], where: Sequence[str] = ()) -> list[FigureRow]:
    """Return the rows of case `number`, made from the records that `where` selects; each of its texts is NAME=VALUE.
    Raises ValueError if there are no rows, or if the runs differ in a column of ALIKE."""
    its, chosen = case.load(number), dict(map(_choice, where))
    if not its.picks:
        raise ValueError(
            f"case {number}: expected --profile, because this case draws only its own runs; try {case.call(number)}"
            " first"
        )
    found = frame.of(records)
    found = found[found["method"].isin(its.methods) & found["is_result"]]
    told = facts(found)
    for name, value in chosen.items():
        told = told[told[name].isna() | (told[name] == value)]
    found = found.loc[told.index]
    kept = measurements.of_newest_code(found[frame.RECORD])
    if num_others := len(found) - len(kept):
        others = f"{num_others} of {len(found)} runs left out"
        print(f"case {number}: {others}: made by other code than their method's newest run", file=sys.stderr)
        found = frame.of(kept)
        told = facts(found)
    if found.empty:
        asked = f" with {' and '.join(where)}" if where else ""
        names = ", ".join(its.methods)
        raise ValueError(
            f"no record of {names}{asked} in these results; try {case.call(number)}, or a run with -m"
        )
    _check_alike(number, ALIKE, told)
    jobs = [record.job for record in found.drop_duplicates(frame.JOB)[frame.RECORD]]
    rows = measurements.rows(its.metric, jobs, list(found[frame.RECORD]))
    is_of_one_window = its.axis != "window_size" and its.metric != "params"
    if is_of_one_window and any(row.window_size == PUBLISHED_WINDOW for row in rows):
        rows = [row for row in rows if row.window_size in (None, PUBLISHED_WINDOW)]
    picked = its.pick(rows)
    if is_of_one_window:
        windows = [str(row.window_size) for row in picked if row.status == "ok" and row.window_size]
        _check_alike(number, ("window_size",), {"window_size": windows})
    return picked


def _choice(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in CHOICES:
        raise ValueError(f"--where: expected NAME=VALUE with a name of {', '.join(CHOICES)}, got {text!r}")
    return name, value


def _check_alike(number: int, names: Sequence[str], told: Mapping[str, Iterable[str]] | DataFrame) -> None:
    values = {name: sorted({text for text in told[name] if isinstance(text, str)}) for name in names}
    differing = {name: found for name, found in values.items() if len(found) > 1}
    if differing:
        name, found = next(iter(differing.items()))
        parts = "; ".join(f"{key} ({', '.join(each)})" for key, each in differing.items())
        raise ValueError(
            f"case {number}: expected records with one value of each setting, got several: {parts}; try"
            f" --where '{name}={found[0]}', or --results with a folder for each value"
        )
