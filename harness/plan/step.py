"""Predicts the seconds of a step from a plan and a machine's rates.

A plan that knows its schedule gives the seconds itself. Other plans give the work of each resource in a step. The lower
bound assumes that all resources work at once, so a step takes as long as the busiest resource. The prediction assumes
that the resources work one after the other, except for the work that the method lists in Method.hides: this work runs
at the same time as compute. accuracy.py compares predictions with measurements.
"""

from __future__ import annotations

from dataclasses import replace

from harness.core.job import Plan, Workload
from harness.core.method import Method
from harness.core.rates import Rates
from harness.plan import resources
from harness.plan.resources import Forecast

COMPUTE, ON_DEVICE, COPIES, ON_HOST, DISK, EXCHANGES = (
    "compute",
    "the device's updates",
    "copies",
    "the host's updates",
    "the disk",
    "exchanges between ranks",
)


def predicted(trained: Method, workload: Workload, plan: Plan, rates: Rates, num_ranks: int = 1) -> Forecast:
    """Predict the seconds of one rank's step. All ranks are on one host; each rank has its part of the batch and of the
    host's rates. `plan`: the plan of one rank."""
    if plan.step_seconds:
        return Forecast(plan.step_seconds, plan.binds)
    workload = replace(workload, batch_size=workload.batch_size // num_ranks)
    rates = shared(rates, num_ranks)
    updated = workload.num_params if num_ranks == 1 else _updated_by_rank(workload, plan)
    at_host = min(updated, _updated_on_host(workload, plan, resources.MOMENT_BYTES))
    exchanges = {kind: resources.exchange_seconds(size, rates) for kind, size in plan.exchanged.items()}
    parts = {
        COMPUTE: sum(resources.compute_seconds(workload, rates)),
        ON_DEVICE: resources.device_update_seconds(updated - at_host, workload, rates),
        COPIES: resources.copy_seconds(plan.moved_bytes, rates),
        ON_HOST: max(resources.host_update_seconds(at_host, workload, rates)),
        DISK: resources.disk_seconds(plan.disk_bytes, rates),
        EXCHANGES: sum(exchanges.values()),
    }
    may_hide = {"copies": parts[COPIES], "updates": parts[ON_HOST], **exchanges}
    hidden = sum(seconds for word, seconds in may_hide.items() if word in trained.hides)
    seconds = sum(parts.values()) - min(hidden, parts[COMPUTE] + parts[ON_DEVICE])
    return Forecast(seconds, max(parts, key=lambda part: parts[part]))


def shared(rates: Rates, num_ranks: int) -> Rates:
    """Return the rates that each of several ranks on one host has. All ranks share the host's rates. If the device is
    the host itself (a CPU), they share the device's rates, too."""
    of_host = ["host_bytes", "host_adam_params", "disk_read_bytes", "disk_write_bytes"]
    if rates.is_host:
        of_host += [
            "device_flops",
            "head_flops",
            "device_bytes",
            "inbound_bytes",
            "outbound_bytes",
            "exchange_bytes",
        ]
    named = {f"{name}_per_second": getattr(rates, f"{name}_per_second") for name in of_host}
    return replace(rates, **{name: rate / num_ranks for name, rate in named.items() if rate})


def least_seconds(workload: Workload, plan: Plan, rates: Rates | None) -> float | None:
    """Return a lower bound of the step's seconds; None if the machine's rates are not known. If the plan knows its
    schedule, return the plan's own seconds.

    The bound assumes that all resources work at once: both directions of the link are busy, the host's memory serves
    copies during updates, and the disk reads while it writes.
    """
    if plan.step_seconds or rates is None:
        return plan.step_seconds
    at_host = _updated_on_host(workload, plan, resources.OPTIMIZER_BYTES[workload.dtype])
    return max(
        sum(resources.compute_seconds(workload, rates)),
        resources.copy_seconds(plan.moved_bytes, rates) / 2,
        *resources.host_update_seconds(at_host, workload, rates, plan.moved_bytes),
        resources.seconds_of("disk both ways", 2 * plan.disk_bytes, rates),
        resources.exchange_seconds(sum(plan.exchanged.values()), rates),
    )


def _updated_on_host(workload: Workload, plan: Plan, bytes_each: int) -> float:
    """Return the number of parameters that the host updates. This number is the bytes of optimizer state in host memory
    and on the disk, divided by `bytes_each`, the bytes of one parameter's state."""
    states = plan.host.get("optimizer", 0) + plan.disk.get("optimizer", 0)
    return min(workload.num_params, states / bytes_each) if plan.updates_on_host else 0.0


def _updated_by_rank(workload: Workload, plan: Plan) -> float:
    """Return the number of parameters that one rank updates: as many as the rank's plan holds optimizer states for, and
    at most all parameters of the model."""
    states = sum(memory.get("optimizer", 0) for memory in (plan.device, plan.host, plan.disk))
    return min(workload.num_params, states / resources.MOMENT_BYTES)
