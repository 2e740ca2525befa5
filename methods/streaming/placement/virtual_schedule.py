"""Times STRONGHOLD's schedule on named machines under the virtual clock, and computes the lower bound of its
placement's step time.

The method's own code trains a scale model of the published shape (hidden 2048, 16 heads, sequence 1024, batch 4); the
virtual clock charges every op by the machine's rates (virtual_clock.py). Nothing here was measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from harness.base.console import counted
from harness.core import method
from harness.core.job import Workload
from harness.core.rates import Rates
from harness.devices import named_machines
from harness.plan.resources import device_update_seconds, seconds_of
from harness.simulation.virtual_clock import VirtualMachine, VirtualRun, virtual_run
from methods.streaming.placement.placement import parse
from methods.streaming.placement.planner import Counts, StepCosts, costs_of

METHOD_NAME = "stronghold"
DTYPES = {"v100-vm": "fp32", "h200": "bf16", "rtx4090": "bf16"}
CLIP_NORMS: dict[str | None, float] = {None: 0.0, "deferred": 1.0, "speculate": 1e9}  # 1e9: never clipped
MODEL_HIDDEN_SIZE = 32
NUM_STEPS = 4  # more than one, because the first step starts on an idle machine


class ScheduledStep(NamedTuple):
    """The times of a step on one machine, in seconds."""

    placement: str
    bound_seconds: float
    binds: str
    schedule_seconds: float
    resident_seconds: float  # seconds of a step with all layers resident, in unlimited memory
    run: VirtualRun

    @property
    def bound_share(self) -> float:
        """Return the ratio: lower bound of the step time / time that the schedule takes."""
        return self.bound_seconds / self.schedule_seconds


def schedule_step(
    machine: str,
    num_layers: int,
    clipping: str | None,
    sample_tokens: int | None = None,
    activations: str | None = None,
) -> ScheduledStep | str:
    """Plan and time one size; if the size does not fit, return the reason as text. `sample_tokens`: number of tokens of
    a step's only sample, in place of the published batch (None), for which boundaries in the scale model would have too
    few bytes. `activations`: STRONGHOLD's option."""
    workload = Workload(num_layers=num_layers, dtype=DTYPES[machine], clip_norm=CLIP_NORMS[clipping])
    workload = (
        dataclasses.replace(workload, batch_size=1, seq_len=sample_tokens) if sample_tokens else workload
    )
    named_machine = named_machines.load(machine)
    assert named_machine.room.rates is not None
    rates = virtual_rates(workload, named_machine.room.rates)
    # The plan may use all of the device's memory, because nothing is allocated on it here.
    room = dataclasses.replace(named_machine.room, device_bytes=named_machine.device_bytes, rates=rates)
    plan = method.create(METHOD_NAME, {"clipping": clipping, "activations": activations}).plan(workload, room)
    shortfall = plan.shortfall(room)
    if shortfall:
        return shortfall
    counts = Counter(parse(plan.options["placement"], workload.num_layers))
    costs = costs_of(plan, workload, rates)
    bound_forecast = costs.forecast(counts)
    resident_forecast = StepCosts(workload, rates, clipping).forecast({"R": workload.num_layers})
    virtual_machine = model_machine(costs, counts)
    run = virtual_run(
        method.create(METHOD_NAME, plan.options), scale_model(workload), virtual_machine, NUM_STEPS
    )
    schedule_seconds = run.last_step_seconds
    return ScheduledStep(
        plan.options["placement"],
        bound_forecast.seconds,
        bound_forecast.binds,
        schedule_seconds,
        resident_forecast.seconds,
        run,
    )


def scale_model(workload: Workload) -> Workload:
    """Return a workload small enough to train on a CPU. It is as deep as the given one, and has the same ratios of
    FLOPs and of bytes between layers and ends."""
    scale = MODEL_HIDDEN_SIZE / workload.hidden_size
    scaled_sizes: Any = {
        "seq_len": round(workload.seq_len * scale),
        "vocab_size": round(workload.vocab_size * scale),
    }
    return dataclasses.replace(
        workload, hidden_size=MODEL_HIDDEN_SIZE, num_heads=2, batch_size=1, **scaled_sizes
    )


def model_machine(costs: StepCosts, counts: Counts) -> VirtualMachine:
    """Return the machine on which the scale model takes as long as the workload does with these rates. All time of the
    host memory's traffic, copies included, counts as time of the host's updates. `counts`: layers of each kind."""
    workload, rates = costs.workload, costs.rates
    model = scale_model(workload)
    param_scale = model.layer_params / workload.layer_params
    params_on_host = workload.layer_params * sum(count for kind, count in counts.items() if kind in "PWD")
    params_on_host += workload.end_params if costs.ends == "host" else 0
    memory_seconds = [row for row in costs.rows() if row.resource == "host memory"][-1].total_seconds(counts)
    host_seconds = max(
        seconds_of("host cores", 1, rates), memory_seconds / params_on_host if params_on_host else 0.0
    )
    return VirtualMachine(
        device_flops_per_second=executed_flops(model)
        / workload.flops_per_step
        * rates.device_flops_per_second,
        link_bytes_per_second=min(rates.inbound_bytes_per_second, rates.outbound_bytes_per_second)
        * param_scale,
        device_update_params_per_second=param_scale / device_update_seconds(1, workload, rates),
        host_update_params_per_second=param_scale / host_seconds,
    )


def executed_flops(workload: Workload) -> float:
    """Return the FLOPs of a step. A layer's recompute stops before the last matrix product, because no gradient needs
    its result."""
    tokens = workload.batch_size * workload.seq_len
    return workload.flops_per_step - workload.num_layers * 8 * tokens * workload.hidden_size**2


def virtual_rates(workload: Workload, rates: Rates) -> Rates:
    """Return the rates with another forward_share: the share of the forward pass in all FLOPs, by which the virtual
    clock divides compute."""
    forward_flops = workload.all_layers_flops + workload.head_flops_per_step / 3
    return dataclasses.replace(rates, forward_share=forward_flops / executed_flops(workload))


def write_trace(machine: str, num_layers: int, clipping: str | None, folder: Path) -> None:
    """Write the timeline of one size into the folder. If the size does not fit, print the reason."""
    step = schedule_step(machine, num_layers, clipping)
    if isinstance(step, str):
        print(f"{machine}, {counted(num_layers, 'layer')}: {step}")
        return
    path = folder / f"virtual_{machine}_{num_layers}_{clipping or 'none'}.json"
    title = f"{METHOD_NAME} on {machine}, {counted(num_layers, 'layer')}, {step.placement},"
    title += f" clipping {clipping or 'off'}"
    trace_facts = {
        "title": title,
        "source": method.source_hash(METHOD_NAME),
        "machine": machine,
        "num_layers": num_layers,
    }
    step.run.write(trace_facts, path)
    print(path)


def main() -> None:
    arguments = json.load(sys.stdin)
    for name in arguments["machines"]:
        write_trace(name, arguments["num_layers"], arguments["clipping"], Path(arguments["folder"]))
    print("null")


if __name__ == "__main__":
    main()
