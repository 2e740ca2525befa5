"""Writes the text that `advise` prints: the decision in one sentence, the next calls, the reasons, the changes that
would lead to another decision, and a row for every method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.base.console import counted, print_table
from harness.core import method
from harness.core.job import MEMORIES, Job, Room, gib, params_text
from harness.devices import named_machines
from harness.jobs.command import command_of, default_device, total_duration_text
from harness.plan.advise import Decision, Remedy, errors_text, is_usable, method_text, settings_text
from harness.plan.run_time import duration_text
from harness.plan.training_place import TrainingPlace

NUMBERS = ("s a step", "tokens/s", "hours", "MFU", "deepest")
PLAN = "./run.sh plan"  # start of a call that plans and does not train
HERE = "here"  # stands for this machine's name


def sentence(place: TrainingPlace, room: Room, decision: Decision, model: str | None, tokens: float) -> str:
    """Return the decision as one sentence, such as: train MODEL on MACHINE by METHOD. `tokens`: number of tokens whose
    training time the sentence tells."""
    load, row = decision.workload, decision.chosen
    size = f"{params_text(load.num_params)} parameters"
    what = (
        f"{model} ({size})"
        if model
        else f"{size} ({counted(load.num_layers, 'layer')} of {load.hidden_size})"
    )
    sizes = {"device": place.budget.device_bytes, "host": room.host_bytes}
    sizes_text = " and ".join(f"{gib(size)} of {memory}" for memory, size in sizes.items() if size)
    memories = f" with {sizes_text} memory" if sizes_text else ""
    where = f"{place.name or place.about.replace('this machine: ', 'this ')}{memories}"
    if row:
        speed = row["tokens_per_second"]
        disk = sum(row["disk"].values())
        parts = [
            name
            for name in (row["dtype"], f"batch {settings_text(row)}", disk and f"disk {gib(disk)}")
            if name
        ]
        largest_error = abs(row["error_of_forecast"]["worst"])
        foretold = (
            f"{_digits(speed)} tokens/s (foretold; tested forecasts were up to {largest_error:.0%} off)"
        )
        time = f"{_count(tokens)} tokens in {_duration(tokens / speed)}"
        return f"train {what} on {where} by {row['method']}, {', '.join(parts)}: {foretold}, {time}"
    fitting = [row for row in decision.rows if is_usable(row) and row["fits"]]
    if fitting:
        methods = counted(len(fitting), "method")
        return f"measure this machine first, whose rates are not known: {methods} can train {what}{memories}"
    nearest = next((row for row in decision.rows if row.get("lacks_bytes")), None)
    hint = f": {method_text(nearest)} comes nearest, and {nearest['reason']}" if nearest else ""
    return f"nothing trains {what} on {where} in {load.dtype}{hint}"


def calls_of_decision(place: TrainingPlace, decision: Decision) -> dict[str, str]:
    """Return the next calls, by the place where each is to be run: here, or on the machine that was asked about."""
    row = decision.chosen
    if row is None:
        return _calls_without(place, decision)
    call = command_of(_chosen_job(place, decision), is_short=True)
    return {HERE: call} if place.name is None else {f"on {place.name}": call, HERE: _plan(place, call)}


def _chosen_job(place: TrainingPlace, decision: Decision) -> Job:
    row = decision.chosen
    assert row
    options = row["asked"] | (
        {"disk": row["options"]["disk"]} if row["disk"] and "disk" in row["options"] else {}
    )
    load = replace(decision.workload, batch_size=row["batch_size"], micro_batches=row["micro_batches"])
    return Job(row["method"], load, options, place.budget, default_device(place.budget))


def cost(place: TrainingPlace, decision: Decision, folders: tuple[Path, ...]) -> str:
    """Return, as text, how long the proposed training takes; empty if no training is proposed, or if its speed is not
    known."""
    if decision.chosen is None:
        return ""
    job = _chosen_job(place, decision)
    if place.name is None:
        return total_duration_text(job, folders)
    seconds = job.steps * decision.chosen["step_seconds"]
    return f"{counted(job.steps, 'step')} in about {duration_text(seconds)}; its reference and its probe come on top"


def _plan(place: TrainingPlace, call: str) -> str:
    """Return the call that plans this training for another machine. `call`: the call that would run it there."""
    assert place.name
    listed = place.name in named_machines.names()
    parts = [PLAN, call.removeprefix("./run.sh "), named_machines.options_text(place.name) if listed else ""]
    return " ".join(filter(None, parts))


def _calls_without(place: TrainingPlace, decision: Decision) -> dict[str, str]:
    """Return the next calls if no method was chosen: a call that measures this machine's rates, or calls for a model
    that fits. Empty if no model fits."""
    load = decision.workload
    usable = [row for row in decision.rows if is_usable(row)]
    if any(row["fits"] for row in usable):
        sizes = f"-h {load.hidden_size} -b {load.batch_size} --heads {load.num_heads} --seq {load.seq_len}"
        return {HERE: f"./run.sh doctor --calibrate {sizes} --dtype {load.dtype}"}
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
    return {HERE: call} if place.name is None else {f"on {place.name}": call, HERE: _plan(place, call)}


def reasons(place: TrainingPlace, decision: Decision, folders: tuple[Path, ...]) -> list[str]:
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
    speed = _digits(remedy.tokens_per_second or 0)
    return f"{remedy.change}: {speed} tokens/s by {remedy.method}, {remedy.settings}{times}"


def show_decision(decided: dict[str, Any]) -> None:
    """Print the decision, the next calls, the reasons, and the changes that would change the decision."""
    print(decided["decision"])
    for where, call in decided["next"].items():
        print(f"next, {where}: {call}")
        if decided["cost"] and not call.startswith(PLAN):
            print(f"  {decided['cost']}")
    changes = [line["text"] for line in decided["changes"]]
    for title, lines in (("why", decided["why"]), ("what would change it", changes)):
        if lines:
            print(f"{title}:")
            print("\n".join(f"  {line}" for line in lines))
    print(decided["memories"])
    if decided["caution"]:
        print(decided["caution"])


def show_rows(decision: Decision, tokens: float | None) -> None:
    """Print a table with a row for every method at its best settings, the chosen one first. Every other row tells why
    it was not chosen. `tokens`: number of tokens to train; None leaves out the column of hours."""
    numbers = [column for column in NUMBERS if tokens or column != "hours"]
    columns = ["method", "batch", *numbers, "binds", "beside it", "measured here"]
    planned = [row for row in decision.rows if "error" not in row]
    title = f"Every method at its best, {decision.workload.dtype}"
    print_table(
        columns,
        [[cells[column] for column in columns] for cells in map(_cells, planned)],
        title,
        numbers=NUMBERS,
    )
    print(
        "s a step: foretold by rates, not measured. deepest: the largest -l that fits. Energy is not known."
    )
    for row in decision.rows:
        if "error" in row:
            print(f"left out: {row['method']}: {row['error']}")
        elif row["missing"]:
            print(f"does not run here: {row['method']}: {row['missing']}")


def _cells(row: dict[str, Any]) -> dict[str, str]:
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
        "tokens/s": _digits(row["tokens_per_second"]) if has_speed else "-",
        "hours": _digits(row["hours"]) if has_speed and row["hours"] else "-",
        "MFU": f"{row['mfu']:.0%}" if has_speed and row["mfu"] else "-",
        "deepest": f"-l {row['largest_layers']}",
        "binds": binds or "-",
        "measured here": "; ".join(measured) or "no run",
    }


def _digits(number: float) -> str:
    """Return a rate as text with three significant digits, such as 1,800."""
    return f"{float(f'{number:.3g}'):,.10g}"


def _count(number: float) -> str:
    """Return a count in words, such as a billion, 10 billion or 300 million; as digits if it is below a million."""
    for word, factor in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if number >= factor:
            return f"a {word}" if number == factor else f"{number / factor:.4g} {word}"
    return f"{number:,.0f}"


def _duration(seconds: float) -> str:
    for word, factor in (("years", 365 * 86400.0), ("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * factor:
            return (
                f"{seconds / factor:.2g} {word}"
                if seconds < 100 * factor
                else f"{seconds / factor:,.0f} {word}"
            )
    return f"{seconds:.2g} seconds"
