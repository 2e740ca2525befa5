"""Turns a raw log into a record. The job comes from the log's name and lines, the run's status from the lines that tell
how the run ended. Every number stays as the log prints it.

The log's name and its lines may disagree, and lines may be missing. The record's evidence lists the decisions in such
cases under `doubts`, and the workload's fields that the log does not tell under `unsaid`.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter
from typing import Any

from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core import method
from harness.core.job import Job, Workload
from harness.core.log_lines import INTERVAL_STEPS
from harness.core.record import STATUSES, Record
from papers.logs.parse import RUN_ENDS, Interval, NotALog, RawLog, parsed_scalar

# By argument of the published artifact: the field of the workload that the argument sets.
WORKLOAD_FIELDS = {
    "num_attention_heads": "num_heads",
    "seq_length": "seq_len",
    "hidden_dropout": "dropout",
    "clip_grad": "clip_norm",
    "lr": "learning_rate",
    "seed": "seed",
}
DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
SIZE_ARGUMENTS = {
    "num_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "batch_size": ("micro_batch_size", "batch_size"),
    "window": ("gl_window_size",),
}
SPEED_TEXTS = {
    "interval": "mean of each interval",
    "cumulative": "mean of all steps so far but the first two, without data loading",
}
LARGEST_MB = 1e9  # in MB; a larger number is taken to be garbled
FLOPS_PER_PARAMETER = 8  # operations that the artifact's Tera Flops count for each parameter and token


def to_record(log: RawLog, name: str) -> Record:
    """Return the log as a record that is not yet judged. Raises NotALog if the log's sizes or iterations make no
    sense, or if its steps differ in their number of samples."""
    intervals, interval_steps, steps, doubts = _scheduled_intervals(log)
    batch_size = _batch_size(log, intervals)
    doubts = [*_appended_runs(log), *_contradictions(log, batch_size), *doubts]
    doubts += _unread_lines(log, intervals)
    workload, unsaid = _workload(log, batch_size, doubts)
    status, phase, reason, end_evidence = _end_of_run(log, intervals, steps)
    job = Job(
        log.name["method"],
        workload,
        _method_options(log),
        device=log.first_line.get("device", "cuda"),
        steps=steps,
        warmup=min(interval_steps, steps - 1),
    )
    doubts += _implausible_numbers(log, job, intervals, interval_steps)
    numbers = {**_printed_numbers(log, name, intervals), **_parameter_counts(log, workload, doubts)}
    losses, step_seconds = _losses_and_seconds(intervals, interval_steps)
    return Record(
        job,
        job.key(origin="imported", log=log.sha256),
        status,
        phase,
        reason,
        origin="imported",
        clock=job.device,
        interval_steps=interval_steps,
        started=float(log.name["unix"]),
        losses=losses,  # type: ignore[arg-type]
        grad_norms=[interval.grad_norm for interval in intervals if interval.grad_norm is not None],
        step_seconds=step_seconds,  # type: ignore[arg-type]
        peaks=_peaks(log),
        evidence={**end_evidence, **numbers, "unsaid": unsaid, "doubts": doubts},
    )


def _losses_and_seconds(
    intervals: list[Interval], interval_steps: int
) -> tuple[list[float | None], list[float | None]]:
    """Return the mean loss and the mean seconds of a step of each interval up to the last one; None if the log lacks
    the interval or its value."""
    by_step = {interval.iteration: interval for interval in intervals}
    losses: list[float | None] = []
    seconds: list[float | None] = []
    for step in range(interval_steps, max(by_step, default=0) + 1, interval_steps):
        interval = by_step.get(step)
        losses.append(interval.loss if interval else None)
        seconds.append(interval.elapsed_ms / 1000 if interval and interval.elapsed_ms else None)
    return losses, seconds


def _peaks(log: RawLog) -> dict[str, int]:
    """Return the peak bytes of the device's memory that the log tells, without garbled ones."""
    names = {"device_allocated": "max allocated", "device_reserved": "max reserved"}
    peaks = {}
    for key, name in names.items():
        if 0 < log.memory_mb.get(name, 0) < LARGEST_MB:
            peaks[key] = int(log.memory_mb[name] * 2**20)
    return peaks


