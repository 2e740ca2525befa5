"""Shows the progress of a sweep: a bar on a terminal, plain lines elsewhere, or lines of JSON for programs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from harness.base.console import counted, is_notebook, print_table, readable, terminal
from harness.core.job import Job, gib, params_text
from harness.core.record import Record
from harness.devices.room import device_limit_bytes, host_limit_bytes
from harness.plan import run_time
from harness.run.launch import Report

LEAST_FORETOLD = 30.0  # seconds; a shorter remaining time is not reported
LEAST_REPORTED = 2.0  # seconds; a shorter duration of a run is not reported
FEWEST_TIMED = 5  # least number of timed steps whose median is reliable
UNEXPLAINED = ("crash", "killed", "timeout")  # statuses of runs whose log tells more than the record


@contextmanager
def reporter(as_json: bool) -> Iterator[Report]:
    if as_json:
        yield _print_json
    elif sys.stdout.isatty() and not is_notebook():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text, numbers = (
            TextColumn(what, markup=False) for what in ("{task.description}", "{task.fields[numbers]}")
        )
        columns = (text, BarColumn(), MofNCompleteColumn(), numbers, TimeRemainingColumn())
        with Progress(*columns, console=Console(file=terminal()), transient=True) as progress:
            yield _Bar(progress).report
    else:
        yield _Lines().report


def _print_json(event: dict[str, Any]) -> None:
    as_data: dict[str, Any] = {"record": summary, "job": dataclasses.asdict, "plan": dataclasses.asdict}
    plain = {name: as_data[name](value) if name in as_data else value for name, value in event.items()}
    print(json.dumps(plain), flush=True)


def _title(event: dict[str, Any]) -> str:
    """Return a job's title: its number or role, the method and the sizes. The sizes are told because a reference's may
    differ from its job's."""
    job: Job = event["job"]
    load = job.workload
    place = f"[{event['index']}/{event['total']}] " if "index" in event else f"({event['role']}) "
    sizes = f"{load.layers_text} x {load.hidden_size}, batch {load.batch_size} x {load.seq_len} tokens"
    cut = f" in {load.micro_batches} parts" if load.micro_batches > 1 else ""
    dtype = f", {load.dtype}" if load.dtype != "fp32" else ""
    return f"{place}{job.method}, {sizes}{cut}, learning rate {_rates_text(job)}{dtype}"


def _rates_text(job: Job) -> str:
    """Return, as text, the learning rates of the first and the last step, and the peak. In a short run both steps are
    in warm-up, so both rates are far below the peak."""
    first, last = (f"{job.workload.learning_rate_at(step):.3g}" for step in (1, job.steps))
    return f"{first} to {last} (peak {job.workload.learning_rate:g})"


