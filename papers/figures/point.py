"""One number of a table or figure, with its interval, its metric, and whether its run passed the gate.

A row comes from the records of one job (its repeats), or is a published number. Figures, claims and reports read only
rows. Two rows count as different only if the bounds of their ratio exclude 1. The repeats that give an interval are
processes. The steps of one process are no repeats, because another program's load slows neighboring steps together. If
either row has fewer than three processes, a margin replaces the interval. This margin assumes that the median of a
whole process is as uncertain as one step, whose scatter is known.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.base.console import counted
from harness.core.record import Record

MIN_RUNS_FOR_INTERVAL = 3  # least number of processes that gives an interval
MIN_RUNS_TO_CONCLUDE = 2  # least number of processes whose times may be compared
MIN_TIMED_STEPS = 5  # a time from fewer timed steps is doubtful, and its bar is hatched
CONFIDENCE = 0.95
MIN_RATIO_MARGIN = 0.05  # smallest relative margin of a ratio if a row has too few processes for an interval
MARGIN_STANDARD_ERRORS = 2  # half the width of a ratio's margin, in standard errors
COUNTED_METRICS = ("params",)  # metrics that do not scatter, so that any difference counts
SIMULATED_CLOCKS = ("sim", "virtual")
Metric = Callable[[Record], float | None]

# By name of a metric: the function that returns the metric's value from one record. The metric `params` is the number
# of parameters of a largest size; the search tells whether a larger size failed. The metric `loss_difference` is the
# largest relative difference of a loss from the reference's.
METRICS: dict[str, Metric] = {
    "params": lambda record: float(record.job.workload.num_params),
    "samples_per_second": lambda run: (
        run.samples_per_step / run.median_step_seconds if run.median_step_seconds else None
    ),
    "tokens_per_second": lambda run: (
        run.samples_per_step * run.job.workload.seq_len / run.median_step_seconds
        if run.median_step_seconds
        else None
    ),
    "step_seconds": lambda record: record.median_step_seconds,
    "loss_difference": lambda record: record.gate.evidence.get("loss_difference"),
}


@dataclass(frozen=True)
class FigureRow:
    """A row of a figure.

    `value`: the median of `num_runs` processes in the metric's unit (parameters, samples/s, tokens/s, seconds); None:
    no process gave a value. `low`, `high`: the 95 % interval of the processes' mean (Student's t); None for fewer than
    three processes. `valid`: True if all these processes passed the gate.
    """

    metric: str
    method: str
    num_layers: int
    hidden_size: int
    window_size: int | None
    value: float | None
    low: float | None = None
    high: float | None = None
    num_runs: int = 1
    # relative standard deviation of a run's step times or, if larger, half the range of the runs' medians
    scatter: float | None = None
    valid: bool = False
    reason: str = ""  # why the row is not valid, or how its run ended
    status: str = "ok"
    origin: str = "run"  # run, imported, published or simulated
    machine: str = ""
    clock: str = ""
    keys: tuple[str, ...] = ()  # keys of the row's records
    is_final: bool = True  # False: the search for this largest size has not yet found a size that fails
    is_judged: bool = True  # False: the call that made the run ended before the gate judged the run
    series: str = ""  # name of the row's bar or line; "": the method has only one
    group: str = ""  # the row's place on an axis of names, such as a model; "" without such an axis
    x: float | None = None  # the row's place on an axis of numbers; None without such an axis
    placement: str = ""  # numbers of layers of each kind, as --placement takes them
    clipping: str = ""
    num_steps: int | None = None  # number of timed steps of all processes together
    steps: tuple[float, ...] = ()  # a value for each timed step, in the metric's unit
    load: float | None = None  # the highest of the machine's load averages at the runs' starts
    num_cores: int | None = None  # number of cores of the machine that made the runs
    # one value for each process; not written to tables
    values: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @property
    def has_number(self) -> bool:
        return self.value is not None and math.isfinite(self.value) and self.value > 0

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return the reasons why the row's time may be wrong, each as a short text; empty if there are none."""
        reasons = []
        if self.num_steps is not None and self.num_steps < MIN_TIMED_STEPS:
            reasons.append(counted(self.num_steps, "step"))
        if self.load is not None and self.num_cores and self.load > self.num_cores:
            reasons.append(f"load {self.load:.2g}")
        return tuple(reasons)

    @property
    def inconclusive(self) -> tuple[str, ...]:
        """Return the reasons why nothing may be concluded from the row's time: its doubts, and that it is of one
        process, because a process may be fast or slow as a whole. Empty if there are none."""
        is_alone = self.num_steps is not None and self.num_runs < MIN_RUNS_TO_CONCLUDE
        return (*self.doubts, *(["1 process"] if is_alone else []))

    @property
    def is_simulated(self) -> bool:
        """True if the value was computed by a simulation, or is a time by a simulated clock."""
        return self.origin == "simulated" or (
            self.clock in SIMULATED_CLOCKS and self.metric not in COUNTED_METRICS
        )

    @property
    def has_interval(self) -> bool:
        return self.num_runs >= MIN_RUNS_FOR_INTERVAL and self.low is not None and self.high is not None