def _printed_numbers(log: RawLog, name: str, intervals: list[Interval]) -> JsonObject:
    """Return the log's numbers as the log prints them, by the names that they have in the record's evidence."""
    kind = "cumulative" if log.cumulative_speeds else "interval"
    columns = {
        "iterations": "iteration",
        "elapsed_ms": "elapsed_ms",
        "lm_loss": "loss",
        "grad_norm": "grad_norm",
    }
    return {
        "log": name,
        "log_sha256": log.sha256,
        "named_window": log.name["window"],
        "arguments": {argument: text for argument, text in log.arguments.items() if argument != "data_path"},
        **{name: [getattr(interval, field) for interval in intervals] for name, field in columns.items()},
        "samples_per_second": getattr(log, f"{kind}_speeds"),
        "samples_per_second_is": SPEED_TEXTS[kind],
        "tera_flops": log.tera_flops,
        "memory_mb": log.memory_mb,
        "timers_ms": log.timers_ms,
    }


def _world_size(log: RawLog) -> int:
    """Return the number of GPUs that shared the training; 1 if the log does not tell it."""
    return log.world_size or _whole_number(log.arguments.get("world_size")) or 1


def _model_parallel(log: RawLog) -> int:
    """Return the number of parts into which the model was cut, each on a GPU of its own; 1 if the log does not tell
    it."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "model_parallel_size")
    return math.prod(_whole_number(log.arguments.get(name)) or 1 for name in names)


def _batch_size(log: RawLog, intervals: list[Interval]) -> int:
    """Return the samples of a step, of all GPUs together. The lines of the intervals tell it best, the log's name
    least: Megatron's name for the batch of one GPU is micro-batch. Raises NotALog if the steps differ."""
    sizes = sorted({interval.batch_size for interval in intervals if interval.batch_size is not None})
    ramp = log.arguments.get("rampup_batch_size", "None")
    problem = ""
    if len(sizes) > 1:
        problem = f"steps of {sizes[0]:g} to {sizes[-1]:g} samples"
    elif not sizes and ramp not in ("None", "[]"):
        problem = f"a ramp-up of the batch ({ramp:.40})"
    if problem:
        raise NotALog(f"expected steps of one batch size, got {problem}; try a log from after the ramp-up")
    if sizes and not (sizes[0] >= 1 and sizes[0].is_integer()):
        raise NotALog(f"expected a whole number as its global batch size, got {sizes[0]:g}")
    if sizes:
        return int(sizes[0])
    sizes_of_gpu = [log.arguments[name] for name in SIZE_ARGUMENTS["batch_size"] if name in log.arguments]
    batch_of_gpu = _whole_number(sizes_of_gpu[0]) if sizes_of_gpu else 0
    replicas = (
        _whole_number(log.arguments.get("data_parallel_size"))
        or _world_size(log) // _model_parallel(log)
        or 1
    )
    stated = (
        _whole_number(log.arguments.get("global_batch_size"))
        or log.samples_per_step
        or replicas * batch_of_gpu
    )
    header = log.first_line.get("workload", {}).get("batch_size")
    return stated or (header if isinstance(header, int) else 0) or int(log.name["batch_size"])


def _contradictions(log: RawLog, batch_size: int) -> list[str]:
    """Return a text for each fact (the method or a size) on which the log's name and its lines disagree."""
    workload = log.first_line.get("workload", {})
    stated: dict[str, Any] = {}
    for size, arguments in SIZE_ARGUMENTS.items():
        stated[size] = next(
            (log.arguments[name] for name in arguments if name in log.arguments), workload.get(size)
        )
    stated |= {"method": log.first_line.get("method"), "batch_size": batch_size}
    return [
        f"{size} is {log.name[size]} in the name and {text} in the log"
        for size, text in stated.items()
        if text is not None and str(text) != str(log.name[size])
    ]


def _appended_runs(log: RawLog) -> list[str]:
    """Return a text if the log lists arguments after steps, too. Then it holds several runs, of whose arguments the
    last ones count. A list before the first step may be there twice, as in STRONGHOLD's logs."""
    num_runs = len(log.starts)
    return (
        [f"its arguments are listed again after steps, as by {num_runs} runs in one file"]
        if num_runs > 1
        else []
    )


