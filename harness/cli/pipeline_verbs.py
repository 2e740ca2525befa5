"""The verbs of pipelines on machines that come and go: ./run.sh varuna configure, launch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from harness.cli import options
from harness.cli.options import FOLDER, Bytes
from harness.core.console import print_table
from harness.core.job import gib
from methods.pipeline.launch.run import launch

DOES_NOT_FIT = 4


@click.group(invoke_without_command=True)
@click.pass_context
def varuna(context: click.Context) -> None:
    """Pipelines on machines that come and go: choose stages by a profile, launch a script."""
    if context.invoked_subcommand is None:
        raise ValueError("expected what to do; try ./run.sh varuna configure --profile FOLDER --gpus N --batch B")


@varuna.command()
@click.option("--profile", "folder", type=FOLDER, required=True, help="What Profiler wrote.")
@click.option("--gpus", "num_gpus", type=int, required=True, help="Devices of all machines.")
@click.option("--gpus-per-vm", type=int, default=1, help="Devices of one machine.")
@click.option("--batch", "batch_size", type=int, required=True, help="Samples per step, of all replicas.")
@click.option("--memory", "capacity", type=Bytes(), help="Of a device; default: that of the profiled ones.")
@options.as_json
def configure(
    folder: Path, num_gpus: int, gpus_per_vm: int, batch_size: int, capacity: int | None, as_json: bool
) -> None:
    """Choose stages and micro-batches by a profile, and show all that there are. Exit code 4: nothing fits."""
    from methods.pipeline.auto_config import AutoConfig

    config = AutoConfig(num_gpus, gpus_per_vm, batch_size, folder, capacity)
    rows = config.table()
    if as_json:
        for row in rows:
            print(json.dumps(vars(row)))
    else:
        names = ("stages", "replicas", "micro-batch", "step, s", "samples/s", "memory of a device", "")
        cells = [
            (row.num_stages, row.num_replicas, row.chunk_size, f"{row.step_seconds:.4g}",
             f"{batch_size / row.step_seconds:.4g}", gib(row.device_bytes), "" if row.fits else "does not fit")
            for row in rows
        ]  # fmt: skip
        print_table(names, cells, numbers=names[:-1])
    try:
        found = config.get_min()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(DOES_NOT_FIT)
    if not as_json:
        print(
            f"chosen: {found.num_stages} stages, micro-batches of {found.chunk_size}, {found.step_seconds:.4g} s a step"
        )


varuna.add_command(launch)
VERBS = (varuna,)
