"""Writes the table results/virtual.md: STRONGHOLD's step time under the virtual clock, beside the lower bound of this
time.

.venv/bin/python -m bench.virtual [--machine NAME ...] [--layers 16,32,48,78,100] [--out FILE.md]
"""

from __future__ import annotations

import itertools
from pathlib import Path

import click
import torch

from harness.base.checkout import ROOT
from methods.streaming.placement.placement import HOMES
from methods.streaming.placement.virtual_schedule import (
    CLIP_NORMS,
    DTYPES,
    METHOD_NAME,
    ScheduledStep,
    schedule_step,
)

# Points with one sample a step: machine, number of layers, tokens of the sample.
SAMPLES = [("h200", 100, 16384), ("h200", 48, 131072), ("rtx4090", 48, 65536), ("rtx4090", 48, 98304)]
HEAD = "placement | bound by | bound | schedule | of its bound | of all resident |"


def line(title: str, found: ScheduledStep | str) -> str:
    if isinstance(found, str):
        return f"{title} | {found} | | | |"
    return (
        f"{title} {found.placement} | {found.binds} | {1000 * found.bound_seconds:.0f} |"
        f" {1000 * found.schedule_seconds:.0f} |"
        f" {100 * found.bound_share:.0f} % | {100 * found.resident_seconds / found.schedule_seconds:.0f} % |"
    )


@click.command()
@click.option("--machine", "machines", multiple=True, type=click.Choice(list(DTYPES)), default=list(DTYPES))
@click.option("--layers", default="16,32,48,78,100")
@click.option("--clipping", "clippings", multiple=True, type=click.Choice(["none", "deferred", "speculate"]))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=ROOT / "results" / "virtual.md"
)
def main(machines: tuple[str, ...], layers: str, clippings: tuple[str, ...], out: Path) -> None:
    torch.set_num_threads(1)  # more threads would not speed up the scale model's small matrices
    wanted = [clipping for clipping in CLIP_NORMS if not clippings or (clipping or "none") in clippings]
    lines = [
        "# The schedule under a virtual clock (clock: virtual; nothing here was measured)",
        "",
        f"By `python -m bench.virtual`. A step of {METHOD_NAME} at the published shape, in milliseconds: the bound"
        " of its",
        "placement by the planner's rows, what the schedule takes under the clock, and its speed beside that of a",
        "device that could hold everything. Machines and rates are those of machines.yaml. Layers: R resident,",
        "P parked, W windowed, S streamed, ~S and ~R streamed and resident among the others. Updates that are made",
        "ahead (speculate) are all committed. The clock gives each direction of the link its full rate, also when both",
        "are busy, and charges the host's updates with all that passes through the host's memory beside them; launches",
        "take no time.",
        "",
        f"| machine | layers | clipping | {HEAD}",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in machines:
        for num_layers in map(int, layers.split(",")):
            for clipping in wanted:
                title = f"| {name} {DTYPES[name]} | {num_layers} | {clipping or 'none'} |"
                lines.append(line(title, schedule_step(name, num_layers, clipping)))
                print(lines[-1], flush=True)
    lines += [
        "",
        "One sample of more tokens a step, deferred. activations: where the layers' inputs wait for the backward pass.",
        "The clock charges attention's backward pass with 5/4 of the FLOPs that the bound counts for it.",
        "",
        f"| machine | layers | tokens | activations | {HEAD}",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, num_layers, tokens), home in itertools.product(SAMPLES, HOMES):
        if name in machines:
            title = f"| {name} {DTYPES[name]} | {num_layers} | {tokens} | {home} |"
            lines.append(line(title, schedule_step(name, num_layers, "deferred", tokens, home)))
            print(lines[-1], flush=True)
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