def doubts_text(rows: Mapping[str, FigureRow]) -> str:
    """Return, as text, why nothing may be concluded from the times of these rows, each by its name; empty if something
    may."""
    doubts = {name: ", ".join(row.inconclusive) for name, row in rows.items() if row.inconclusive}
    return "; ".join(f"{name}: {text}" for name, text in doubts.items())


def row_of(metric: str, repeats: Sequence[Record]) -> FigureRow:
    """Return the row of a job. `repeats`: the records of the job's repeats, the newest one last."""
    last = repeats[-1]
    values = [
        value for record in repeats if (value := METRICS[metric](record)) is not None and math.isfinite(value)
    ]
    low, high = interval(values)
    failing = next((record for record in repeats if record.status != "ok" or not record.gate.passed), None)
    steps = step_values(metric, repeats)
    loads = [
        load for record in repeats if isinstance(load := record.machine.get("load_average"), int | float)
    ]
    is_timed = metric not in COUNTED_METRICS and last.origin == "run"
    return FigureRow(
        metric,
        last.job.method,
        last.job.workload.num_layers,
        last.job.workload.hidden_size,
        last.job.options.get("window_size"),
        statistics.median(values) if values else None,
        low,
        high,
        len(values),
        scatter(repeats),
        valid=failing is None,
        reason=_reason_of_invalid(failing) if failing else "",
        status=(failing or last).status,
        origin=last.origin,
        machine=machine_of(last),
        clock=last.clock,
        keys=tuple(record.key for record in repeats),
        is_judged=all(record.is_judged for record in repeats),
        placement=_option(last, "placement"),
        clipping=_option(last, "clipping"),
        num_steps=len(steps) if is_timed else None,
        steps=steps if is_timed else (),
        load=max(loads, default=None) if is_timed else None,
        num_cores=last.machine.get("cores") if is_timed else None,
        values=tuple(values),
    )


def _reason_of_invalid(failing: Record) -> str:
    """Return why a run is not valid: the gate's text, or how it ended."""
    return failing.gate.text if failing.status == "ok" else failing.reason


def step_values(metric: str, repeats: Sequence[Record]) -> tuple[float, ...]:
    """Return the metric's value for each timed step of each repeat, in the metric's unit; no value for a metric in
    COUNTED_METRICS, which steps do not change."""
    if metric in COUNTED_METRICS:
        return ()
    if metric == "step_seconds":
        return tuple(seconds for record in repeats for seconds in record.timed_seconds)
    speeds = []
    for record in repeats:
        amount = record.samples_per_step
        if metric == "tokens_per_second":
            amount *= record.job.workload.seq_len
        speeds += [amount / seconds for seconds in record.timed_seconds if seconds]
    return tuple(speeds)


def _option(record: Record, name: str) -> str:
    return str(record.job.options.get(name) or "")


