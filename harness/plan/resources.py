"""Formulas for the seconds and bytes of one resource at a machine's rates, and for the seconds of a step. All forecasts
are made of these formulas.

A step has passes on the device, copies over the link, and updates on the device or on the host. It may also have states
on a disk and, with several ranks, exchanges over the link between devices.

A plan that knows its schedule gives the seconds of a step itself. Other plans give the work of each resource in a step.
The lower bound (least_seconds) assumes that all resources work at once, so a step takes as long as the busiest
resource. The prediction (predicted) assumes that the resources work one after the other, except for the work that the
method lists in Method.hides: this work runs at the same time as compute. accuracy.py compares predictions with
measurements. methods/streaming/placement/planner.py adds up the same formulas for layers of several kinds,
methods/pipeline/schedule.py for an order of passes, papers/laws.py for the published artifact.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from harness.core.job import Plan, Workload
from harness.core.method import Method
from harness.core.rates import Rates

# Bytes of memory traffic for the update of one parameter: its gradient and state are read, its state is written. In
# bf16 the weight is the upper half of the fp32 master weight, so it adds no traffic.
UPDATE_BYTES = {"fp32": 28, "bf16": 26, "fp16": 28}
# Bytes that the optimizer keeps for one parameter: two moments and, in mixed precision, an fp32 master weight.
MOMENT_BYTES = 8
OPTIMIZER_BYTES = {"fp32": MOMENT_BYTES, "bf16": MOMENT_BYTES + 4, "fp16": MOMENT_BYTES + 4}
# By resource: the field of Rates that holds its rate.
RATE_FIELDS = {
    "device memory": "device_bytes_per_second",
    "link inbound": "inbound_bytes_per_second",
    "link outbound": "outbound_bytes_per_second",
    "link both ways": "duplex_bytes_per_second",
    "link between devices": "exchange_bytes_per_second",
    "host memory": "host_bytes_per_second",
    "host cores": "host_adam_params_per_second",
    "disk reads": "disk_read_bytes_per_second",
    "disk writes": "disk_write_bytes_per_second",
    "disk both ways": "disk_duplex_bytes_per_second",
}
# The parts of a step, as a forecast names the longest one.
COMPUTE = "compute"
ON_DEVICE = "the device's updates"
COPIES = "copies"
ON_HOST = "the host's updates"
DISK = "the disk"
EXCHANGES = "exchanges between ranks"


class Forecast(NamedTuple):
    """The seconds of a step, and the name of the resource or part that takes most of them."""

    seconds: float
    binds: str


def seconds_of(resource: str, amount: float, rates: Rates) -> float:
    """Return the seconds that a resource is busy. `amount`: bytes or, for the host's cores, a number of parameters to
    update."""
    rate: float = getattr(rates, RATE_FIELDS[resource])
    return amount / rate


def compute_seconds(workload: Workload, rates: Rates) -> tuple[float, float]:
    """Return the seconds of a step's forward pass, head included, and of its backward pass, recompute included. If the
    head's own rate is known, the head is computed at that rate."""
    head_flops = workload.head_flops_per_step if rates.head_flops_per_second else 0.0
    layer_seconds = pass_seconds(workload.flops_per_step - head_flops, 0.0, rates)
    head_seconds = pass_seconds(0.0, head_flops, rates)
    return rates.forward_share * layer_seconds + head_seconds, (1 - rates.forward_share) * layer_seconds


def pass_seconds(layer_flops: float, head_flops: float, rates: Rates, num_sharing: int = 1) -> float:
    """Return the seconds of passes through layers and the head. If the head's own rate is known, the head is computed
    at that rate. `num_sharing`: number of ranks whose passes share the device at the same time."""
    layer_rate = rates.device_flops_per_second
    head_rate = rates.head_flops_per_second or layer_rate
    return num_sharing * (layer_flops / layer_rate + head_flops / head_rate)


def device_update_seconds(num_params: float, workload: Workload, rates: Rates) -> float:
    return seconds_of("device memory", UPDATE_BYTES[workload.dtype] * num_params, rates)


def host_update_seconds(
    num_params: float, workload: Workload, rates: Rates, copied_bytes: float = 0
) -> tuple[float, float]:
    """Return two times of an update, in seconds: the time of the host's cores, and the time of the host's memory, which
    also serves the copies of `copied_bytes`."""
    touched_bytes = UPDATE_BYTES[workload.dtype] * num_params + copied_bytes
    return seconds_of("host cores", num_params, rates), seconds_of("host memory", touched_bytes, rates)


def copy_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds of copies over the link that run one after the other. Half of the bytes go in each
    direction."""
    return num_bytes / ((rates.inbound_bytes_per_second + rates.outbound_bytes_per_second) / 2)


def exchange_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds in which a device sends `num_bytes` to other devices and receives as many bytes."""
    return seconds_of("link between devices", num_bytes, rates)


