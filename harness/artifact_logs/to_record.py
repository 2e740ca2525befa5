"""Turns a raw log into a record. The job comes from the log's name and lines, the run's status from the lines that tell
how the run ended. Every number stays as the log prints it.

The log's name and its lines may disagree, and lines may be missing. The record's evidence lists the decisions in such
cases under `doubts`, and the workload's fields that the log does not tell under `unsaid`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from typing import Any

from harness.artifact_logs.parse import ENDS, Interval, NotALog, RawLog, scalar
from harness.core import method
from harness.core.job import Job, Workload
from harness.core.log_lines import INTERVAL
from harness.core.record import STATUSES, Record

# By argument of the published artifact: the field of the workload that the argument sets.
FIELDS = {
    "num_attention_heads": "num_heads", "seq_length": "seq_len", "hidden_dropout": "dropout", "clip_grad": "clip_norm",
    "lr": "learning_rate", "seed": "seed",
}  # fmt: skip
PRECISIONS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
SIZES = {
    "num_layers": ("num_layers",), "hidden_size": ("hidden_size",), "batch_size": ("micro_batch_size", "batch_size"),
    "window": ("gl_window_size",),
}  # fmt: skip
SPEEDS = {
    "interval": "mean of each interval",
    "cumulative": "mean of all steps so far but the first two, without data loading",
}
LARGEST_MB = 1e9  # in MB; a larger number is taken to be garbled
FLOPS_PER_PARAMETER = 8  # operations that the artifact's Tera Flops count for each parameter and token


def to_record(log: RawLog, name: str) -> Record:
    """Return the log as a record that is not yet judged. Raises NotALog if the log's sizes or iterations make no
    sense."""
    doubts = _contradictions(log)
    workload, unsaid = _workload(log, doubts)
    intervals, interval_steps, steps = _intervals(log, doubts)
    status, phase, reason, evidence = _end(log, intervals, steps)
    job = Job(
        log.name["method"], workload, _options(log), device=log.own.get("device", "cuda"), steps=steps,
        warmup=min(interval_steps, steps - 1),
    )  # fmt: skip
    _check_flops(log, workload, intervals, doubts)
    at = {interval.iteration: interval for interval in intervals}
    grid = [at.get(step) for step in range(interval_steps, max(at, default=0) + 1, interval_steps)]
    mebibytes = {"device_allocated": "max allocated", "device_reserved": "max reserved"}
    return Record(
        job, job.key(origin="imported", log=log.sha256), status, phase, reason, origin="imported", clock=job.device,
        interval_steps=interval_steps, started=float(log.name["unix"]),
        losses=[each.loss if each else None for each in grid],  # type: ignore[misc]
        grad_norms=[each.grad_norm for each in intervals if each.grad_norm is not None],
        step_seconds=[each.elapsed_ms / 1000 if each and each.elapsed_ms else None for each in grid],  # type: ignore[misc]
        peaks={key: int(log.memory_mb[word] * 2**20) for key, word in mebibytes.items()
               if 0 < log.memory_mb.get(word, 0) < LARGEST_MB},
        evidence={**evidence, **_raw(log, name, intervals), **_parameters(log, workload), "unsaid": unsaid,
                  "doubts": doubts},
    )  # fmt: skip


def _raw(log: RawLog, name: str, intervals: list[Interval]) -> dict[str, Any]:
    """Return the log's numbers as the log prints them, by the names that they have in the record's evidence."""
    kind = "cumulative" if log.cumulative_speeds else "interval"
    columns = {"iterations": "iteration", "elapsed_ms": "elapsed_ms", "lm_loss": "loss", "grad_norm": "grad_norm"}
    return {
        "log": name, "log_sha256": log.sha256, "named_window": log.name["window"],
        "arguments": {word: text for word, text in log.arguments.items() if word != "data_path"},
        **{name: [getattr(each, field) for each in intervals] for name, field in columns.items()},
        "samples_per_second": getattr(log, f"{kind}_speeds"), "samples_per_second_is": SPEEDS[kind],
        "tera_flops": log.tera_flops, "memory_mb": log.memory_mb, "timers_ms": log.timers_ms,
    }  # fmt: skip


def _contradictions(log: RawLog) -> list[str]:
    """Return a text for each fact (the method or a size) on which the log's name and its lines disagree."""
    workload = log.own.get("workload", {})
    told = {size: next((log.arguments[word] for word in words if word in log.arguments), workload.get(size))
            for size, words in SIZES.items()}  # fmt: skip
    told["method"] = log.own.get("method")
    return [
        f"{size} is {log.name[size]} in the name and {text} in the log"
        for size, text in told.items()
        if text is not None and str(text) != str(log.name[size])
    ]


