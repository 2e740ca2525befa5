"""The schedule under a virtual clock, beside its bound: what a step takes on machines by name, and what hides.

    .venv/bin/python -m bench.virtual [--machine NAME ...] [--layers 16,32,48,78,100] [--out FILE.md]
    .venv/bin/python -m bench.virtual --traces DIR [--clipping deferred] ...    timelines instead of the table

The published shape (hidden 2048, 16 heads, sequence 1024, batch 4). The method's own code trains a scale model; every
op is charged by the machine's rates (tests/overlap.py). Nothing here was measured: clock: virtual.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import click

from harness import method, profiles
from harness.method import ROOT
from harness.rates import Rates
from harness.spec import Plan, Workload
from harness.timeline import write
from methods._placement import parse
from methods._planner import forecast, rows
from tests.overlap import VirtualRun, model_machine, scale_model, virtual_rates, virtual_run

NAME = "stronghold"
DTYPES = {"v100-vm": "fp32", "h200": "bf16", "rtx4090": "bf16"}
CLIP_NORMS: dict[str | None, float] = {None: 0.0, "deferred": 1.0, "speculate": 1e9}
STEPS = 4  # the first finds an idle machine


class Point(NamedTuple):
    """A step on one machine, seconds."""

    placement: str
    bound: float
    binds: str
    schedule: float
    resident: float  # all on a device of unlimited memory
    run: VirtualRun

    @property
    def share(self) -> float:
        """Of the bound."""
        return self.bound / self.schedule


def point(machine: str, num_layers: int, clipping: str | None) -> Point | str:
    """Plan and time it; a line that says why not where it does not fit."""
    workload = Workload(num_layers=num_layers, dtype=DTYPES[machine], clip_norm=CLIP_NORMS[clipping])
    budget = profiles.load(machine).budget
    assert budget.rates is not None
    rates = virtual_rates(workload, budget.rates)
    budget = dataclasses.replace(budget, rates=rates)
    plan = method.create(NAME, {"clipping": clipping}).plan(workload, budget)
    return plan.shortfall(budget) or timed(workload, rates, plan, clipping)


def timed(workload: Workload, rates: Rates, plan: Plan, clipping: str | None) -> Point:
    """Nothing is clipped where updates are made ahead: what was made ahead is committed."""
    counts = Counter(parse(plan.options["placement"], workload.num_layers))
    found = rows(workload, rates, clipping)
    bound, resident = forecast(found, counts), forecast(found, {"R": workload.num_layers})
    machine = model_machine(workload, rates, counts, clipping)
    model = dataclasses.replace(scale_model(workload), clip_norm=CLIP_NORMS[clipping])
    run = virtual_run(method.create(NAME, plan.options), model, machine, STEPS)
    return Point(plan.options["placement"], bound.seconds, bound.binds, run.last_step_seconds, resident.seconds, run)


def line(machine: str, num_layers: int, clipping: str | None) -> str:
    found = point(machine, num_layers, clipping)
    title = f"| {machine} {DTYPES[machine]} | {num_layers} | {clipping or 'none'} |"
    if isinstance(found, str):
        return f"{title} | {found} | | | |"
    return (
        f"{title} {found.placement} | {found.binds} | {1000 * found.bound:.0f} | {1000 * found.schedule:.0f} |"
        f" {100 * found.share:.0f} % | {100 * found.resident / found.schedule:.0f} % |"
    )


def trace(machine: str, num_layers: int, clipping: str | None, folder: Path) -> None:
    """Write a point's timeline, where it fits."""
    found = point(machine, num_layers, clipping)
    if isinstance(found, str):
        print(f"{machine}, {num_layers} layers: {found}")
        return
    path = folder / f"virtual_{machine}_{num_layers}_{clipping or 'none'}.json"
    title = f"{NAME} on {machine}, {num_layers} layers, {found.placement}, clipping {clipping or 'off'}"
    about = {"title": title, "source": method.source_hash(NAME), "machine": machine, "num_layers": num_layers}
    write(found.run.timeline(about), path)
    print(path)


@click.command()
@click.option("--machine", "machines", multiple=True, type=click.Choice(list(DTYPES)), default=list(DTYPES))
@click.option("--layers", default="16,32,48,78,100")
@click.option("--clipping", "clippings", multiple=True, type=click.Choice(["none", "deferred", "speculate"]))
@click.option("--traces", type=click.Path(path_type=Path, file_okay=False), help="Write a timeline of each point here.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=ROOT / "results" / "virtual.md")
def main(machines: tuple[str, ...], layers: str, clippings: tuple[str, ...], traces: Path | None, out: Path) -> None:
    wanted = [clipping for clipping in CLIP_NORMS if not clippings or (clipping or "none") in clippings]
    if traces:
        for name, num_layers, clipping in itertools.product(machines, map(int, layers.split(",")), wanted):
            trace(name, num_layers, clipping, traces)
        return
    lines = [
        "# The schedule under a virtual clock (clock: virtual; nothing here was measured)",
        "",
        f"By `python -m bench.virtual`. A step of {NAME} at the published shape, in milliseconds: the bound of its",
        "placement by the planner's rows, what the schedule takes under the clock, and its speed beside that of a",
        "device that could hold everything. Machines and rates are those of machines.yaml. Layers: R resident,",
        "P parked, W windowed, S streamed, ~S streamed among the others. Updates that are made ahead (speculate) are",
        "all committed. The clock gives each direction of the link its full rate, also when both are busy, and charges",
        "the host's updates with all that passes through the host's memory beside them; launches take no time.",
        "",
        "| machine | layers | clipping | placement | bound by | bound | schedule | of its bound | of all resident |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in machines:
        for num_layers in map(int, layers.split(",")):
            for clipping in wanted:
                lines.append(line(name, num_layers, clipping))
                print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
