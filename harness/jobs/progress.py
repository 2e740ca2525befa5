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
from harness.base.json_object import JsonObject
from harness.core.job import Job, gib
from harness.core.record import Record
from harness.devices.room import device_limit_bytes, host_limit_bytes
from harness.plan import run_time
from harness.run.launch import Report

# What a run reports: its kind under "event", and further values, among them a Job, a Plan or a Record.
Event = dict[str, Any]
LEAST_REMAINING_SECONDS = 30.0  # a shorter remaining time is not reported
LEAST_RUN_SECONDS = 2.0  # a shorter duration of a run is not reported
FEWEST_TIMED_STEPS = 5  # least number of timed steps whose median is reliable
LOG_STATUSES = ("crash", "killed", "timeout")  # statuses of runs whose log tells more than the record


@contextmanager
def reporter(as_json: bool) -> Iterator[Report]:
    if as_json:
        yield _print_json
    elif sys.stdout.isatty() and not is_notebook():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        title = TextColumn("{task.description}", markup=False)
        numbers = TextColumn("{task.fields[numbers]}", markup=False)
        columns = (title, BarColumn(), MofNCompleteColumn(), numbers, TimeRemainingColumn())
        with Progress(*columns, console=Console(file=terminal()), transient=True) as progress:
            yield _Bar(progress).report
    else:
        yield _Lines().report


def _print_json(event: Event) -> None:
    json_values = dict(event)
    if "record" in event:
        json_values["record"] = record_summary(event["record"])
    for key in ("job", "plan"):
        if key in event:
            json_values[key] = dataclasses.asdict(event[key])
    print(json.dumps(json_values), flush=True)


def _job_title(event: Event) -> str:
    """Return a job's title: its number or role, the method and the sizes. The title has the sizes
    because a reference may have other sizes than its job."""
    job: Job = event["job"]
    load = job.workload
    number_or_role = f"[{event['index']}/{event['total']}] " if "index" in event else f"({event['role']}) "
    sizes = f"{load.layers_text} x {load.hidden_size}, batch {load.batch_size} x {load.seq_len} tokens"
    micro_batches = f" in {load.micro_batches} parts" if load.micro_batches > 1 else ""
    dtype = f", {load.dtype}" if load.dtype != "fp32" else ""
    return f"{number_or_role}{job.method}, {sizes}{micro_batches}, learning rate {_learning_rates_text(job)}{dtype}"


def _learning_rates_text(job: Job) -> str:
    """Return, as text, the learning rates of the first and the last step, and the peak. In a short run both steps are
    in warm-up, so both rates are far below the peak."""
    load = job.workload
    first_rate, last_rate = load.learning_rate_at(1), load.learning_rate_at(job.steps)
    return f"{first_rate:.3g} to {last_rate:.3g} (peak {load.learning_rate:g})"


