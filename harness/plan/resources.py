"""Formulas for the seconds and bytes of one resource at a machine's rates. Every forecast is made of these formulas.

A step has passes on the device, copies over the link, and updates on the device or on the host. It may also have states
on a disk and, with several ranks, exchanges over the link between devices. The seconds of a step's parts are added up
by step.py for any plan, by methods/streaming/placement/planner.py for layers of several kinds, by
methods/pipeline/schedule.py for an order of passes, and by published_laws.py for the published artifact.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.core.job import Workload
from harness.core.rates import Rates

# Bytes of memory traffic for the update of one parameter: its gradient and state are read, its state is written. In
# bf16 the weight is the upper half of the fp32 master weight, so it adds no traffic.
UPDATE_BYTES = {"fp32": 28, "bf16": 26, "fp16": 28}
# Bytes that the optimizer keeps for one parameter: two moments and, in mixed precision, an fp32 master weight.
MOMENT_BYTES = 8
OPTIMIZER_BYTES = {"fp32": MOMENT_BYTES, "bf16": MOMENT_BYTES + 4, "fp16": MOMENT_BYTES + 4}
# By resource: the field of Rates that holds its rate.
RATES = {
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


class Forecast(NamedTuple):
    """The seconds of a step, and the name of the resource or part that takes most of them."""

    seconds: float
    binds: str


def seconds_of(resource: str, amount: float, rates: Rates) -> float:
    """Return the seconds that a resource is busy. `amount`: bytes or, for the host's cores, a number of parameters to
    update."""
    rate: float = getattr(rates, RATES[resource])
    return amount / rate


def compute_seconds(workload: Workload, rates: Rates) -> tuple[float, float]:
    """Return the seconds of a step's forward pass, head included, and of its backward pass, recompute included. If the
    head's own rate is known, the head is computed at that rate."""
    head_flops = workload.head_flops_per_step if rates.head_flops_per_second else 0.0
    layers = pass_seconds(workload.flops_per_step - head_flops, 0.0, rates)
    head = pass_seconds(0.0, head_flops, rates)
    return rates.forward_share * layers + head, (1 - rates.forward_share) * layers


def pass_seconds(layer_flops: float, head_flops: float, rates: Rates, num_sharing: int = 1) -> float:
    """Return the seconds of passes through layers and the head. If the head's own rate is known, the head is computed
    at that rate. `num_sharing`: number of ranks whose passes share the device at the same time."""
    layers = rates.device_flops_per_second
    return num_sharing * (layer_flops / layers + head_flops / (rates.head_flops_per_second or layers))


def device_update_seconds(num_params: float, workload: Workload, rates: Rates) -> float:
    return seconds_of("device memory", UPDATE_BYTES[workload.dtype] * num_params, rates)


def host_update_seconds(
    num_params: float, workload: Workload, rates: Rates, copied_bytes: float = 0
) -> tuple[float, float]:
    """Return two times of an update, in seconds: the time of the host's cores, and the time of the host's memory, which
    also serves the copies of `copied_bytes`."""
    touched = UPDATE_BYTES[workload.dtype] * num_params + copied_bytes
    return seconds_of("host cores", num_params, rates), seconds_of("host memory", touched, rates)


def copy_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds of copies over the link that run one after the other. Half of the bytes go in each
    direction."""
    return num_bytes / ((rates.inbound_bytes_per_second + rates.outbound_bytes_per_second) / 2)


def exchange_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds in which a device sends `num_bytes` to other devices and receives as many bytes."""
    return seconds_of("link between devices", num_bytes, rates)


def parts_sent(num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in an all-gather or a reduce-scatter of a tensor of `num_bytes`: each rank
    sends all but one of the tensor's `num_ranks` equal parts."""
    return num_bytes * (num_ranks - 1) / num_ranks


def sum_sent(num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of a tensor of `num_bytes`, which is a reduce-scatter and
    an all-gather."""
    return 2 * parts_sent(num_bytes, num_ranks)


def disk_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds in which `num_bytes` are read from the disk and then written back."""
    return num_bytes * (1 / rates.disk_read_bytes_per_second + 1 / rates.disk_write_bytes_per_second)
