"""The verb `advise`: which method trains this model on that GPU, how fast it should be, and what would help."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click

from harness.base.console import print_table
from harness.cli import options
from harness.cli.options import Bytes
from harness.core import method
from harness.core.job import Budget, Workload, params_text
from harness.core.record import records_of
from harness.devices import named_machines
from harness.forecast import memories
from harness.forecast.advise import Advice, fits_text, name_text, named_place, off_text, sized, this_place

UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
NUMBERS = ("s a step", "tokens/s", "hours", "MFU", "deepest")


class Amount(click.ParamType):
    """A number with a decimal unit."""

    name = "N"

    def convert(self, value: Any, param: Any, context: Any) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", str(value))
        if not match or not float(match[1]):
            self.fail(f"expected a positive number such as 7B, 350M or 1e9 in digits, got {value!r}", param, context)
        return float(match[1]) * UNITS[match[2]]


@click.command()
@click.option("--gpu", "--machine", "name", metavar="NAME", help="GPU or machine of machines.yaml; default: this one.")
@options.model
@click.option("--params", type=Amount(), help="Parameters in all, such as 7B, in the width of the nearest GPT-3.")
@click.option("-m", "asked_methods", default="all", metavar="METHOD", help="One method, several (a,b), or all.")
@click.option("-l", "num_layers", type=int, default=16, help="Layers.")
@click.option("-h", "hidden_size", type=int, default=2048, help="Hidden size.")
@click.option("-b", "--batch", "batch_size", type=int, default=4, help="Samples per step.")
@options.num_heads
@options.seq_len
@click.option("--vocab", "vocab_size", type=int, default=50304, help="Vocabulary size.")
@options.dtype
@click.option("--device-memory", type=Bytes(), help="Budget of device memory.")
@click.option("--host-memory", type=Bytes(), help="Budget of host memory; of a GPU by name 64GiB if nothing tells it.")
@click.option("--disk-memory", type=Bytes(), help="Budget of disk space.")
@click.option("--tokens", type=Amount(), help="Tokens to train on, such as 10B: adds the hours.")
@options.results
@options.methods
@options.machines
@options.as_json
def advise(
    name: str | None, params: float | None, asked_methods: str, tokens: float | None, device_memory: int | None,
    host_memory: int | None, disk_memory: int | None, results: Path, methods_folder: tuple[Path, ...], as_json: bool,
    **sizes: Any,
) -> None:  # fmt: skip
    """Rank the methods for a model on a GPU: what fits, what a step should take, what binds, what would help. The last
    column tells what was measured and how far predictions were off; all others are arithmetic."""
    workload = Workload(**sizes)
    if params is not None:
        shape = sized(params)
        workload = Workload(**{**sizes, "num_layers": shape.num_layers, "hidden_size": shape.hidden_size,
                               "num_heads": shape.num_heads})  # fmt: skip
    folders = tuple(path.resolve() for path in methods_folder)
    asked = Budget(device_memory, host_memory, disk_memory)
    place = named_place(name, asked) if name else this_place(asked)
    records = tuple(records_of(results)) if results.is_dir() else ()
    names = list(method.loadable(folders)) if asked_methods == "all" else asked_methods.split(",")
    rows = Advice(place, workload, tokens, records, folders).rows(names)
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    if all("error" in row for row in rows):
        raise ValueError("; ".join(f"{row['method']}: {row['error']}" for row in rows))
    title = (
        f"{params_text(workload.num_params)} parameters ({workload.num_layers} layers of {workload.hidden_size}),"
        f" {workload.batch_size} x {workload.seq_len} tokens a step, {workload.dtype}, {place.name or 'this machine'}"
    )
    print(place.about)
    print(memories.told(place.name, asked, place.room_for(workload), place.device))
    columns = [
        "method",
        "fits",
        *(column for column in NUMBERS if tokens or column != "hours"),
        "binds",
        "would help",
        "measured here",
    ]
    told = [row for row in rows if "error" not in row]
    print_table(columns, [[cells[column] for column in columns] for cells in map(_cells, told)], title, numbers=NUMBERS)
    if all(row["step_seconds"] is None for row in told):
        print("no speeds: the rates of this machine are not known; try ./run.sh doctor --calibrate")
    print("s a step: predicted by rates, not measured. deepest: the largest -l that fits. Energy is not known.")
    for row in rows:
        if "error" in row:
            print(f"left out: {row['method']}: {row['error']}")
        elif row["missing"]:
            print(f"does not run here: {row['method']}: {row['missing']}")
        elif row["shortfall"]:
            print(f"does not fit: {row['method']} {row['shortfall']}")
    if name is None:
        print(f"this was about this machine; --gpu NAME asks about {', '.join(map(_named, named_machines.names()))}")


def _named(name: str) -> str:
    """Return the machine's name, with its file if the caller's own file defines it."""
    source = named_machines.source(name)
    return name if source == f"{name} in {named_machines.FILE.name}" else source


def _cells(row: dict[str, Any]) -> dict[str, str]:
    measured = [f"{seconds:.3g} s" for seconds in row["measured_step_seconds"]]
    if off := off_text(row):
        measured.append(f"off by {off}")
    shown = row["fits"] and row["step_seconds"]
    return {
        "method": name_text(row) + ("" if row["is_exact"] else " (trains otherwise)"),
        "fits": fits_text(row),
        "s a step": f"{row['step_seconds']:.3g}" if shown else "-",
        "tokens/s": f"{row['tokens_per_second']:.4g}" if shown else "-",
        "hours": f"{row['hours']:.3g}" if shown and row["hours"] else "-",
        "MFU": f"{row['mfu']:.0%}" if shown and row["mfu"] else "-", "deepest": f"-l {row['largest_layers']}",
        "binds": (row["binds"] or "-") if shown else "memory" if not row["fits"] else "-",
        "would help": row["change"] or "-", "measured here": "; ".join(measured) or "no run",
    }  # fmt: skip