def gather_sent_bytes(num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in an all-gather or a reduce-scatter of a tensor of `num_bytes`: each rank
    sends all but one of the tensor's `num_ranks` equal parts."""
    return num_bytes * (num_ranks - 1) / num_ranks


def all_reduce_sent_bytes(num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of a tensor of `num_bytes`, which is a reduce-scatter and
    an all-gather."""
    return 2 * gather_sent_bytes(num_bytes, num_ranks)


def disk_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds in which `num_bytes` are read from the disk and then written back."""
    return num_bytes * (1 / rates.disk_read_bytes_per_second + 1 / rates.disk_write_bytes_per_second)


def predict_step(
    configured_method: Method, workload: Workload, plan: Plan, rates: Rates, num_ranks: int = 1
) -> Forecast:
    """Predict the seconds of one rank's step. All ranks are on one host; each rank has its part of the batch and of the
    host's rates. `plan`: the plan of one rank."""
    if plan.step_seconds:
        return Forecast(plan.step_seconds, plan.binds)
    workload = replace(workload, batch_size=workload.batch_size // num_ranks)
    rates = rank_rates(rates, num_ranks)
    num_updated = workload.num_trained if num_ranks == 1 else _params_updated_by_rank(workload, plan)
    num_updated_on_host = min(num_updated, _params_updated_on_host(workload, plan, MOMENT_BYTES))
    exchanges = {kind: exchange_seconds(size, rates) for kind, size in plan.exchanged.items()}
    seconds_by_part = {
        COMPUTE: sum(compute_seconds(workload, rates)),
        ON_DEVICE: device_update_seconds(num_updated - num_updated_on_host, workload, rates),
        COPIES: copy_seconds(plan.moved_bytes, rates),
        ON_HOST: max(host_update_seconds(num_updated_on_host, workload, rates)),
        DISK: disk_seconds(plan.disk_bytes, rates),
        EXCHANGES: sum(exchanges.values()),
    }
    hideable_seconds = {"copies": seconds_by_part[COPIES], "updates": seconds_by_part[ON_HOST], **exchanges}
    hides = configured_method.hides
    hidden_seconds = sum(seconds for kind, seconds in hideable_seconds.items() if kind in hides)
    busy_seconds = seconds_by_part[COMPUTE] + seconds_by_part[ON_DEVICE]
    seconds = sum(seconds_by_part.values()) - min(hidden_seconds, busy_seconds)
    return Forecast(seconds, max(seconds_by_part, key=lambda part_name: seconds_by_part[part_name]))


def rank_rates(rates: Rates, num_ranks: int) -> Rates:
    """Return the rates that each of several ranks on one host has. All ranks share the host's rates. If the device is
    the host itself (a CPU), they share the device's rates, too."""
    rate_names = ["host_bytes", "host_adam_params", "disk_read_bytes", "disk_write_bytes"]
    if rates.is_host:
        rate_names += ["device_flops", "head_flops", "device_bytes"]
        rate_names += ["inbound_bytes", "outbound_bytes", "exchange_bytes"]
    present_rates = {f"{name}_per_second": getattr(rates, f"{name}_per_second") for name in rate_names}
    return replace(rates, **{name: rate / num_ranks for name, rate in present_rates.items() if rate})


def least_seconds(workload: Workload, plan: Plan, rates: Rates | None) -> float | None:
    """Return a lower bound of the step's seconds; None if the machine's rates are not known. If the plan knows its
    schedule, return the plan's own seconds.

    The bound assumes that all resources work at once: both directions of the link are busy, the host's memory serves
    copies during updates, and the disk reads while it writes.
    """
    if plan.step_seconds or rates is None:
        return plan.step_seconds
    num_updated_on_host = _params_updated_on_host(workload, plan, OPTIMIZER_BYTES[workload.dtype])
    return max(
        sum(compute_seconds(workload, rates)),
        copy_seconds(plan.moved_bytes, rates) / 2,
        *host_update_seconds(num_updated_on_host, workload, rates, plan.moved_bytes),
        seconds_of("disk both ways", 2 * plan.disk_bytes, rates),
        exchange_seconds(sum(plan.exchanged.values()), rates),
    )


def _params_updated_on_host(workload: Workload, plan: Plan, state_bytes_per_param: int) -> float:
    """Return the number of parameters that the host updates. This number is the bytes of optimizer state in host memory
    and on the disk, divided by `state_bytes_per_param`."""
    state_bytes = plan.host.get("optimizer", 0) + plan.disk.get("optimizer", 0)
    return min(workload.num_trained, state_bytes / state_bytes_per_param) if plan.updates_on_host else 0.0


def _params_updated_by_rank(workload: Workload, plan: Plan) -> float:
    """Return the number of parameters that one rank updates: as many as the rank's plan holds optimizer states for, and
    at most all that are trained."""
    state_bytes = sum(memory.get("optimizer", 0) for memory in (plan.device, plan.host, plan.disk))
    return min(workload.num_trained, state_bytes / MOMENT_BYTES)
