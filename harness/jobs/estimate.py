"""How long a job takes, before it runs: by the machine's rates where known, else good to a factor of about two."""

from __future__ import annotations

from harness.core.job import Job, Plan, Workload
from harness.core.method import Method
from harness.core.rates import ADAM_BYTES, Rates
from harness.devices import machine
from harness.gate import probe
from harness.gate.probe import ROUNDINGS, Extent
from harness.run.launch import is_small

LONG_SECONDS = 600.0  # what is foreseen to take longer says so first
SHORTER = "fewer --steps, smaller -l, -h, -b or --seq, or --scale fit, shorten it"
# A process with its imports and its gate; fp32 arithmetic, on a CPU of a core; building and inspecting a model's state;
# moving state between device and host and updating it there.
PROCESS_SECONDS = {"cpu": 4.0, "sim": 4.0, "cuda": 12.0}
OPERATIONS_PER_SECOND = {"cpu": 2e10, "sim": 2e10, "cuda": 2e13}
BUILT_BYTES_PER_SECOND = 2e9
MOVED_BYTES_PER_SECOND = {"cpu": 2e9, "sim": 2e9, "cuda": 1.5e10}
OPTIMIZER_BYTES = {"fp32": 8, "bf16": 12, "fp16": 12}  # a parameter: two moments, in mixed precision a master, too


def run_seconds(job: Job, plan: Plan, rates: Rates | None = None) -> float:
    """Seconds of one process that trains the job. Rates are the machine's, if known."""
    state, num_models = plan.device_bytes + plan.host_bytes, int(job.options.get("num_models", 1))
    step = plan.step_seconds or least_step_seconds(job.workload, plan, rates)
    if step is None:
        cores = 1 if job.device == "cuda" or is_small(job.workload) else machine.facts()["cores"]
        step = num_models * job.workload.flops_per_step / (cores * OPERATIONS_PER_SECOND[job.device])
        step += (plan.moved_bytes + plan.host_bytes) / MOVED_BYTES_PER_SECOND[job.device]
    return PROCESS_SECONDS[job.device] + state / BUILT_BYTES_PER_SECOND + job.steps * step


def probe_seconds(job: Job, run: float, trained: type[Method], extent: Extent) -> float:
    """Seconds of the gate's probe, by those of a run of the job: each of its trainings is as a run, but for its steps
    and its size. See harness/gate/probe.py for how many there are."""
    if trained.is_reference or not trained.is_exact or not extent:
        return 0.0
    load, keeps_bits = job.workload, job.device != "cuda"
    kept = [keeps_bits and (trained.bit_exact if load.dtype == "fp32" else trained.bit_exact_in_half)]
    if load.dtype != "fp32" and not kept[0]:
        kept.append(keeps_bits and trained.bit_exact)  # in fp32
    # By the method and by the reference; where the bits may differ, in one more process by the reference otherwise.
    num_runs = sum(2 if each else 3 for each in kept)
    num_models = sum(2 if each else 2 + len(ROUNDINGS) for each in kept)
    small = probe.capped(load.at_depth(min(extent.layers, load.num_layers)))
    share = extent.steps / job.steps * small.flops_per_step / load.flops_per_step
    return num_runs * PROCESS_SECONDS[job.device] + num_models * share * (run - PROCESS_SECONDS[job.device])


def least_step_seconds(workload: Workload, plan: Plan, rates: Rates | None) -> float | None:
    """A lower bound of a step, however well its parts overlap: the longest of its arithmetic, its copies with both
    directions of the link full, the host's Adam, and what copies and Adam read and write in the host's memory. None if
    the machine's rates are not known."""
    if rates is None:
        return None
    at_host = plan.updates_on_host * plan.host.get("optimizer", 0) / OPTIMIZER_BYTES[workload.dtype]
    link = (rates.inbound_bytes_per_second + rates.outbound_bytes_per_second) / 2
    return max(
        sum(rates.compute_seconds(workload.flops_per_step, workload.head_flops_per_step)),
        plan.moved_bytes / 2 / link,
        at_host / rates.host_adam_params_per_second,
        (ADAM_BYTES[workload.dtype] * at_host + plan.moved_bytes) / rates.host_bytes_per_second,
    )


def text(seconds: float) -> str:
    """As a human reads it: 40 seconds, 12 minutes, 5.3 hours."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