class _Lines:
    """Prints lines about a job: one at its start, one after every tenth part of its steps, and one at its end."""

    def __init__(self, write: Callable[[str], None] = lambda line: print(line, flush=True)) -> None:
        self.write, self.steps, self.host_bytes = write, 0, 0
        self.has_reference: bool | None = False
        self.probe_runs = 0.0  # the probe's duration, divided by the duration of the job's run
        self.job: Job | None = None  # the job whose options the line at its start has named

    def report(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "start":
            self._start(event)
        elif kind == "recorded":
            self.write(f"{_title(event)}: recorded in {event['path']} (--rerun measures again)")
        elif kind == "step":
            self._step(event)
        elif kind == "memory":
            done, rate = event["bytes"], event["bytes"] / event["seconds"]
            self.write(f"  host memory: {gib(done)} of {gib(self.host_bytes)} taken, {gib(rate)}/s")
        elif kind == "end":
            self._end(event)
        elif kind in ("build", "wait"):
            self.write(f"  {event['text']}")
        elif kind == "warning":
            self.write(f"warning: {event['text']}")

    def _start(self, event: dict[str, Any]) -> None:
        plan, job = event["plan"], event["job"]
        self.job = job if event.get("total", 1) > 1 else None
        self.steps, self.host_bytes = job.steps, plan.host_bytes
        self.has_reference = event.get("has_reference")
        self.probe_runs = event.get("probe_runs", 0.0)
        foreseen = event.get("foreseen_seconds", 0.0)
        total = f"about {run_time.duration_text(foreseen)}"
        if foreseen > run_time.LONG_SECONDS:
            basis = f"by the machine's rates or a rough guess: {run_time.SHORTER}"
            self.write(f"long: {total}{self._included()}, {basis}")
        options = "".join(f" {name}={value}" for name, value in job.options.items())
        seconds = f", {plan.step_seconds:.3g} s a step by {plan.binds}" if plan.step_seconds else ""
        if (run_seconds := event.get("run_seconds", 0.0)) >= LEAST_REPORTED:
            seconds += f"; takes about {run_time.duration_text(run_seconds)}"
        self.write(
            f"{_title(event)}: {params_text(job.workload.num_params)} parameters,{options or ' no options'}; plan:"
            f" device {gib(plan.device_bytes)}, host {gib(plan.host_bytes)}{seconds}"
        )
        if LEAST_FORETOLD < foreseen <= run_time.LONG_SECONDS:
            self.write(f"  {total} in all{self._included()}")

    def _step(self, event: dict[str, Any]) -> None:
        self.foretell(event)
        step, scale = event["step"], event.get("skipped_at_scale")
        line = f"  step {step}/{self.steps}  loss {event['loss']:.6f}  {event['seconds']:.3f} s"
        if "skipped_at_scale" in event:
            self.write(f"{line}  skipped: a gradient is not finite at loss scale {scale:g}")
        elif step % max(1, self.steps // 10) == 0 or step == self.steps:
            self.write(line + shares_text(event))

    def _end(self, event: dict[str, Any]) -> None:
        record, job = event["record"], event["record"].job
        line = closing_line(record, has_options=job != self.job)
        if record.status in UNEXPLAINED:
            line += f" ({event['path'].removesuffix('.json')}.txt)"
        self.write(line)
        if job.trace and record.answers(job):
            self.write(f"  trace, for https://ui.perfetto.dev: {job.trace}")
        if job.save and record.answers(job):
            self.write(f"  weights and config.json, for transformers: {job.save}")

    def foretell(self, event: dict[str, Any]) -> None:
        """After the first step, print the remaining time, if it is longer than LEAST_FORETOLD."""
        left = (self.steps - event["step"]) * event["seconds"]
        left += self.steps * event["seconds"] * (bool(self.has_reference) + self.probe_runs)
        if event["step"] == 1 and left > LEAST_FORETOLD:
            advice = f": {run_time.SHORTER}" if left > run_time.LONG_SECONDS else ""
            self.write(f"  about {run_time.duration_text(left)} left{self._included()}{advice}")

    def _included(self) -> str:
        parts = ["its reference"] * bool(self.has_reference) + ["its probe"] * bool(self.probe_runs)
        return f", {' and '.join(parts)} included" if parts else ""


class _Bar:
    """Prints the lines of _Lines and, while a job runs, a bar with loss, samples/s and remaining time."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        look: Any = {"markup": False, "highlight": False, "soft_wrap": True}
        self.lines = _Lines(lambda line: progress.console.print(readable(line), **look))
        self.task: Any = None
        self.batch_size = 0

    def report(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.lines.foretell(event)
            speed = self.batch_size * len(event.get("shares") or [1]) / event["seconds"]
            numbers = f"loss {event['loss']:.4f}  {speed:.3g} samples/s{shares_text(event)}"
            self.progress.update(self.task, completed=event["step"], numbers=numbers)
            return
        if kind == "phase" and self.task is not None:
            self.progress.update(self.task, numbers=event["phase"])
            return
        if self.task is not None and kind in ("start", "recorded", "end"):
            self.progress.remove_task(self.task)
            self.task = None
        self.lines.report(event)
        if kind == "start":
            self.batch_size = event["job"].workload.batch_size
            self.task = self.progress.add_task(_title(event), total=event["job"].steps, numbers="start")


def shares_text(event: dict[str, Any]) -> str:
    """Return, as text, each model's share of the devices' time, and the sum of these shares; empty if the event has no
    shares."""
    if not (shares := event.get("shares", ())):
        return ""
    percents = " ".join(f"{100 * share:.0f}" for share in shares)
    return f"  models {percents} % of the devices, in use {sum(shares):.0%}"


def summary(record: Record) -> dict[str, Any]:
    """Return, as data, what closing_line() says as text."""
    job, names = record.job, ("status", "reason", "samples_per_second", "peaks")
    measured = {name: getattr(record, name) for name in names}
    load = job.workload
    sizes = {"num_layers": load.num_layers, "options": job.options, "num_params": load.num_params}
    sizes |= {"model": load.model} if load.model else {}
    return {
        "method": job.method,
        **sizes,
        **measured,
        "gate": record.gate.verdict,
        "gate_text": record.gate.text,
    }


def print_results(records: Sequence[Record]) -> None:
    """Print one table with a row for each job, and a column for each size and option in which the jobs differ."""
    rows: list[dict[str, Any]] = [{**vars(record.job.workload), **record.job.options} for record in records]
    names = []
    for name in dict.fromkeys(itertools.chain(*rows)):
        values = {str(row[name]) for row in rows if name in row}
        if len(values) > 1 and name not in ("num_layers", "config"):
            names.append(name)
    columns = ["method", "layers", *names, "samples/s", "device", "host", "result"]
    lines = []
    for record, row in zip(records, rows, strict=True):
        speed = f"{record.samples_per_second:.3g}" if record.samples_per_second else "-"
        device = record.peaks.get("device_reserved") or record.peaks.get("device_allocated")
        host = record.peaks.get("host_accounted", record.host_peak_bytes)
        result = f"gate {record.gate.verdict}" if record.status == "ok" else record.status
        sizes = [row["num_layers"], *(row.get(name, "-") for name in names)]
        peaks = [gib(size) if size else "-" for size in (device, host)]
        lines.append([record.job.method, *sizes, speed, *peaks, result])
    print_table(columns, lines, numbers=columns[1:-1])


def closing_line(record: Record, has_options: bool = True) -> str:
    """Return a job's result as one line of text: parameters, samples/s, peak memory and budget, the gate's verdict."""
    job, load, gate = record.job, record.job.workload, record.gate
    options = "".join(f" {name}={value}" for name, value in job.options.items()) if has_options else ""
    title = f"{job.method}{options}, {load.layers_text}, {params_text(load.num_params)} parameters"
    if record.status != "ok":
        return f"{title}: {record.status}: {record.reason}"
    speed = f"{record.samples_per_second:.3g} samples/s" if record.samples_per_second else "no throughput"
    speed += "".join(f" ({warning})" for warning in (record.slowed_by, few_steps(record)) if warning)
    host_limit, device_limit = (
        host_limit_bytes(job.budget, job.device),
        device_limit_bytes(job),
    )
    host = f"host peak {_of(record.peaks.get('host_accounted', record.host_peak_bytes), host_limit)}"
    device_peak = record.peaks.get("device_reserved") or record.peaks.get("device_allocated")
    device = f"device peak {_of(device_peak, device_limit)}, " if device_peak else ""
    verdict = f"passed ({gate.verdict})" if gate.passed else gate.verdict
    return f"{title}: {speed}, {device}{host}; gate {verdict}: {gate.text}"


def few_steps(record: Record) -> str:
    """Return a warning if the measured speed rests on fewer than FEWEST_TIMED steps; empty otherwise."""
    num, warmup = len(record.timed_seconds), record.job.warmup
    if record.samples_per_second is None or num >= FEWEST_TIMED or record.origin != "run":
        return ""
    # If warm-up leaves only one timed step, suggest enough steps for the default warm-up, too.
    grown = max(warmup, Job.warmup) if warmup == record.job.steps - 1 else warmup
    steps = record.schedule.get("resumed_steps", 0) + grown + FEWEST_TIMED
    return f"{counted(num, 'step')} timed after {warmup} of warm-up, too few; try --steps {steps}"


def _of(size: int, limit: int | None) -> str:
    return f"{gib(size)} of {gib(limit)}" if limit else gib(size)
