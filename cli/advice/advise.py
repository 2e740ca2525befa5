"""The verb `advise`: decides by which method and settings to train on a GPU. It prints the call that does so, the
reasons, and changes that would change the decision."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cli import options
from cli.advice.advice_text import (
    calls_of_decision,
    cost,
    reasons,
    remedy_text,
    sentence,
    show_decision,
    show_rows,
)
from cli.job_options import parse_option, size_options, workload_options, workloads
from cli.options import Amount
from harness.core import method
from harness.core.job import Budget
from harness.core.record import records_of
from harness.devices import machine, named_machines
from harness.plan.advise import SEARCHED_FIELDS, Advice
from harness.plan.training_place import memories_text, named_place, this_place

CHOSEN = {  # by option whose value `advise` chooses: the text that --help shows as its default
    "batch_size": "the fastest that fits",
    "micro_batches": "the fastest",
    "seq_len": "the model's, where affordable",
    "dtype": "bf16; fp16 on GPUs without it, fp32 on a CPU",
    "disk": "where it helps",
}
DISK = "Folder for states that are kept on the disk, the disk's size, such as 1TB, or both: FOLDER:SIZE."


@click.command()
@click.option(
    "--gpu",
    "--machine",
    "name",
    type=options.MachineName(),
    help="GPU or machine of machines.yaml; default: this machine.",
)
@click.option("-m", "methods", default="all", metavar="METHOD", help="One method, several (a,b), or all.")
@workload_options
@size_options
@click.option(
    "--fact",
    "facts",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set a fact of the GPU that --gpu names, such as gpu_tflops=80; it replaces the value in machines.yaml.",
)
@click.option(
    "--tokens", type=Amount(), help="Tokens to train on, such as 10B; adds the hours of the whole training."
)
@options.results
@options.methods
@options.machines
@options.as_json
@click.pass_context
def advise(
    context: click.Context,
    results: Path,
    methods_folder: tuple[Path, ...],
    as_json: bool,
    **arguments: Any,
) -> None:
    """Decide how to train a model on a GPU: method, batch, micro-batches, sequence length, disk. Print the call that
    does it.

    Options that are given keep their values; `advise` chooses the others. If a machine's host memory is not known, it
    is taken to be 64 GiB. All numbers are computed, except those that were measured on this machine.
    """
    folders, methods = tuple(path.resolve() for path in methods_folder), arguments["methods"]
    question = _question(context, arguments, results, folders)
    decision = question.decision(list(method.loadable(folders)) if methods == "all" else methods.split(","))
    if all("error" in row for row in decision.rows):
        raise ValueError("; ".join(f"{row['method']}: {row['error']}" for row in decision.rows))
    place, tokens = question.place, question.tokens
    room = place.room_for(decision.workload)
    remedies = [] if decision.is_unknown else list(question.remedies(decision))
    decided = {
        "decision": sentence(place, room, decision, context.meta.get(options.MODEL), tokens or 1e9),
        "next": calls_of_decision(place, decision),
        "cost": cost(place, decision, folders),
        "why": reasons(place, decision, folders),
        "changes": [remedy._asdict() | {"text": remedy_text(remedy)} for remedy in remedies],
        "memories": memories_text(place.name, place.budget, room, place.device),
        "caution": "" if place.name else machine.caution(place.device, decision.workload),
    }
    if as_json:
        print(json.dumps(decided | {"chosen": decision.chosen}))
        for row in decision.rows:
            print(json.dumps(row))
        return
    show_decision(decided)
    show_rows(decision, tokens)
    if place.name is None:
        others = ", ".join(map(_named, named_machines.names()))
        print(f"this was about this machine; --gpu NAME asks about {others}")


def _question(
    context: click.Context, arguments: dict[str, Any], results: Path, folders: tuple[Path, ...]
) -> Advice:
    """Return the question that the call asks. Options that the call does not give may be chosen."""
    name, facts = arguments["name"], dict(map(parse_option, arguments["facts"]))
    folder, disk_bytes = _disk(arguments["disk"], arguments["disk_bytes"])
    budget = Budget(arguments["device_bytes"], arguments["host_bytes"], disk_bytes)
    if facts and not name:
        raise ValueError(
            "--fact: expected --gpu NAME, the GPU that has these facts, got none; try --gpu NAME"
        )
    place = named_place(name, budget, facts) if name else this_place(budget)
    stated = {
        parameter.name
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    }
    dtype = arguments["dtype"] if "dtype" in stated else place.dtype
    sizes, windows = workloads({**arguments, "dtype": dtype}), arguments["window_size"] or []
    if len(sizes) > 1 or len(windows) > 1:
        raise ValueError("expected one model and size, got several; try ./run.sh plan, which takes lists")
    method_options = {"window_size": windows[0]} if windows else {}
    method_options |= {"disk": folder} if folder else {}
    records = tuple(records_of(results)) if results.is_dir() else ()
    searched = SEARCHED_FIELDS - stated
    return Advice(place, sizes[0], arguments["tokens"], records, folders, searched, method_options)


def _disk(text: str | None, disk_bytes: int | None) -> tuple[str | None, int | None]:
    """Return the folder and the bytes of the disk that `text`, the value of --disk, and `disk_bytes`, that of
    --disk-memory, name; None for what neither names. Raises ValueError for any other text."""
    if text is None:
        return None, disk_bytes
    folder, _, size = text.rpartition(":")
    try:
        num_bytes = named_machines.size_bytes(size)
    except ValueError:
        folder, num_bytes = text, None
    if num_bytes and disk_bytes and num_bytes != disk_bytes:
        raise ValueError(
            f"--disk: expected one size, got {size} and another by --disk-memory; leave one of them out"
        )
    is_folder = Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)
    if not is_folder and (folder or num_bytes is None):
        raise ValueError(
            f"--disk: expected a folder to write to, a size such as 1TB, or FOLDER:SIZE, got {text!r:.200}"
        )
    return folder or None, num_bytes or disk_bytes


def _named(name: str) -> str:
    """Return the machine's name as the value of --gpu. If a file of the caller defines the machine, the text names that
    file, too."""
    source = named_machines.source(name)
    return name if source == f"{name} in {named_machines.FILE.name}" else source


for parameter in advise.params:
    if parameter.name in CHOSEN:
        parameter.show_default = CHOSEN[parameter.name]  # type: ignore[attr-defined]
    if parameter.name == "disk":
        parameter.help, parameter.metavar = DISK, "DIR|SIZE"  # type: ignore[attr-defined]