class _Lines:
    """Prints lines about a job: one at its start, one after every tenth part of its steps, and one at its end."""

    def __init__(self, write: Callable[[str], None] = lambda line: print(line, flush=True)) -> None:
        self.write, self.steps, self.host_bytes = write, 0, 0
        self.has_reference: bool | None = False
        self.probe_runs = 0.0  # the probe's duration, divided by the duration of the job's run
        self.job: Job | None = None  # the job whose options the line at its start has named

    def report(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self._start(event)
        elif kind == "recorded":
            self.write(f"{_job_title(event)}: recorded in {event['path']} (--rerun measures again)")
        elif kind == "step":
            self._step(event)
        elif kind == "memory":
            taken_bytes, bytes_per_second = event["bytes"], event["bytes"] / event["seconds"]
            self.write(
                f"  host memory: {gib(taken_bytes)} of {gib(self.host_bytes)} taken, {gib(bytes_per_second)}/s"
            )
        elif kind == "end":
            self._end(event)
        elif kind in ("build", "wait"):
            self.write(f"  {event['text']}")
        elif kind == "warning":
            self.write(f"warning: {event['text']}")

    def _start(self, event: Event) -> None:
        plan, job = event["plan"], event["job"]
        self.job = job if event.get("total", 1) > 1 else None
        self.steps, self.host_bytes = job.steps, plan.host_bytes
        self.has_reference = event.get("has_reference")
        self.probe_runs = event.get("probe_runs", 0.0)
        total_seconds = event.get("foreseen_seconds", 0.0)
        total = f"about {run_time.duration_text(total_seconds)}"
        if total_seconds > run_time.LONG_SECONDS:
            basis = f"by the machine's rates or a rough guess: {run_time.SHORTER_RUN_TEXT}"
            self.write(f"long: {total}{self._included_text()}, {basis}")
        options = "".join(f" {name}={value}" for name, value in job.options.items())
        durations = f", {plan.step_seconds:.3g} s a step by {plan.binds}" if plan.step_seconds else ""
        if (run_seconds := event.get("run_seconds", 0.0)) >= LEAST_RUN_SECONDS:
            durations += f"; takes about {run_time.duration_text(run_seconds)}"
        self.write(
            f"{_job_title(event)}: {job.workload.params_text} parameters,{options or ' no options'}; plan:"
            f" device {gib(plan.device_bytes)}, host {gib(plan.host_bytes)}{durations}"
        )
        if LEAST_REMAINING_SECONDS < total_seconds <= run_time.LONG_SECONDS:
            self.write(f"  {total} in all{self._included_text()}")

    def _step(self, event: Event) -> None:
        self.foretell(event)
        step, loss_scale = event["step"], event.get("skipped_at_scale")
        line = f"  step {step}/{self.steps}  loss {event['loss']:.6f}  {event['seconds']:.3f} s"
        if "skipped_at_scale" in event:
            self.write(f"{line}  skipped: a gradient is not finite at loss scale {loss_scale:g}")
        elif step % max(1, self.steps // 10) == 0 or step == self.steps:
            self.write(line + shares_text(event))

    def _end(self, event: Event) -> None:
        record, job = event["record"], event["record"].job
        line = job_result_line(record, has_options=job != self.job)
        if record.status in LOG_STATUSES:
            line += f" ({event['path'].removesuffix('.json')}.txt)"
        self.write(line)
        if job.trace and record.answers(job):
            self.write(f"  trace, for https://ui.perfetto.dev: {job.trace}")
        if job.save and record.answers(job):
            written = (
                "adapters, for peft" if job.workload.lora else "weights and config.json, for transformers"
            )
            self.write(f"  {written}: {job.save}")

    def foretell(self, event: Event) -> None:
        """After the first step, print the remaining time, if it is longer than LEAST_REMAINING_SECONDS."""
        seconds_left = (self.steps - event["step"]) * event["seconds"]
        seconds_left += self.steps * event["seconds"] * (bool(self.has_reference) + self.probe_runs)
        if event["step"] == 1 and seconds_left > LEAST_REMAINING_SECONDS:
            advice = f": {run_time.SHORTER_RUN_TEXT}" if seconds_left > run_time.LONG_SECONDS else ""
            self.write(f"  about {run_time.duration_text(seconds_left)} left{self._included_text()}{advice}")

    def _included_text(self) -> str:
        trainings = ["its reference"] * bool(self.has_reference) + ["its probe"] * bool(self.probe_runs)
        return f", {' and '.join(trainings)} included" if trainings else ""


class _Bar:
    """Prints the lines of _Lines and, while a job runs, a bar with loss, samples/s and remaining time."""

    def __init__(self, progress: Any) -> None:
        self.progress = progress
        print_options: Any = {"markup": False, "highlight": False, "soft_wrap": True}
        self.lines = _Lines(lambda line: progress.console.print(readable(line), **print_options))
        self.task: Any = None
        self.batch_size = 0

    def report(self, event: Event) -> None:
        kind = event["event"]
        if kind == "step":
            self.lines.foretell(event)
            num_models = len(event.get("shares") or [1])
            samples_per_second = self.batch_size * num_models / event["seconds"]
            numbers = f"loss {event['loss']:.4f}  {samples_per_second:.3g} samples/s{shares_text(event)}"
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
            self.task = self.progress.add_task(_job_title(event), total=event["job"].steps, numbers="start")


def shares_text(event: Event) -> str:
    """Return, as text, each model's share of the devices' time, and the sum of these shares; empty if the event has no
    shares."""
    if not (shares := event.get("shares", ())):
        return ""
    percents = " ".join(f"{100 * share:.0f}" for share in shares)
    return f"  models {percents} % of the devices, in use {sum(shares):.0%}"


def record_summary(record: Record) -> JsonObject:
    """Return, as a JSON object, what job_result_line() says as text."""
    job, load = record.job, record.job.workload
    model_entry = {"model": load.model} if load.model else {}
    return {
        "method": job.method,
        "num_layers": load.num_layers,
        "options": job.options,
        "num_params": load.num_params,
        **model_entry,
        "status": record.status,
        "reason": record.reason,
        "samples_per_second": record.samples_per_second,
        "peaks": record.peaks,
        "gate": record.gate.verdict,
        "gate_text": record.gate.text,
    }


def print_results(records: Sequence[Record]) -> None:
    """Print one table with a row for each job, and a column for each size and option in which the jobs differ."""
    settings_of_jobs: list[JsonObject] = []
    for record in records:
        settings_of_jobs.append({**vars(record.job.workload), **record.job.options})
    differing_settings = []
    for setting in dict.fromkeys(itertools.chain(*settings_of_jobs)):
        values = {str(settings[setting]) for settings in settings_of_jobs if setting in settings}
        if len(values) > 1 and setting not in ("num_layers", "config"):
            differing_settings.append(setting)
    columns = ["method", "layers", *differing_settings, "samples/s", "device", "host", "result"]
    rows = []
    for record, settings in zip(records, settings_of_jobs, strict=True):
        speed = f"{record.samples_per_second:.3g}" if record.samples_per_second else "-"
        device_bytes = record.peaks.get("device_reserved") or record.peaks.get("device_allocated")
        host_bytes = record.peaks.get("host_accounted", record.host_peak_bytes)
        result = f"gate {record.gate.verdict}" if record.status == "ok" else record.status
        sizes = [settings["num_layers"], *(settings.get(setting, "-") for setting in differing_settings)]
        peaks = [gib(num_bytes) if num_bytes else "-" for num_bytes in (device_bytes, host_bytes)]
        rows.append([record.job.method, *sizes, speed, *peaks, result])
    print_table(columns, rows, numbers=columns[1:-1])


def job_result_line(record: Record, has_options: bool = True) -> str:
    """Return a job's result as one line of text: parameters, samples/s, peak memory and budget, the gate's verdict."""
    job, load, gate = record.job, record.job.workload, record.gate
    options = "".join(f" {name}={value}" for name, value in job.options.items()) if has_options else ""
    title = f"{job.method}{options}, {load.layers_text}, {load.params_text} parameters"
    if record.status != "ok":
        return f"{title}: {record.status}: {record.reason}"
    speed = f"{record.samples_per_second:.3g} samples/s" if record.samples_per_second else "no throughput"
    for warning in (record.slowed_by, few_steps_warning(record)):
        if warning:
            speed += f" ({warning})"
    host_peak = record.peaks.get("host_accounted", record.host_peak_bytes)
    host = f"host peak {_bytes_of_limit_text(host_peak, host_limit_bytes(job.budget, job.device))}"
    device_peak = record.peaks.get("device_reserved") or record.peaks.get("device_allocated")
    device = ""
    if device_peak:
        device = f"device peak {_bytes_of_limit_text(device_peak, device_limit_bytes(job))}, "
    verdict = f"passed ({gate.verdict})" if gate.passed else gate.verdict
    return f"{title}: {speed}, {device}{host}; gate {verdict}: {gate.text}"


def few_steps_warning(record: Record) -> str:
    """Return a warning if the measured speed rests on fewer than FEWEST_TIMED_STEPS steps; empty otherwise."""
    num_timed, warmup = len(record.timed_seconds), record.job.warmup
    if record.samples_per_second is None or num_timed >= FEWEST_TIMED_STEPS or record.origin != "run":
        return ""
    # If warm-up leaves only one timed step, suggest enough steps for the default warm-up, too.
    next_warmup = max(warmup, Job.warmup) if warmup == record.job.steps - 1 else warmup
    steps = record.schedule.get("resumed_steps", 0) + next_warmup + FEWEST_TIMED_STEPS
    return f"{counted(num_timed, 'step')} timed after {warmup} of warm-up, too few; try --steps {steps}"


def _bytes_of_limit_text(num_bytes: int, limit_bytes: int | None) -> str:
    return f"{gib(num_bytes)} of {gib(limit_bytes)}" if limit_bytes else gib(num_bytes)
