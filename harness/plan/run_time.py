"""Estimates, before a job runs, how long it takes. The estimate uses the machine's rates or, if they are not known,
guesses that are right to a factor of about two."""

from __future__ import annotations

from harness.core import cpu_cores
from harness.core.job import Job, Plan
from harness.core.method import Method
from harness.core.rates import Rates
from harness.devices import machine
from harness.gate import probe
from harness.gate.probe import Extent, roundings_of
from harness.plan.resources import least_seconds

LONG_SECONDS = 600.0  # if a run should take longer than this, the estimate is printed before the run
SHORTER_RUN_TEXT = "for a shorter run try fewer --steps, smaller -l, -h, -b or --seq, or --scale fit"
# seconds that any process takes for imports and the gate
PROCESS_SECONDS = {"cpu": 4.0, "sim": 4.0, "cuda": 12.0}
# guessed fp32 operations per second of the device; on a CPU, of each core
OPERATIONS_PER_SECOND = {"cpu": 2e10, "sim": 2e10, "cuda": 2e13}
BUILD_BYTES_PER_SECOND = 2e9  # guessed rate at which a model's state is built and inspected
# Guessed rate at which state moves between device and host, and at which the host updates state.
MOVE_BYTES_PER_SECOND = {"cpu": 2e9, "sim": 2e9, "cuda": 1.5e10}
# Rates for deadlines, below those of any run that works: even a busy machine with two cores is well above these rates.
SLOWEST_OPERATIONS_PER_SECOND, SLOWEST_BYTES_PER_SECOND = {"cpu": 2e8, "sim": 2e8, "cuda": 5e11}, 1e8
# bytes moved in a step for each parameter, if all states go to a slow disk and back
STATE_BYTES_PER_PARAM = 64
LEAST_DEADLINE_SECONDS, LEAST_SILENCE_SECONDS = 3600.0, 900.0


def run_seconds(job: Job, plan: Plan, rates: Rates | None = None) -> float:
    """Return the estimated seconds of one process that trains the job. `rates`: the machine's rates; None: guess
    them."""
    state_bytes, num_models = plan.device_bytes + plan.host_bytes, int(job.options.get("num_models", 1))
    step_seconds = least_seconds(job.workload, plan, rates)
    if step_seconds is None:
        cores = 1 if job.device == "cuda" or cpu_cores.is_small(job.workload) else machine.facts()["cores"]
        step_seconds = num_models * job.workload.flops_per_step / (cores * OPERATIONS_PER_SECOND[job.device])
        step_seconds += (plan.moved_bytes + plan.host_bytes) / MOVE_BYTES_PER_SECOND[job.device]
    return PROCESS_SECONDS[job.device] + state_bytes / BUILD_BYTES_PER_SECOND + job.steps * step_seconds


def probe_seconds(job: Job, job_seconds: float, method_class: type[Method], extent: Extent) -> float:
    """Return the estimated seconds of the gate's probe. `job_seconds`: those of the job's own run.

    Each training of the probe takes as long as that run, scaled by steps and size; harness/gate/probe.py tells how many
    trainings there are.
    """
    if method_class.is_reference or not method_class.is_exact or not extent:
        return 0.0
    load, keeps_bits = job.workload, job.device != "cuda"
    bit_exact = method_class.bit_exact if load.dtype == "fp32" else method_class.bit_exact_in_half
    promises_bits = {load.dtype: keeps_bits and bit_exact}
    if load.dtype != "fp32" and not promises_bits[load.dtype]:
        promises_bits["fp32"] = keeps_bits and method_class.bit_exact  # half precision is probed in fp32, too
    # The method and the reference train once each. Unless the method promises the reference's very bits, the reference
    # also trains with other roundings.
    num_runs = num_models = 0
    for dtype, is_bit_equal in promises_bits.items():
        num_runs += 2 if is_bit_equal else 3
        num_models += 2 if is_bit_equal else 2 + len(roundings_of(dtype)[0])
    probe_workload = probe.sized(job, extent).at_depth(probe.depth_of(load, extent))
    cost_share = extent.steps / job.steps * probe_workload.flops_per_step / load.flops_per_step
    start_seconds = PROCESS_SECONDS[job.device]
    return num_runs * start_seconds + num_models * cost_share * (job_seconds - start_seconds)


def deadline_seconds(job: Job) -> float:
    """Return the time limit, in seconds, of a job that has no --timeout."""
    return LEAST_DEADLINE_SECONDS + 2 * job.steps * _slowest_step_seconds(job)


def silence_seconds(job: Job) -> float:
    """Return the most seconds that may pass between two events (steps or phases) of a job that has no --timeout."""
    return LEAST_SILENCE_SECONDS + 2 * _slowest_step_seconds(job)


def _slowest_step_seconds(job: Job) -> float:
    moving = STATE_BYTES_PER_PARAM * job.workload.num_params / SLOWEST_BYTES_PER_SECOND
    return job.workload.flops_per_step / SLOWEST_OPERATIONS_PER_SECOND[job.device] + moving


def duration_text(seconds: float) -> str:
    """Return a duration as text: 40 seconds, 12 minutes or 5.3 hours."""
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