def machine_of(record: Record) -> str:
    """Return a text on a record's machine: the GPU or, without one, the CPU; the number of cores; and the environment
    variables that change kernels or threads. Records with different texts are never mixed in a figure."""
    name = str(record.machine.get("gpu") or record.machine.get("cpu") or "")
    cores = record.machine.get("cores")
    parts = (name, counted(cores, "core") if name and cores else "", record.machine.get("environment"))
    return ", ".join(part for part in parts if part)


def scatter(repeats: Sequence[Record]) -> float | None:
    """Return the relative scatter of the repeats: the largest of two kinds of numbers, namely the relative standard
    deviation of the step times within each run, and half the range of the runs' medians. None if there is only one run,
    of one timed step.

    The standard deviation is estimated from the interquartile range, which is robust to outliers: in a normal
    distribution, this range is 1.349 standard deviations.
    """
    scatters = []
    for record in repeats:
        if len(record.timed_seconds) > 1 and min(record.timed_seconds) > 0:
            low, _, high = statistics.quantiles(record.timed_seconds, n=4, method="inclusive")
            scatters.append(math.log(high / low) / 1.349)
    medians = [record.median_step_seconds for record in repeats if record.median_step_seconds]
    if len(medians) > 1:
        scatters.append(math.log(max(medians) / min(medians)) / 2)
    return max(scatters, default=None)


def interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the mean by Student's t, as (low, high); (None, None) for fewer than three values."""
    if len(values) < MIN_RUNS_FOR_INTERVAL:
        return None, None
    from scipy import stats

    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    mean = statistics.fmean(values)
    return mean - half, mean + half


@dataclass(frozen=True)
class RatioInterval:
    """The ratio of two rows' values, with its bounds. `how_bounded`: the method by which the bounds were found, as
    text. `has_interval`: True: the bounds are an interval; False: they are a margin."""

    value: float
    low: float
    high: float
    how_bounded: str
    has_interval: bool

    @property
    def text(self) -> str:
        if self.low == self.high == self.value:
            return f"{self.value:.3g}"
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def ratio(over: FigureRow, under: FigureRow) -> RatioInterval:
    """Return the ratio of the rows' medians. Its bounds are Welch's interval on logarithms or, if a row has too few
    processes for an interval, a margin. Both rows must have a value."""
    assert over.value is not None and under.value is not None
    value = over.value / under.value
    if over.metric in COUNTED_METRICS:
        return RatioInterval(value, value, value, "counted", has_interval=True)
    runs = f"{over.num_runs} and {under.num_runs} runs"
    if over.has_interval and under.has_interval:
        low, high = _welch(over.values, under.values)
        return RatioInterval(value, low, high, f"95 % interval, {runs}", has_interval=True)
    factor = max(
        1 + MIN_RATIO_MARGIN,
        math.exp(MARGIN_STANDARD_ERRORS * math.hypot(over.scatter or 0, under.scatter or 0)),
    )
    known = [f"{row.scatter:.1%}" for row in (over, under) if row.scatter is not None]
    steps = f" with steps that scatter by {' and '.join(known)}" if len(known) == 2 else ""
    how_bounded = f"margin of {factor - 1:.0%}: {runs}{steps}, an interval needs {MIN_RUNS_FOR_INTERVAL} each"
    return RatioInterval(value, value / factor, value * factor, how_bounded, has_interval=False)


def _welch(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the ratio of two means. The error of a logarithm is taken to be the relative error (delta
    method)."""
    from scipy import stats

    means = statistics.fmean(over), statistics.fmean(under)
    center = means[0] / means[1]
    if len({*over}) == len({*under}) == 1:
        return center, center
    relative = ([value / mean for value in values] for values, mean in zip((over, under), means, strict=True))
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        # scipy warns if values are nearly equal
        bounds = stats.ttest_ind(*relative, equal_var=False).confidence_interval(CONFIDENCE)
    factor = math.exp((bounds.high - bounds.low) / 2)
    return center / factor, center * factor