def _unread_lines(log: RawLog, intervals: list[Interval]) -> list[str]:
    """Return a text for each kind of line about a step that could not be read, or only in part."""
    doubts, unread_texts = [], [interval.unread for interval in intervals if interval.unread]
    if log.num_unread_steps:
        doubts.append(
            f"{counted(log.num_unread_steps, 'line')} like a step's could not be read: {log.unread_step!r}"
        )
    if unread_texts:
        doubts.append(
            f"{len(unread_texts)} of {len(intervals)} iteration lines were read in part, without {unread_texts[0]!r}"
        )
    if num_untimed := sum(interval.elapsed_ms is None for interval in intervals):
        doubts.append(f"{num_untimed} of {len(intervals)} iteration lines tell no time of a step in ms or s")
    return doubts


def _workload(log: RawLog, batch_size: int, doubts: list[str]) -> tuple[Workload, list[str]]:
    """Return the workload, and the names of those of its fields that the log does not tell. Raises NotALog if the sizes
    make no workload."""
    sizes = {
        "num_layers": log.name["num_layers"],
        "hidden_size": log.name["hidden_size"],
        "batch_size": batch_size,
    }
    stated = {name: value for name, value in log.first_line.get("workload", {}).items() if name not in sizes}
    stated |= {
        name: parsed_scalar(log.arguments[word])
        for word, name in WORKLOAD_FIELDS.items()
        if word in log.arguments
    }
    if log.vocab_size:
        stated["vocab_size"] = log.vocab_size
    if "data_path" in log.arguments:  # only the file's name: folders could tell a person's name
        stated["corpus"] = re.split(r"[/\\]", log.arguments["data_path"].strip("[]'\" "))[-1]
    if "params_dtype" in log.arguments:
        stated["dtype"] = DTYPES.get(log.arguments["params_dtype"], log.arguments["params_dtype"])
    fields = vars(Workload())
    legible = {
        name: value for name, value in stated.items() if name in fields and _is_like(value, fields[name])
    }
    doubts += [
        f"{name} is illegible: {str(value)[:60]}" for name, value in stated.items() if name not in legible
    ]
    try:
        return Workload(**sizes, **legible), sorted(fields.keys() - legible.keys() - sizes.keys())
    except ValueError as error:
        doubts.append(f"not taken from the log: {error}")
    try:
        return Workload(**sizes), sorted(fields.keys() - sizes.keys())
    except ValueError as error:
        raise NotALog(f"its name makes no model: {error}") from error


def _is_like(value: Any, default: Any) -> bool:
    kinds: Any = {float: (int, float), type(None): (str, type(None))}.get(type(default), type(default))
    return isinstance(value, kinds) and not isinstance(value, bool)


def _method_options(log: RawLog) -> dict[str, Any]:
    """Return the options that the log tells, the number of GPUs among them if there are several. If it tells none, and
    the method has a window, return the window in the log's name."""
    if log.first_line:
        return dict(log.first_line["options"])
    ranks = {"world_size": _world_size(log)} if _world_size(log) > 1 else {}
    method_name = log.name["method"]
    option_names = method.option_names(method.load(method_name)) if method_name in method.names() else ()
    has_window = "gl_window_size" in log.arguments or "window_size" in option_names
    return {"window_size": log.name["window"], **ranks} if has_window else ranks


def _scheduled_intervals(log: RawLog) -> tuple[list[Interval], int, int, list[str]]:
    """Return four values: the logged intervals in order, the number of steps in an interval, the number of steps that
    the run was to do, and doubts.

    Lines that do not fit the schedule are dropped. Of repeated lines, the last one counts. Raises NotALog if the
    iterations make no schedule.
    """
    totals = Counter(interval.total for interval in log.intervals)
    total = max(
        totals,
        key=lambda number: (totals[number], number),
        default=_whole_number(log.arguments.get("train_iters")),
    )
    steps = log.first_line.get("steps") or total or 1
    intervals = {
        interval.iteration: interval
        for interval in log.intervals
        if 0 < interval.iteration <= steps and interval.total == total
    }
    interval_steps = _whole_number(log.arguments.get("log_interval"))
    if log.first_line:
        interval_steps = min(INTERVAL_STEPS, steps)
    num_on_schedule = sum(step % interval_steps == 0 for step in intervals) if interval_steps else 0
    if not interval_steps or (intervals and num_on_schedule * 2 <= len(intervals)):
        interval_steps = math.gcd(*intervals) or 1
    legible = [intervals[step] for step in sorted(intervals) if step % interval_steps == 0]
    last = legible[-1].iteration if legible else 0
    if last // interval_steps > 100 * len(legible):
        raise NotALog("the iterations that it numbers make no schedule")
    if last <= (log.exit_iteration or -1) < last + interval_steps:  # an argument told the run to exit early
        steps = min(steps, max(1, log.exit_iteration or 1))
    doubts = []
    if num_left_out := len(log.intervals) - len(legible):
        doubts.append(f"{counted(num_left_out, 'iteration line')} left out: repeated, or of no schedule")
    return legible, interval_steps, max(1, steps), doubts