def _workload(log: RawLog, doubts: list[str]) -> tuple[Workload, list[str]]:
    """Return the workload, and the names of those of its fields that the log does not tell. Raises NotALog if the sizes
    in the log's name make no workload."""
    sizes = {size: log.name[size] for size in ("num_layers", "hidden_size", "batch_size")}
    stated = {name: value for name, value in log.own.get("workload", {}).items() if name not in sizes}
    stated |= {name: scalar(log.arguments[word]) for word, name in FIELDS.items() if word in log.arguments}
    if log.vocab_size:
        stated["vocab_size"] = log.vocab_size
    if "data_path" in log.arguments:  # only the file's name: folders could tell a person's name
        stated["corpus"] = re.split(r"[/\\]", log.arguments["data_path"].strip("[]'\" "))[-1]
    if "params_dtype" in log.arguments:
        stated["dtype"] = PRECISIONS.get(log.arguments["params_dtype"], log.arguments["params_dtype"])
    fields = vars(Workload())
    legible = {name: value for name, value in stated.items() if name in fields and _is_like(value, fields[name])}
    doubts += [f"{name} is illegible: {str(value)[:60]}" for name, value in stated.items() if name not in legible]
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


def _options(log: RawLog) -> dict[str, Any]:
    """Return the options that the log tells. If it tells none, and the method has a window, return the window in the
    log's name."""
    if log.own:
        return dict(log.own["options"])
    known = log.name["method"] in method.names() and method.option_names(method.load(log.name["method"]))
    has_window = "gl_window_size" in log.arguments or (known and "window_size" in known)
    return {"window_size": log.name["window"]} if has_window else {}


def _intervals(log: RawLog, doubts: list[str]) -> tuple[list[Interval], int, int]:
    """Return three values: the logged intervals in order, the number of steps in an interval, and the number of steps
    that the run was to do.

    Lines that do not fit the schedule are dropped. Of repeated lines, the last one counts. Raises NotALog if the
    iterations make no schedule.
    """
    totals = Counter(each.total for each in log.intervals)
    total = max(totals, key=lambda each: (totals[each], each), default=_whole(log.arguments.get("train_iters")))
    steps = log.own.get("steps") or total or 1
    found = {each.iteration: each for each in log.intervals if 0 < each.iteration <= steps and each.total == total}
    asked = min(INTERVAL, steps) if log.own else _whole(log.arguments.get("log_interval"))
    if not asked or (found and sum(step % asked == 0 for step in found) * 2 <= len(found)):
        asked = math.gcd(*found) or 1
    legible = [found[step] for step in sorted(found) if step % asked == 0]
    last = legible[-1].iteration if legible else 0
    if last // asked > 100 * len(legible):
        raise NotALog("the iterations that it numbers make no schedule")
    if last <= (log.exit_iteration or -1) < last + asked:  # an argument told the run to exit early
        steps = min(steps, max(1, log.exit_iteration or 1))
    if len(legible) < len(log.intervals):
        doubts.append(f"{len(log.intervals) - len(legible)} iteration lines are repeated or fit no schedule")
    return legible, asked, max(1, steps)


def _whole(text: str | None) -> int:
    return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else 0


def _end(log: RawLog, intervals: list[Interval], steps: int) -> tuple[str, str, str, dict[str, Any]]:
    """Return the status, phase, reason and evidence of the run's end."""
    if log.own and log.own_end:
        status, phase, done, reason = log.own_end
        if status in STATUSES and (status != "ok" or done == steps):
            return status, phase, reason, {}
    last = intervals[-1].iteration if intervals else 0
    told = sorted(log.ends.items())
    evidence: dict[str, Any] = {"ends": [text for _, text in told]} if told else {}
    if last and (last == steps or (log.exit_iteration or 0) >= steps):
        return "ok", "done", "", evidence
    phase = f"step {last + 1}" if last else "start"
    where = f"after iteration {last} of {steps}" if last else "before its first logged iteration"
    if not told:
        return "interrupted", phase, f"the log ends {where} without a reason", evidence
    place, text = told[0]
    status, _, meaning = ENDS[place]
    if not meaning:
        return status, phase, f"{where}: {text}", evidence
    return status, phase, f"{where}: {text} ({meaning})", {**evidence, "meaning": meaning}


def _parameters(log: RawLog, workload: Workload) -> dict[str, Any]:
    """Return the parameter counts that the log tells. If they differ from the workload's, the key `other_parameters`
    says so."""
    billions = [each for each in log.parameters_billion if each]
    stated = {"parameters": log.parameters, "parameters_billion": sorted(set(billions))}
    is_near = any(abs(each - workload.num_params / 1e9) < 6e-4 for each in billions)
    if workload.num_params in log.parameters or (not log.parameters and (is_near or not billions)):
        return stated
    counted = f"{log.parameters[0]}" if log.parameters else f"{billions[0]} B"
    sizes = f"{workload.num_layers} layers of {workload.hidden_size} have {workload.num_params}"
    return {**stated, "other_parameters": f"the log counts {counted} parameters, {sizes}"}


def _check_flops(log: RawLog, workload: Workload, intervals: list[Interval], doubts: list[str]) -> None:
    times = [each.elapsed_ms for each in intervals if each.elapsed_ms]
    if times and log.tera_flops:
        tokens = workload.batch_size * workload.seq_len
        expected = FLOPS_PER_PARAMETER * workload.num_params * tokens / (statistics.median(times) / 1000) / 1e12
        ratio = statistics.median(log.tera_flops) / expected
        if not 0.5 < ratio < 2 and expected > 0.1:
            doubts.append(f"its Tera Flops are {ratio:.2g} times what its parameters, tokens and times give")
