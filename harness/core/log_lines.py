"""The lines of a run's readable log, in the form of the published artifact's lines, so that the artifact's scripts can
read the log."""

from __future__ import annotations

import math
import statistics
import time

from harness.base.json_object import JsonObject
from harness.core.job import Job

# Forms of a log: that of the published logs of Megatron, that of the published logs of DeepSpeed, and PLAIN_WORDS.
DIALECTS = ("megatron", "deepspeed", "plain")
INTERVAL_STEPS = 10  # steps between two metric lines of a log
# The dialect plain has the published metric lines, with these words replaced. The artifact's scripts look for the
# published words, so they leave the reference's runs, which log in this dialect, out of their tables.
PLAIN_WORDS = {
    "elapsed time per iteration (ms)": "milliseconds per iteration",
    "total parameters": "parameters of the model",
    "SamplesPerSecond": "samples per second",
}
BUILD_LOG = "build_{}.txt"  # name of the file with the output of an engine's compiler, beside the runs' logs


def header_lines(job: Job) -> list[str]:
    workload = job.workload
    return [
        f"method {job.method} with {job.options or 'no options'}, {job.steps} steps on {job.device}, {workload}",
        f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {workload.num_params}",
    ]


def end_line(job: Job, status: str, phase: str, num_steps: int, reason: str) -> str:
    """Return the line that tells a run's end: status, phase, number of steps done and, unless it is empty, reason."""
    text = f"ended as {status} at {phase}, after {num_steps} of {job.steps} steps"
    return f"{text}: {' '.join(reason.split())}" if reason else text


def interval_steps(job: Job) -> int:
    """Return the number of steps between two metric lines of the job's log: INTERVAL_STEPS or, for a shorter run, all
    its steps."""
    return min(INTERVAL_STEPS, job.steps)


def interval_lines(
    job: Job, measured: JsonObject, peaks: dict[str, int], dialect: str = "megatron"
) -> list[str]:
    """Return the published metric lines if the latest step ends an interval, and an empty list if not.

    Times and losses are means over the interval, warm-up included, as in the published logs. Tera Flops are computed
    from Workload.flops_per_step, which includes the recompute. The dialect deepspeed prints no gradient norm; its speed
    is the mean over all steps so far except the first two. The dialect plain uses PLAIN_WORDS.
    """
    step, interval = len(measured["losses"]), interval_steps(job)
    if step % interval:
        return []
    workload, seconds = job.workload, statistics.fmean(measured["step_seconds"][-interval:])
    is_deepspeed = dialect == "deepspeed"
    lines = [
        _iteration_line(job, measured, seconds, is_deepspeed),
        f"Effective Tera Flops per GPU: {workload.flops_per_step / job.world_size / seconds / 1e12:.2f}"
        f" and total parameters {_billions(workload.num_params)} B",
    ]
    if is_deepspeed:
        lines.append(_since_the_third_step(workload.batch_size, measured["step_seconds"]))
    else:
        lines.append(
            f"NumWorkers: {job.world_size}; SamplesPerStep: {workload.batch_size}; IterationTime: {seconds};"
            f"  SamplesPerSecond: {workload.batch_size / seconds}"
        )
    if peaks and step == interval:
        lines.append(_memory_line(step, peaks, is_deepspeed))
    if dialect == "plain":
        for published, plain in PLAIN_WORDS.items():
            lines = [line.replace(published, plain) for line in lines]
    return lines


def _iteration_line(job: Job, measured: JsonObject, seconds: float, is_deepspeed: bool) -> str:
    """Return the line with the interval's loss. `seconds`: of an average step of the interval."""
    workload, step, interval = job.workload, len(measured["losses"]), interval_steps(job)
    norm = f" grad norm: {measured['grad_norms'][-1]:.3f} |" if measured["grad_norms"] else ""
    scale = measured["loss_scales"][-1] if measured["loss_scales"] else 1.0
    num_skipped = sum(number > step - interval for number in measured["skipped_steps"])
    losses = [loss for loss in measured["losses"][-interval:] if math.isfinite(loss)]
    loss = f" lm loss: {statistics.fmean(losses):.6E} |" if losses else ""
    scaling = "" if is_deepspeed else f" loss scale: {scale:.1f} |{norm}"
    batch = "" if is_deepspeed else f" global batch size: {workload.batch_size:5d} |"
    return (
        f" iteration {step:8d}/{job.steps:8d} | elapsed time per iteration (ms): {seconds * 1000:.1f} |"
        f" learning rate: {workload.learning_rate_at(step):.3E} |{batch}"
        f"{loss}{scaling}"
        f" number of skipped iterations: {num_skipped:3d} | number of nan iterations: {interval - len(losses):3d} |"
    )


def _memory_line(step: int, peaks: dict[str, int], is_deepspeed: bool) -> str:
    allocated = peaks["device_allocated"] / 2**20
    reserved = peaks.get("device_reserved", peaks["device_allocated"]) / 2**20
    after = f"after {step} iterations" if is_deepspeed else f"[Rank 0] (after {step} iterations)"
    return (
        f"{after} memory (MB) | allocated: {allocated} | max allocated: {allocated} |"
        f" reserved: {reserved} | max reserved: {reserved}"
    )


def _billions(num_params: int) -> str:
    """Format a number of parameters in billions: with three decimals, as the artifact does, or with nine decimals if
    the number is below 0.1 billion."""
    return f"{num_params / 1e9:.3f}" if num_params >= 1e8 else f"{num_params / 1e9:.9f}"


def _since_the_third_step(batch_size: int, step_seconds: list[float]) -> str:
    """Return a line as DeepSpeed's timer prints it. The speed is the mean over all steps except the first two."""
    timed_seconds = step_seconds[2:] or step_seconds
    now = time.time()
    clock = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))},{int(now % 1 * 1000):03d}"
    speed = batch_size * len(timed_seconds) / sum(timed_seconds)
    return f"[{clock}] [INFO] [timer.py:181:stop] 0/{len(step_seconds)}, SamplesPerSec={speed}"
