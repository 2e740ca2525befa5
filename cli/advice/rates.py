"""The verb `rates`: prints this machine as an entry of machines.yaml with measured rates. With this entry, other
machines can plan for this machine."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from cli import options
from cli.doctor import measure
from harness.core.job import Budget, Workload
from harness.core.rates import facts_of
from harness.devices import cuda_budget, machine
from harness.devices.named_machines import plain
from harness.plan.training_place import this_place

MIB = 2**20


@click.command()
@click.option("--name", metavar="NAME", help="Name of the entry; default: the GPU's name.")
@click.option("-h", "hidden_size", type=int, default=2048, help="Hidden size of the layer that is timed.")
@click.option("-b", "batch_size", type=int, default=4, help="Samples per step.")
@options.num_heads
@options.seq_len
@options.results
def rates(name: str | None, results: Path, **sizes: Any) -> None:
    """Print this machine's GPU as an entry of machines.yaml, for --machines FILE on another machine. Rates that are not
    known yet are measured, in under a minute."""
    place = this_place(Budget())
    if place.device != "cuda":
        raise ValueError(
            "expected a GPU, got none; for this CPU try ./run.sh doctor --calibrate, then ./run.sh advise"
        )
    workload = Workload(**sizes, dtype=place.dtype)
    if machine.rates(place.device, workload) is None:
        with contextlib.redirect_stdout(sys.stderr):  # only the entry goes to standard output
            measure(workload, place.device, results)
    measured = machine.rates(place.device, workload)
    assert measured
    gpu = machine.gpu()
    entry = {
        "about": f"Measured there by ./run.sh rates: {place.about.removeprefix('this machine: ')}",
        "device_memory": f"{(gpu['gpu_bytes'] - cuda_budget.context_bytes()) // MIB}MiB",
        "host_memory": f"{machine.host_bytes() // MIB}MiB",
        "facts": {"precision": workload.dtype, **facts_of(measured)},
    }
    # JSON is valid YAML, and quotes all text that needs quotes in YAML
    print(f"{name or plain(gpu['gpu'])}: {json.dumps(entry)}")
