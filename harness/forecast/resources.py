"""Seconds and bytes of one resource at a machine's rates: each formula once. Every forecast is made of these.

A step has passes on the device, copies over the link, updates on the device or on the host, and maybe states on a disk.
They are put together by step.py for any plan, by methods/streaming/planner.py for layers of several kinds, by
methods/pipeline/schedule.py for passes in an order, by published_laws.py for the published artifact.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.core.job import Workload
from harness.core.rates import Rates

# Bytes of memory traffic of a parameter's update: gradient and state read, state written; a bf16 weight is half of its
# master.
UPDATE_BYTES = {"fp32": 28, "bf16": 26, "fp16": 28}
# Bytes that the optimizer keeps for a parameter: two moments, in mixed precision a master, too.
MOMENT_BYTES = 8
OPTIMIZER_BYTES = {"fp32": MOMENT_BYTES, "bf16": MOMENT_BYTES + 4, "fp16": MOMENT_BYTES + 4}
# The rate that bounds each resource.
RATES = {
    "device memory": "device_bytes_per_second",
    "link inbound": "inbound_bytes_per_second",
    "link outbound": "outbound_bytes_per_second",
    "link both ways": "duplex_bytes_per_second",
    "host memory": "host_bytes_per_second",
    "host cores": "host_adam_params_per_second",
    "disk reads": "disk_read_bytes_per_second",
    "disk writes": "disk_write_bytes_per_second",
    "disk both ways": "disk_duplex_bytes_per_second",
}


class Forecast(NamedTuple):
    """Seconds of a step, and the resource that binds it."""

    seconds: float
    binds: str


def seconds_of(resource: str, amount: float, rates: Rates) -> float:
    """Return a resource's seconds. `amount`: bytes; for the host's cores parameters updated."""
    rate: float = getattr(rates, RATES[resource])
    return amount / rate


def compute_seconds(workload: Workload, rates: Rates) -> tuple[float, float]:
    """Return the seconds of a step's forward pass with the head, and of its backward pass with the recompute. The head
    has a rate of its own, if that is known."""
    head_flops = workload.head_flops_per_step if rates.head_flops_per_second else 0.0
    layers = pass_seconds(workload.flops_per_step - head_flops, 0.0, rates)
    head = pass_seconds(0.0, head_flops, rates)
    return rates.forward_share * layers + head, (1 - rates.forward_share) * layers


def pass_seconds(layer_flops: float, head_flops: float, rates: Rates, num_sharing: int = 1) -> float:
    """Return the seconds of passes of layers and of the head, which has a rate of its own, if that is known.
    `num_sharing`: ranks whose passes the device computes at once."""
    layers = rates.device_flops_per_second
    return num_sharing * (layer_flops / layers + head_flops / (rates.head_flops_per_second or layers))


def device_update_seconds(num_params: float, workload: Workload, rates: Rates) -> float:
    return seconds_of("device memory", UPDATE_BYTES[workload.dtype] * num_params, rates)


def host_update_seconds(
    num_params: float, workload: Workload, rates: Rates, copied_bytes: float = 0
) -> tuple[float, float]:
    """Return the larger of the seconds of the host's cores and of its memory, through which copies pass, too."""
    touched = UPDATE_BYTES[workload.dtype] * num_params + copied_bytes
    return seconds_of("host cores", num_params, rates), seconds_of("host memory", touched, rates)


def copy_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds of copies one after the other, half of them each way."""
    return num_bytes / ((rates.inbound_bytes_per_second + rates.outbound_bytes_per_second) / 2)


def disk_seconds(num_bytes: float, rates: Rates) -> float:
    """Return the seconds of reading bytes from the disk and then writing them."""
    return num_bytes * (1 / rates.disk_read_bytes_per_second + 1 / rates.disk_write_bytes_per_second)