def _whole_number(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else 0


def _end_of_run(log: RawLog, intervals: list[Interval], steps: int) -> tuple[str, str, str, JsonObject]:
    """Return the status, phase, reason and evidence of the run's end."""
    if log.first_line and log.last_line:
        status, phase, done, reason = log.last_line
        if status in STATUSES and (status != "ok" or done == steps):
            return status, phase, reason, {}
    last = intervals[-1].iteration if intervals else 0
    ends = sorted(log.ends.items())
    evidence: JsonObject = {"ends": [text for _, text in ends]} if ends else {}
    if last and (last == steps or (log.exit_iteration or 0) >= steps):
        return "ok", "done", "", evidence
    if last:
        phase, where = f"step {last + 1}", f"after iteration {last} of {steps}"
    elif log.num_unread_steps:
        phase, where = "", "in steps that could not be read"
    else:
        phase, where = "start", "before its first logged iteration"
    if not ends:
        return "interrupted", phase, f"the log ends {where} without a reason", evidence
    end_index, text = ends[0]
    status, _, meaning = RUN_ENDS[end_index]
    if not meaning:
        return status, phase, f"{where}: {text}", evidence
    return status, phase, f"{where}: {text} ({meaning})", {**evidence, "meaning": meaning}


def _parameter_counts(log: RawLog, workload: Workload, doubts: list[str]) -> JsonObject:
    """Return the parameter counts that the log tells. If they differ from the workload's, the key `other_parameters`
    says so. If the model was cut, each count is one part's, so none is compared, and a doubt says so."""
    billions = [count for count in log.parameters_billion if count]
    stated = {"parameters": log.parameters, "parameters_billion": sorted(set(billions))}
    if (num_parts := _model_parallel(log)) > 1:
        doubts.append(
            f"its parameters are counted in each of {num_parts} parts of the model, so they are not compared"
        )
        return stated
    is_near = any(abs(count - workload.num_params / 1e9) < 6e-4 for count in billions)
    if workload.num_params in log.parameters or (not log.parameters and (is_near or not billions)):
        return stated
    count_text = f"{log.parameters[0]}" if log.parameters else f"{billions[0]} B"
    sizes = f"{counted(workload.num_layers, 'layer')} of {workload.hidden_size} have {workload.num_params}"
    return {**stated, "other_parameters": f"the log counts {count_text} parameters, {sizes}"}


def _implausible_numbers(log: RawLog, job: Job, intervals: list[Interval], interval_steps: int) -> list[str]:
    """Return a text for each number of the log that its times, sizes and batches contradict."""
    doubts, load = [], job.workload
    is_whole = bool(intervals) and intervals[0].iteration == interval_steps
    start = [Interval(0, 0, None, None, None, consumed=0.0)] if is_whole else []
    samples_per_step = []
    for before, after in itertools.pairwise([*start, *intervals]):
        if before.consumed is None or after.consumed is None or after.consumed <= before.consumed:
            continue
        num_steps = after.iteration - before.iteration
        samples_per_step.append((after.consumed - before.consumed) / num_steps)
    if other_size := next((size for size in samples_per_step if size != load.batch_size), None):
        doubts.append(f"its consumed samples grow by {other_size:g} a step, its batch has {load.batch_size}")
    times = [interval.elapsed_ms / 1000 for interval in intervals if interval.elapsed_ms]
    speeds = log.interval_speeds or log.cumulative_speeds
    if times and speeds:
        ratio = statistics.median(speeds) * statistics.median(times) / load.batch_size
        if not 0.5 < ratio < 2:
            doubts.append(f"its samples/s are {ratio:.2g} times what its batch and times give")
    if times and log.tera_flops:
        tokens = load.batch_size * load.seq_len / job.world_size
        expected = FLOPS_PER_PARAMETER * load.num_params * tokens / statistics.median(times) / 1e12
        ratio = statistics.median(log.tera_flops) / expected
        if not 0.5 < ratio < 2 and expected > 0.1:
            doubts.append(f"its Tera Flops are {ratio:.2g} times what its parameters, tokens and times give")
    return doubts
