"""Points of a table or figure: one number with its interval, what it is of, and whether it may be believed.

A row is derived from the records of one job (its repeats), or is a published number. Figures, claims and reports read
rows and nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.core.record import Record

FEWEST_FOR_INTERVAL = 3  # processes; below that there is no interval, and the row says so by having none
CONFIDENCE = 0.95
Metric = Callable[[Record], float | None]

# What a figure shows, read from one record. A largest size is its parameters; whether a larger one failed is another's.
METRICS: dict[str, Metric] = {
    "params": lambda record: float(record.job.workload.num_params),
    "samples_per_second": lambda record: (
        record.samples_per_step / record.median_step_seconds if record.median_step_seconds else None
    ),
    "step_seconds": lambda record: record.median_step_seconds,
}


@dataclass(frozen=True)
class Row:
    """`value` in the metric's unit: parameters, samples/s, seconds; `low` and `high` bound the mean of `num_runs`
    processes with 95 % confidence (Student's t). `valid` is the gate's word; without it a number is only shown."""

    metric: str
    method: str
    num_layers: int
    hidden_size: int
    window_size: int | None
    value: float | None
    low: float | None = None
    high: float | None = None
    num_runs: int = 1
    scatter: float | None = None  # relative standard deviation of the steps within a run, or of two runs
    valid: bool = False
    reason: str = ""  # why not valid, or how the run ended
    status: str = "ok"
    origin: str = "run"  # or imported, published, simulated
    machine: str = ""
    clock: str = ""
    keys: tuple[str, ...] = ()  # of the records behind it
    is_final: bool = True  # False of a largest size whose search has not found the edge yet
    is_judged: bool = True  # False of a run whose call was ended before the gate had its word
    series: str = ""  # which of several bars or lines of a method, where there are several
    group: str = ""  # what it stands at where that is no number: a model, a pair of sizes
    x: float | None = None  # and where it is one


def row(metric: str, repeats: Sequence[Record]) -> Row:
    """The row of one job's repeats: the median over processes, and its interval from three on."""
    last = repeats[-1]
    values = [value for record in repeats if (value := METRICS[metric](record)) is not None and math.isfinite(value)]
    low, high = interval(values)
    failing = next((record for record in repeats if record.status != "ok" or not record.gate.passed), None)
    reason = "" if failing is None else failing.gate.text if failing.status == "ok" else failing.reason
    return Row(
        metric, last.job.method, last.job.workload.num_layers, last.job.workload.hidden_size,
        last.job.options.get("window_size"), statistics.median(values) if values else None, low, high, len(values),
        scatter(repeats), valid=failing is None, reason=reason, status=(failing or last).status, origin=last.origin,
        machine=machine_of(last), clock=last.clock,
        keys=tuple(record.key for record in repeats), is_judged=all(record.is_judged for record in repeats),
    )  # fmt: skip


def machine_of(record: Record) -> str:
    """The name by which runs are told apart: what computes, and by how many cores its host steps."""
    name = str(record.machine.get("gpu") or record.machine.get("cpu") or "")
    cores = record.machine.get("cores")
    return f"{name}, {cores} cores" if name and cores else name


def scatter(repeats: Sequence[Record]) -> float | None:
    """How far the steps of the worst of these runs scatter, or the runs themselves, on logarithms; None where each
    has timed one step. By the middle half of the values, which a hiccup does not move: of normal ones it is 1.349
    standard deviations wide."""
    found = []
    for record in repeats:
        if len(record.timed_seconds) > 1 and min(record.timed_seconds) > 0:
            low, _, high = statistics.quantiles(record.timed_seconds, n=4, method="inclusive")
            found.append(math.log(high / low) / 1.349)
    medians = [record.median_step_seconds for record in repeats if record.median_step_seconds]
    if len(medians) > 1:
        found.append(math.log(max(medians) / min(medians)) / 2)
    return max(found, default=None)


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Bounds of the mean by Student's t; none below three values."""
    if len(values) < FEWEST_FOR_INTERVAL:
        return None, None
    from scipy import stats

    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return mean - half, mean + half
