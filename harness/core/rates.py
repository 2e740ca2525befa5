"""The achieved rates of a machine, which bound a step's time from below. Standard library only.

Rates come from a calibration (methods/streaming/calibrate.py) or, for a machine by name, from its facts in
machines.yaml. Rates decide what is planned, never what is measured, so rates are no part of a job's identity.
harness/forecast computes a step's time from rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from harness.base.named_entries import did_you_mean

# For each fact of machines.yaml: the rate that it gives, and the factor to its unit.
FACTS = (
    ("gpu_tflops", "device_flops_per_second", 1e12),
    ("forward_share", "forward_share", 1),
    ("device_memory_gb_per_second", "device_bytes_per_second", 1e9),
    ("link_gb_per_second", "inbound_bytes_per_second", 1e9),
    ("link_gb_per_second", "outbound_bytes_per_second", 1e9),
    ("duplex_share", "duplex_share", 1),
    ("exchange_gb_per_second", "exchange_bytes_per_second", 1e9),
    ("host_memory_gb_per_second", "host_bytes_per_second", 1e9),
    ("host_adam_gparams_per_second", "host_adam_params_per_second", 1e9),
    ("disk_read_gb_per_second", "disk_read_bytes_per_second", 1e9),
    ("disk_write_gb_per_second", "disk_write_bytes_per_second", 1e9),
    ("disk_duplex_share", "disk_duplex_share", 1),
)
TOLD = ("gpu", "cpu", "cores", "precision", "pageable_link_gb_per_second")  # facts for people, which give no rate
LIMITS, SHARES = (1.0, 1e30), (1e-6, 1e6)  # ranges of rates and of shares that keep plans' arithmetic finite
NEEDED = ("gpu_tflops", "link_gb_per_second", "host_adam_gparams_per_second")


@dataclass(frozen=True)
class Rates:
    """Achieved rates, not those of a data sheet; a rate that is not given is infinite."""

    device_flops_per_second: float  # FLOPs of a step, counted as in Workload.flops_per_step
    forward_share: float = 0.25  # the forward pass's share of compute time, with every layer recomputed
    device_bytes_per_second: float = math.inf  # bytes that the device's Adam reads and writes
    inbound_bytes_per_second: float = math.inf  # host to device, page-locked memory
    outbound_bytes_per_second: float = math.inf  # device to host, page-locked memory
    duplex_share: float = 1.0  # rate of both directions at once, as a share of the sum of both alone
    host_bytes_per_second: float = math.inf  # the host's memory, shared by Adam and copies
    host_adam_params_per_second: float = math.inf  # Adam on the host's cores, if memory were no limit
    ahead_cost: float = 1.0  # time of an update that writes a new copy of the state, relative to an update in place
    streamed_cost: float = 1.0  # time of a streamed layer's update on the device, relative to a resident one's
    disk_read_bytes_per_second: float = math.inf  # reads of the files that hold state
    disk_write_bytes_per_second: float = math.inf  # writes to the files that hold state
    disk_duplex_share: float = 1.0  # rate of reading and writing at once, as a share of the sum of both alone
    exchange_bytes_per_second: float = math.inf  # bytes that a device sends to others while it receives as many
    # Rate of the head, which computes its loss and gradients together after the forward pass. The first two rates are
    # the layers' alone if this rate is known; else they cover all compute.
    head_flops_per_second: float | None = None  # compute of the head
    is_host: bool = False  # True: the device computes on the host's cores, so updates and compute take turns

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "is_host" or value is None or (item.default == value == math.inf):
                continue
            least, most = LIMITS if item.name.endswith("per_second") else SHARES
            if not least <= value <= most:
                raise ValueError(f"a machine's {item.name} must be from {least:g} to {most:g}, not {value:g}")
        if not (self.forward_share < 1 and max(self.duplex_share, self.disk_duplex_share) <= 1):
            raise ValueError("forward_share must be below 1, duplex_share and disk_duplex_share at most 1")

    @property
    def duplex_bytes_per_second(self) -> float:
        return self.duplex_share * (self.inbound_bytes_per_second + self.outbound_bytes_per_second)

    @property
    def disk_duplex_bytes_per_second(self) -> float:
        return self.disk_duplex_share * (self.disk_read_bytes_per_second + self.disk_write_bytes_per_second)


def of_facts(facts: dict[str, Any]) -> Rates | None:
    """Return the rates that a machine's facts give; None if one of NEEDED is missing, or a fact is not a number. Raises
    ValueError for an impossible rate and for an unknown fact, because a misspelt fact would give no rate. Devices
    without a link between them exchange over the link to the host."""
    known = (*dict.fromkeys(fact for fact, *_ in FACTS), *TOLD)
    for name in facts:
        if name not in known:
            raise ValueError(f"unknown fact {name!r}: {did_you_mean(name, known)}choose one of {', '.join(known)}")
    try:
        found: dict[str, Any] = {rate: float(facts[fact]) * factor for fact, rate, factor in FACTS if fact in facts}
    except (TypeError, ValueError):
        return None
    if any(name not in facts for name in NEEDED):
        return None
    return Rates(**{"exchange_bytes_per_second": found["outbound_bytes_per_second"], **found})


def facts_of(rates: Rates) -> dict[str, float]:
    """Return the facts that give the finite ones of these rates; a link's fact is the rate of its slower direction."""
    found: dict[str, float] = {}
    for fact, rate, factor in FACTS:
        value = getattr(rates, rate) / factor
        if value < math.inf:
            found[fact] = min(float(f"{value:.4g}"), found.get(fact, math.inf))
    return found
