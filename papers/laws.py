"""Laws of the published artifact's methods on its V100 VM, recovered from its logs: which memory limited the size of
each method's models, and how many seconds its steps took.

The device bytes of a method are the sum of three parts: the state that it kept on the device, at 4 bytes for each
parameter and copy (fp32); the inputs of its layers; and a transient part, fitted to its log at 32 layers. The laws hold
only for that artifact at its sizes; this project's methods have plans. The allocator reserved up to twice the bytes
that it gave out, so the device's limit is stated twice, without and with the reserved bytes.

The time of a step is the time of compute, plus the time of those host updates and copies that did not run at the same
time as compute. The machine's rates are in machines.yaml. They come from three published runs: Megatron-LM,
ZeRO-Infinity and L2L at 32 layers.

Sources: the published logs (allocated, max allocated, max reserved in MiB), and DeepSpeed's memory report in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from harness.base.console import counted
from harness.core.job import GIB, Workload
from harness.core.method import largest_depth
from harness.core.rates import Rates
from harness.plan.resources import compute_seconds, device_update_seconds, seconds_of

MIB = 2**20
PUBLISHED = Workload(num_layers=32)
PAGEABLE_BYTES_PER_SECOND = 2.41e9  # the VM's pageable_link_gb_per_second in machines.yaml
# DeepSpeed's report in the log of ZeRO-Offload: 3.4 % of the VM's 90.4 GiB were in use before training began.
HOST_TAKEN_BYTES = int(3.06 * GIB)
# masks and tokens: Megatron-LM's log has 26,195 MiB, but 16 bytes for each parameter are only 26,193 MiB
EXTRA_BYTES = 2 * MIB


class PublishedLimits(NamedTuple):
    """The largest numbers of layers that a law allows. `device`: by device memory, if the allocator reserved only the
    bytes in use; `device_as_reserved`: with the bytes that it did reserve; `host`: by host memory, None if it sets no
    limit."""

    device: int
    device_as_reserved: int
    host: int | None

    @property
    def largest(self) -> int:
        return min(self.device_as_reserved, self.host or self.device_as_reserved)

    @property
    def binding(self) -> str:
        return "host" if self.largest == self.host else "device"


class Law(NamedTuple):
    """The law of a published method's memory."""

    method: str
    published_layers: int  # the most layers of the method's published runs
    static_bytes: Callable[[Workload], int]  # bytes of state on the device
    transient_mib: float  # maximum allocated MiB less static bytes and layer inputs, at 32 layers
    # maximum reserved bytes / maximum allocated bytes, from the log of the largest size
    reserved_per_allocated: float
    host_bytes_per_param: float | None
    host_source: str = ""
    # why this project's method of the same name needs other bytes than the published one
    difference: str = ""

    def device_bytes(self, workload: Workload) -> int:
        inputs = workload.num_layers * workload.boundary_bytes
        return self.static_bytes(workload) + inputs + int(self.transient_mib * MIB)

    def host_bytes(self, workload: Workload) -> int:
        return int((self.host_bytes_per_param or 0) * workload.num_params)

    def limits(self, device_bytes: int, host_bytes: int) -> PublishedLimits:
        def deepest(need: Callable[[Workload], float], have: float) -> int:
            return largest_depth(lambda depth: need(PUBLISHED.at_depth(depth)) <= have)

        return PublishedLimits(
            deepest(self.device_bytes, device_bytes),
            deepest(self.device_bytes, device_bytes / self.reserved_per_allocated),
            deepest(self.host_bytes, host_bytes) if self.host_bytes_per_param else None,
        )

    def verdict(self, limits: PublishedLimits) -> str:
        """Return, as text, which memory limited the published runs, and whether their largest size was the limit."""
        said = f"bound by the {limits.binding}"
        if limits.binding == "device" and limits.device > 1.1 * limits.device_as_reserved:
            said += (
                f"'s allocator, which reserved {self.reserved_per_allocated:.2f} bytes for each in use (fragments, flat"
                f" copies at the start): not the limit, {counted(limits.device, 'layer')} without them"
            )
        elif limits.largest > self.published_layers:
            said += f": not the limit, {limits.largest} layers should fit; sizes were tried in coarse steps"
        return said


def window_bytes(workload: Workload, window: int) -> int:
    """Return the bytes that stayed allocated in the published STRONGHOLD.

    The sum has three parts: 16 bytes for each parameter of both ends and of one window of layers (weight, gradient, two
    moments); 8 bytes for each parameter of a second window, into which layers are loaded (weight, gradient); and one
    layer's weights.
    """
    layer, slots = workload.layer_params, 4 * window + 2 * min(window, workload.num_layers - window)
    return 16 * workload.end_params + 4 * layer * (slots + 1) + EXTRA_BYTES


LAWS = (
    Law(
        "Megatron-LM",
        32,
        lambda w: 16 * w.num_params + EXTRA_BYTES,
        2556.1,
        29_928.0 / 29_775.2,
        None,
        difference=(
            "20 bytes a parameter instead of 16: without Apex, torch's AdamW makes an fp32 copy of all while it steps"
        ),
    ),
    Law(
        "L2L",
        78,
        lambda w: 4 * w.num_params,
        3213.3,
        31_392.0 / 21_094.3,
        12.0,
        "weights and moments; a copy of the gradients stayed on the device",
    ),
    Law(
        "ZeRO-Offload",
        48,
        lambda w: 4 * w.num_params,
        2787.6,
        29_776.0 / 13_945.5,
        16.65,
        "logged: 16.6 to 16.7",
    ),
    Law(
        "ZeRO-Infinity",
        48,
        lambda w: 8 * w.end_params,
        3145.7,
        8_252.0 / 5_485.4,
        35.0,
        "30 to 35 of DeepSpeed 0.19.8 with page-locked powers of two; 37 would just fill this host",
    ),
    Law(
        "STRONGHOLD",
        100,
        lambda w: window_bytes(w, 4),
        2537.3,
        14_302.0 / 12_178.0,
        16.0,
        "weights, gradients and moments; window 4",
    ),
)


def published_step_seconds(method: str, workload: Workload, rates: Rates, window: int = 4) -> float:
    """Return the seconds of a published method's step. Only STRONGHOLD did other work at the same time as compute: its
    host updates ran during the next forward pass. STRONGHOLD updated the layers of one window, and the ends, on the
    device."""
    params, layer, end = workload.num_params, workload.layer_params, workload.end_params
    pageable = replace(rates, inbound_bytes_per_second=PAGEABLE_BYTES_PER_SECOND)
    hidden, backward = compute_seconds(workload, rates)
    on_host = partial(seconds_of, "host cores", rates=rates)
    exposed = {
        "Megatron-LM": device_update_seconds(params, workload, rates),
        "L2L": on_host(params) + seconds_of("link inbound", 5 * 4 * workload.num_layers * layer, pageable),
        "ZeRO-Offload": on_host(params) + seconds_of("link inbound", 2 * 4 * params, rates),
        "ZeRO-Infinity": on_host(params)
        + seconds_of("link inbound", 3 * 4 * workload.num_layers * layer, rates),
        "STRONGHOLD": max(0.0, on_host((workload.num_layers - window) * layer) - hidden)
        + device_update_seconds(window * layer + end, workload, rates),
    }
    return hidden + backward + exposed[method]


def is_published(workload: Workload) -> bool:
    """True if the workload's sizes other than its number of layers are the published ones, for which the laws hold."""
    names = ("hidden_size", "num_heads", "seq_len", "batch_size", "vocab_size", "dtype")
    return all(getattr(workload, name) == getattr(PUBLISHED, name) for name in names)
