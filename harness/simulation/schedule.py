"""STRONGHOLD's schedule under the virtual clock, and the bound of its placement, on named machines.

The method's own code trains a scale model of the published shape (hidden 2048, 16 heads, sequence 1024, batch 4); every
op is charged by the machine's rates (virtual_clock.py). Nothing here was measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from harness.core import method
from harness.core.job import Workload
from harness.devices import named_machines
from harness.run.timeline import write
from harness.simulation.virtual_clock import VirtualRun, model_machine, scale_model, virtual_rates, virtual_run
from methods.streaming.placement import parse
from methods.streaming.planner import forecast, rows

NAME = "stronghold"
DTYPES = {"v100-vm": "fp32", "h200": "bf16", "rtx4090": "bf16"}
CLIP_NORMS: dict[str | None, float] = {None: 0.0, "deferred": 1.0, "speculate": 1e9}  # 1e9: all updates ahead are kept
STEPS = 4  # the first starts on an idle machine


class ScheduledStep(NamedTuple):
    """A step on one machine, in seconds."""

    placement: str
    bound: float
    binds: str
    schedule: float
    resident: float  # on a device of unlimited memory
    run: VirtualRun

    @property
    def share(self) -> float:
        """Part of the bound that the schedule reaches."""
        return self.bound / self.schedule


def point(machine: str, num_layers: int, clipping: str | None) -> ScheduledStep | str:
    """Plan and time one size; returns the reason if it does not fit."""
    workload = Workload(num_layers=num_layers, dtype=DTYPES[machine], clip_norm=CLIP_NORMS[clipping])
    there = named_machines.load(machine)
    assert there.budget.rates is not None
    rates = virtual_rates(workload, there.budget.rates)
    # Nothing is allocated here, so nothing is in reserve.
    budget = dataclasses.replace(there.budget, device_bytes=there.device_bytes, rates=rates)
    plan = method.create(NAME, {"clipping": clipping}).plan(workload, budget)
    shortfall = plan.shortfall(budget)
    if shortfall:
        return shortfall
    counts = Counter(parse(plan.options["placement"], workload.num_layers))
    found = rows(workload, rates, clipping)
    bound, resident = forecast(found, counts), forecast(found, {"R": workload.num_layers})
    clock = model_machine(workload, rates, counts, clipping)
    run = virtual_run(method.create(NAME, plan.options), scale_model(workload), clock, STEPS)
    schedule = run.last_step_seconds
    return ScheduledStep(plan.options["placement"], bound.seconds, bound.binds, schedule, resident.seconds, run)


def trace(machine: str, num_layers: int, clipping: str | None, folder: Path) -> None:
    """Write the timeline of one size, if it fits."""
    found = point(machine, num_layers, clipping)
    if isinstance(found, str):
        print(f"{machine}, {num_layers} layers: {found}")
        return
    path = folder / f"virtual_{machine}_{num_layers}_{clipping or 'none'}.json"
    title = f"{NAME} on {machine}, {num_layers} layers, {found.placement}, clipping {clipping or 'off'}"
    about = {"title": title, "source": method.source_hash(NAME), "machine": machine, "num_layers": num_layers}
    write(found.run.timeline(about), path)
    print(path)


def main() -> None:
    arguments = json.load(sys.stdin)
    for name in arguments["machines"]:
        trace(name, arguments["num_layers"], arguments["clipping"], Path(arguments["folder"]))
    print("null")


if __name__ == "__main__":
    main()
