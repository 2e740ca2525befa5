"""The verb `advise`: decides by which method and settings to train on a GPU. It prints the call that does so, the
reasons, and changes that would change the decision."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from cli import options
from cli.job_options import parse_option, size_options, workload_options, workloads
from cli.options import Amount, OptionValues
from harness.base.console import counted, print_table
from harness.base.json_object import JsonObject
from harness.core import method
from harness.core.job import MEMORIES, Budget, Job, Room, gib
from harness.core.record import records_of
from harness.devices import machine, named_machines
from harness.jobs.command import command_of, default_device, total_duration_text
from harness.plan.advise import (
    SEARCHED_FIELDS,
    Advice,
    Decision,
    Remedy,
    errors_text,
    is_usable,
    method_text,
    settings_text,
)
from harness.plan.run_time import duration_text
from harness.plan.training_place import TrainingPlace, memories_text, named_place, this_place

CHOSEN_DEFAULTS = {  # by option whose value `advise` chooses: the text that --help shows as its default
    "batch_size": "the fastest that fits",
    "micro_batches": "the fastest",
    "seq_len": "the model's, where affordable",
    "dtype": "bf16; fp16 on GPUs without it, fp32 on a CPU",
    "disk": "where it helps",
}
DISK_HELP = "Folder for states that are kept on the disk, the disk's size, such as 1TB, or both: FOLDER:SIZE."
NUMBER_COLUMNS = ("s a step", "tokens/s", "hours", "MFU", "deepest")
PLAN_CALL = "./run.sh plan"  # start of a call that plans and does not train
THIS_MACHINE = "here"  # stands for this machine's name


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
        "decision": decision_text(place, room, decision, context.meta.get(options.MODEL), tokens or 1e9),
        "next": calls_of_decision(place, decision),
        "cost": cost_text(place, decision, folders),
        "why": reason_sentences(place, decision, folders),
        "changes": [remedy._asdict() | {"text": remedy_text(remedy)} for remedy in remedies],
        "memories": memories_text(place.name, place.budget, room, place.device),
        "caution": "" if place.name else machine.caution(place.device, decision.workload),
    }
    if as_json:
        print(json.dumps(decided | {"chosen": decision.chosen}))
        for row in decision.rows:
            print(json.dumps(row))
        return
    print_decision(decided)
    print_decision_rows(decision, tokens)
    if place.name is None:
        others = ", ".join(map(_machine_text, named_machines.names()))
        print(f"this was about this machine; --gpu NAME asks about {others}")


def _question(
    context: click.Context, arguments: OptionValues, results: Path, folders: tuple[Path, ...]
) -> Advice:
    """Return the question that the call asks. Options that the call does not give may be chosen."""
    name, facts = arguments["name"], dict(map(parse_option, arguments["facts"]))
    folder, disk_bytes = _folder_and_bytes_of_disk(arguments["disk"], arguments["disk_bytes"])
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


def _folder_and_bytes_of_disk(text: str | None, disk_bytes: int | None) -> tuple[str | None, int | None]:
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


def _machine_text(name: str) -> str:
    """Return the machine's name as the value of --gpu. If a file of the caller defines the machine, the text names that
    file, too."""
    source = named_machines.source(name)
    return name if source == f"{name} in {named_machines.FILE.name}" else source


def decision_text(
    place: TrainingPlace, room: Room, decision: Decision, model: str | None, tokens: float
) -> str:
    """Return the decision as one sentence, such as: train MODEL on MACHINE by METHOD. `tokens`: number of tokens whose
    training time the sentence tells."""
    load, row = decision.workload, decision.chosen
    size = f"{load.params_text} parameters"
    model_text = f"{size} ({counted(load.num_layers, 'layer')} of {load.hidden_size})"
    if model:
        model_text = f"{model} ({size})"
    sizes = {"device": place.budget.device_bytes, "host": room.host_bytes}
    sizes_text = " and ".join(f"{gib(size)} of {memory}" for memory, size in sizes.items() if size)
    memories = f" with {sizes_text} memory" if sizes_text else ""
    where = f"{place.name or place.about.replace('this machine: ', 'this ')}{memories}"
    if row:
        speed = row["tokens_per_second"]
        disk = sum(row["disk"].values())
        settings = [row["dtype"], f"batch {settings_text(row)}"]
        settings += [f"disk {gib(disk)}"] if disk else []
        how = f"by {row['method']}, {', '.join(text for text in settings if text)}"
        error = f"tested forecasts were up to {abs(row['error_of_forecast']['worst']):.0%} off"
        duration = f"{_count_text(tokens)} tokens in {_duration_text(tokens / speed)}"
        speed_text = f"{_digits_text(speed)} tokens/s (foretold; {error})"
        return f"train {model_text} on {where} {how}: {speed_text}, {duration}"
    fitting = [row for row in decision.rows if is_usable(row) and row["fits"]]
    if fitting:
        methods = counted(len(fitting), "method")
        return f"measure this machine first, whose rates are not known: {methods} can train {model_text}{memories}"
    nearest = next((row for row in decision.rows if row.get("lacks_bytes")), None)
    hint = f": {method_text(nearest)} comes nearest, and {nearest['reason']}" if nearest else ""
    return f"nothing trains {model_text} on {where} in {load.dtype}{hint}"


def calls_of_decision(place: TrainingPlace, decision: Decision) -> dict[str, str]:
    """Return the next calls, by the place where each is to be run: here, or on the machine that was asked about."""
    row = decision.chosen
    if row is None:
        return _calls_without_choice(place, decision)
    call = command_of(_chosen_job(place, decision), is_short=True)
    return _calls_by_place(place, call)


def _calls_by_place(place: TrainingPlace, call: str) -> dict[str, str]:
    """Return a call by the place where it trains; for another machine, also the call that plans it here."""
    if place.name is None:
        return {THIS_MACHINE: call}
    return {f"on {place.name}": call, THIS_MACHINE: _plan_call(place, call)}


def _chosen_job(place: TrainingPlace, decision: Decision) -> Job:
    row = decision.chosen
    assert row
    options = row["asked"] | (
        {"disk": row["options"]["disk"]} if row["disk"] and "disk" in row["options"] else {}
    )
    load = replace(decision.workload, batch_size=row["batch_size"], micro_batches=row["micro_batches"])
    return Job(row["method"], load, options, place.budget, default_device(place.budget))


def cost_text(place: TrainingPlace, decision: Decision, folders: tuple[Path, ...]) -> str:
    """Return, as text, how long the proposed training takes; empty if no training is proposed, or if its speed is not
    known."""
    if decision.chosen is None:
        return ""
    job = _chosen_job(place, decision)
    if place.name is None:
        return total_duration_text(job, folders)
    seconds = job.steps * decision.chosen["step_seconds"]
    return f"{counted(job.steps, 'step')} in about {duration_text(seconds)}; its reference and its probe come on top"


def _plan_call(place: TrainingPlace, call: str) -> str:
    """Return the call that plans this training for another machine. `call`: the call that would run it there."""
    assert place.name
    listed = place.name in named_machines.names()
    parts = [
        PLAN_CALL,
        call.removeprefix("./run.sh "),
        named_machines.options_text(place.name) if listed else "",
    ]
    return " ".join(filter(None, parts))


def _calls_without_choice(place: TrainingPlace, decision: Decision) -> dict[str, str]:
    """Return the next calls if no method was chosen: a call that measures this machine's rates, or calls for a model
    that fits. Empty if no model fits."""
    load = decision.workload
    usable = [row for row in decision.rows if is_usable(row)]
    if any(row["fits"] for row in usable):
        sizes = f"-h {load.hidden_size} -b {load.batch_size} --heads {load.num_heads} --seq {load.seq_len}"
        return {THIS_MACHINE: f"./run.sh doctor --calibrate {sizes} --dtype {load.dtype}"}
    deepest = max(usable, key=lambda row: row["largest_layers"], default=None)
    if not deepest or not deepest["largest_layers"]:
        return {}
    least = replace(
        load.at_depth(deepest["largest_layers"]),
        batch_size=deepest["batch_size"],
        micro_batches=deepest["micro_batches"],
    )
    job = Job(deepest["method"], least, deepest["asked"], place.budget, default_device(place.budget))
    call = command_of(job, is_short=True)
    return _calls_by_place(place, call)


def reason_sentences(place: TrainingPlace, decision: Decision, folders: tuple[Path, ...]) -> list[str]:
    """Return sentences on why the chosen row was chosen, what it needs, and how far its predicted speed may be off.
    Empty if no row was chosen."""
    row = decision.chosen
    if row is None:
        return []
    usual = vars(method.create(row["method"], {}, folders))
    options = ", ".join(
        f"{name} {value}" for name, value in row["options"].items() if usual.get(name) != value
    )
    sizes = ", ".join(f"{gib(sum(row[memory].values()))} of {memory}" for memory in MEMORIES if row[memory])
    others = [other for other in decision.rows if other is not row and "times" in other["reason"]]
    sentences = [f"a step takes {row['step_seconds']:.3g} s, bound by {row['binds']}", f"it needs {sizes}"]
    sentences += [f"chosen with it: {options}"] if options else []
    sentences += [f"next: {method_text(others[0])}, {others[0]['reason']}"] if others else []
    return [*sentences, f"foretold by rates ({place.about}): {row['error_of_forecast']['text']}"]


def remedy_text(remedy: Remedy) -> str:
    if remedy.method is None:
        return f"{remedy.change}: no help"
    times = f" ({remedy.times:.2g} times)" if remedy.times else ""
    speed = _digits_text(remedy.tokens_per_second or 0)
    return f"{remedy.change}: {speed} tokens/s by {remedy.method}, {remedy.settings}{times}"


def print_decision(decided: JsonObject) -> None:
    """Print the decision, the next calls, the reasons, and the changes that would change the decision."""
    print(decided["decision"])
    for where, call in decided["next"].items():
        print(f"next, {where}: {call}")
        if decided["cost"] and not call.startswith(PLAN_CALL):
            print(f"  {decided['cost']}")
    changes = [line["text"] for line in decided["changes"]]
    for title, lines in (("why", decided["why"]), ("what would change it", changes)):
        if lines:
            print(f"{title}:")
            print("\n".join(f"  {line}" for line in lines))
    print(decided["memories"])
    if decided["caution"]:
        print(decided["caution"])


def print_decision_rows(decision: Decision, tokens: float | None) -> None:
    """Print a table with a row for every method at its best settings, the chosen one first. Every other row tells why
    it was not chosen. `tokens`: number of tokens to train; None leaves out the column of hours."""
    numbers = [column for column in NUMBER_COLUMNS if tokens or column != "hours"]
    columns = ["method", "batch", *numbers, "binds", "beside it", "measured here"]
    planned = [row for row in decision.rows if "error" not in row]
    title = f"Every method at its best, {decision.workload.dtype}"
    print_table(
        columns,
        [[cells[column] for column in columns] for cells in map(_decision_cells, planned)],
        title,
        numbers=NUMBER_COLUMNS,
    )
    print(
        "s a step: foretold by rates, not measured. deepest: the largest -l that fits. Energy is not known."
    )
    for row in decision.rows:
        if "error" in row:
            print(f"left out: {row['method']}: {row['error']}")
        elif row["missing"]:
            print(f"does not run here: {row['method']}: {row['missing']}")


def _decision_cells(row: JsonObject) -> dict[str, str]:
    measured = [f"{seconds:.3g} s" for seconds in row["measured_step_seconds"]]
    if off := errors_text(row):
        measured.append(f"off by {off}")
    has_speed = row["fits"] and row["step_seconds"]
    binds = row["binds"] if has_speed else ""
    if not row["fits"]:
        binds = "memory"
    return {
        "method": method_text(row),
        "batch": settings_text(row),
        "beside it": row["reason"],
        "s a step": f"{row['step_seconds']:.3g}" if has_speed else "-",
        "tokens/s": _digits_text(row["tokens_per_second"]) if has_speed else "-",
        "hours": _digits_text(row["hours"]) if has_speed and row["hours"] else "-",
        "MFU": f"{row['mfu']:.0%}" if has_speed and row["mfu"] else "-",
        "deepest": f"-l {row['largest_layers']}",
        "binds": binds or "-",
        "measured here": "; ".join(measured) or "no run",
    }


def _digits_text(number: float) -> str:
    """Return a rate as text with three significant digits, such as 1,800."""
    return f"{float(f'{number:.3g}'):,.10g}"


def _count_text(number: float) -> str:
    """Return a count in words, such as a billion, 10 billion or 300 million; as digits if it is below a million."""
    for word, factor in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"a {word}" if number == factor else f"{number / factor:.4g} {word}"
    return f"{number:,.0f}"


def _duration_text(seconds: float) -> str:
    for word, factor in (("years", 365 * 86400.0), ("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * factor:
            return (
                f"{seconds / factor:.2g} {word}"
                if seconds < 100 * factor
                else f"{seconds / factor:,.0f} {word}"
            )
    return f"{seconds:.2g} seconds"


for parameter in advise.params:
    if parameter.name in CHOSEN_DEFAULTS:
        parameter.show_default = CHOSEN_DEFAULTS[parameter.name]  # type: ignore[attr-defined]
    if parameter.name == "disk":
        parameter.help, parameter.metavar = DISK_HELP, "DIR|SIZE"  # type: ignore[attr-defined]
