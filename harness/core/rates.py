"""The rates that a machine achieves (compute, copies, updates), which give a lower bound of a step's time.

Rates come from a calibration (methods/streaming/placement/calibrate.py) or, for a machine by name, from its facts in
machines.yaml. Plans depend on rates, measurements do not, so rates are no part of a job's identity. harness/plan
computes a step's time from rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from harness.base.json_object import JsonObject
from harness.base.registry import did_you_mean

# Each entry: a fact of machines.yaml, the field of Rates that the fact sets, and the factor from the fact's unit to the
# field's unit.
RATE_FACTS = (
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
# facts for people; they set no rate
OTHER_FACTS = ("gpu", "cpu", "cores", "precision", "pageable_link_gb_per_second")
# allowed ranges of rates and of shares, which keep plans' numbers finite
RATE_RANGE, SHARE_RANGE = (1.0, 1e30), (1e-6, 1e6)
NEEDED_FACTS = ("gpu_tflops", "link_gb_per_second", "host_adam_gparams_per_second")


@dataclass(frozen=True)
class Rates:
    """The rates that a machine achieves, not those of its data sheet. inf: the rate is not known and slows no plan."""

    # rate of the device's compute; FLOPs are counted as in Workload.flops_per_step
    device_flops_per_second: float
    # share of the forward pass in a step's compute time, if every layer is recomputed
    forward_share: float = 0.25
    device_bytes_per_second: float = math.inf  # rate at which Adam reads and writes the device's memory
    inbound_bytes_per_second: float = math.inf  # rate of copies from page-locked host memory to the device
    outbound_bytes_per_second: float = math.inf  # rate of copies from the device to page-locked host memory
    duplex_share: float = 1.0  # total rate of copies in both directions at once / sum of both rates alone
    host_bytes_per_second: float = math.inf  # rate of the host's memory, which Adam and copies share
    # rate of the host's Adam, if its memory's rate were no limit
    host_adam_params_per_second: float = math.inf
    # time of an update that writes a new copy of the state, relative to an update in place
    ahead_cost: float = 1.0
    # time of a streamed layer's update on the device, relative to a resident one's
    streamed_cost: float = 1.0
    disk_read_bytes_per_second: float = math.inf  # rate of reading the files that hold state
    disk_write_bytes_per_second: float = math.inf  # rate of writing the files that hold state
    disk_duplex_share: float = 1.0  # total rate of reading and writing at once / sum of both rates alone
    exchange_bytes_per_second: float = math.inf  # rate of sending to other devices while receiving as much
    # The head computes its loss and gradients together, after the layers' forward pass. If head_flops_per_second is
    # set, device_flops_per_second and forward_share are those of the layers; if it is None, those of all compute.
    head_flops_per_second: float | None = None  # rate of the head's compute
    is_host: bool = False  # True: the device computes on the host's cores, so updates and compute take turns

    def __post_init__(self) -> None:
        for rate_field in fields(self):
            value = getattr(self, rate_field.name)
            if rate_field.name == "is_host" or value is None or (rate_field.default == value == math.inf):
                continue
            least, most = RATE_RANGE if rate_field.name.endswith("per_second") else SHARE_RANGE
            if not least <= value <= most:
                raise ValueError(
                    f"a machine's {rate_field.name}: expected {least:g} to {most:g}, got {value:g}"
                )
        if not (self.forward_share < 1 and max(self.duplex_share, self.disk_duplex_share) <= 1):
            raise ValueError(
                "expected forward_share below 1, duplex_share and disk_duplex_share at most 1, got more"
            )

    @property
    def duplex_bytes_per_second(self) -> float:
        return self.duplex_share * (self.inbound_bytes_per_second + self.outbound_bytes_per_second)

    @property
    def disk_duplex_bytes_per_second(self) -> float:
        return self.disk_duplex_share * (self.disk_read_bytes_per_second + self.disk_write_bytes_per_second)


def rates_from_facts(facts: JsonObject) -> Rates | None:
    """Return the rates that a machine's facts give; None if a fact of NEEDED_FACTS is missing or a fact of RATE_FACTS
    is not a number. Raises ValueError for an impossible rate and for an unknown fact, which may be misspelt. Without
    the fact exchange_gb_per_second, devices exchange at the rate of the link to the host."""
    known_facts = (*dict.fromkeys(fact for fact, *_ in RATE_FACTS), *OTHER_FACTS)
    for name in facts:
        if name not in known_facts:
            raise ValueError(
                f"unknown fact {name!r}: {did_you_mean(name, known_facts)}choose one of {', '.join(known_facts)}"
            )
    try:
        rates: JsonObject = {
            rate: float(facts[fact]) * factor for fact, rate, factor in RATE_FACTS if fact in facts
        }
    except (TypeError, ValueError):
        return None
    if any(name not in facts for name in NEEDED_FACTS):
        return None
    return Rates(**{"exchange_bytes_per_second": rates["outbound_bytes_per_second"], **rates})


def facts_of(rates: Rates) -> dict[str, float]:
    """Return the facts of machines.yaml that set these rates; infinite rates have no fact. The fact link_gb_per_second
    is the rate of the link's slower direction."""
    facts: dict[str, float] = {}
    for fact, rate, factor in RATE_FACTS:
        value = getattr(rates, rate) / factor
        if value < math.inf:
            facts[fact] = min(float(f"{value:.4g}"), facts.get(fact, math.inf))
    return facts
