"""The verb `plan`: prints, for each method and size, the bytes that training needs, by memory and kind; the memory that
limits the number of layers; and the largest number of layers that should fit. It only computes: nothing is allocated,
torch is not imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from harness.base.child_process import ask
from harness.base.console import counted, print_table
from harness.base.json_object import JsonObject
from harness.core import method
from harness.core.job import MEMORIES, STATE_KINDS, Job, Room, gib
from harness.devices import machine
from harness.devices.room import room_of
from harness.plan.fit import most_layers, resolve
from harness.plan.resources import least_seconds
from papers import laws as published_laws

SIZE_HEADINGS = {
    "model_name": "model",
    "num_layers": "layers",
    "hidden_size": "hidden",
    "batch_size": "batch",
    "seq_len": "tokens",
}


def plan_row(job: Job, folders: tuple[Path, ...], exact: bool, page_locks: bool = False) -> JsonObject:
    """Return the row of a job. If the job has no plan, the row has an `error`, and no numbers. `page_locks`: True: plan
    as on a machine with a GPU, even if this machine has none."""
    workload = job.workload
    row: JsonObject = {"method": job.method, **{name: getattr(workload, name) for name in SIZE_HEADINGS}}
    try:
        row["num_params"] = workload.num_params
        # A plan for a machine with a GPU (page_locks) leaves dropout out: on a GPU, attention with dropout has a kernel
        # of its own, which needs no more memory.
        planned_workload = dataclasses.replace(workload, dropout=0.0) if page_locks else workload
        planned_job = dataclasses.replace(job, workload=planned_workload)
        room = room_of(planned_job, counts_imports=False) if page_locks else room_of(planned_job)
        room = dataclasses.replace(room, page_locks=page_locks or room.page_locks)
        resolved, plan, shortfall = resolve(job, folders, room)
    except ValueError as error:
        return {**row, "error": str(error)}
    trained = method.create(job.method, job.options, folders)
    devices = job.world_size if job.device == "cuda" else 1  # on a CPU, all ranks share the one device
    device_workload = dataclasses.replace(workload, batch_size=workload.batch_size // devices)
    depth = most_layers(job, room, folders)
    row |= {"options": resolved.options, "moved_bytes": plan.moved_bytes, "stages": plan.stages}
    row |= {name: getattr(plan, name) for memory in MEMORIES for name in (memory, f"{memory}_bytes")}
    row |= {"least_step_seconds": least_seconds(device_workload, plan, room.rates), "time_binds": plan.binds}
    row |= {"caution": "" if job.budget.rates else machine.caution(job.device, workload)}
    row |= {"fits": shortfall is None, "shortfall": shortfall}
    row |= {"largest_layers": depth, "binding": _binding_memory(trained, job, room, depth)}
    return {**row, "exact": _rehearsed_memory(resolved, folders)} if exact else row


def _binding_memory(trained: method.Method, job: Job, room: Room, depth: int) -> str | None:
    """Return the memory that a model with one layer more than `depth` would exceed. None if that model exceeds no
    memory, or has no plan."""
    try:
        return next(iter(trained.plan(job.workload.at_depth(depth + 1), room).lacks(room)), None)
    except ValueError:
        return None


def _rehearsed_memory(job: Job, folders: tuple[Path, ...]) -> JsonObject:
    """Return the result of a memory rehearsal, which is exact: its peaks as {device_bytes, host_bytes, seconds}, or
    {unavailable: reason}."""
    try:
        return ask(
            "harness.devices.memory_rehearsal", {"job": job.to_dict(), "folders": list(map(str, folders))}
        )
    except ValueError as error:
        return {"unavailable": f"{job.method}: {error}"}


def published_limit_rows(room: Room) -> list[JsonObject]:
    """Return a row for each published method: the largest numbers of layers that its law allows in this room, and the
    largest number that was published. The list is empty if the room has no limit of device or host memory."""
    if not room.device_bytes or not room.host_bytes:
        return []
    rows = []
    for law in published_laws.LAWS:
        limits = law.limits(room.device_bytes, room.host_bytes - published_laws.HOST_TAKEN_BYTES)
        deepest = published_laws.PUBLISHED.at_depth(law.published_layers)
        seconds = room.rates and published_laws.published_step_seconds(law.method, deepest, room.rates)
        rows.append(
            {
                "method": law.method,
                "published_layers": law.published_layers,
                "step_seconds": seconds,
                **limits._asdict(),
                "binding": limits.binding,
                "was_the_limit": limits.largest == law.published_layers,
                "verdict": law.verdict(limits),
                "host_source": law.host_source,
                "here": law.difference,
            }
        )
    return rows


def print_plans(rows: list[JsonObject], exact: bool) -> None:
    """Print the bytes that each method needs in each memory, whether it fits, its largest depth, and a line for each
    row that does not fit or has no plan."""
    planned_rows = [row for row in rows if "error" not in row]
    sizes = [name for name in SIZE_HEADINGS if len({row[name] for row in planned_rows}) > 1]
    numbers = [*(SIZE_HEADINGS[name] for name in sizes), *STATE_KINDS, "in all"] + ["exact"] * exact
    needs = [line for row in planned_rows for line in _needs_lines(row, ["method", *sizes], exact)]
    shown_sizes = list(dict.fromkeys(["num_layers", *sizes]))
    outcomes = [SIZE_HEADINGS[name] for name in shown_sizes]
    outcomes += ["fits", "binds", "largest", "moved a step", "seconds, at least"]
    columns = ["method", *numbers[: len(sizes)], "memory", *numbers[len(sizes) :]]
    print_table(columns, needs, "What training needs, by arithmetic", numbers=numbers)
    ends = [_outcome_cells(row, shown_sizes) for row in planned_rows]
    print_table(["method", *outcomes], ends, "What comes of it", numbers=outcomes)
    _print_options(planned_rows, sizes)
    _print_notes(planned_rows)
    for row in rows:
        if "error" in row:
            print(f"left out: {_row_title(row, sizes)}: {row['error']}")
        elif row["shortfall"]:
            print(f"does not fit: {row['shortfall']}")
    for text in dict.fromkeys(row["exact"].get("unavailable") for row in rows if "exact" in row):
        if text:
            print(text)


def _print_options(planned_rows: list[JsonObject], sizes: list[str]) -> None:
    """Print the options that each plan chose, and the bytes of its pipeline stages. `sizes`: the sizes that differ."""
    for row in planned_rows:
        options = row["options"].items()
        text = ", ".join(f"{name}={value}" for name, value in options if value not in (None, False))
        if row["time_binds"]:
            text += f"; {row['least_step_seconds']:.3g} s a step, bound by {row['time_binds']}"
        if text:
            print(f"{_row_title(row, sizes)}: {text}")
        for name, size in row["stages"].items():
            print(f"{_row_title(row, sizes)}, {name}: {gib(size)}")


def _print_notes(planned_rows: list[JsonObject]) -> None:
    """Print what the columns mean, and cautions about the rates."""
    if any(row["options"].get("world_size", 1) > 1 for row in planned_rows):
        print(
            "world_size: bytes are one rank's, which has a device of its own and its part of the host's budget."
        )
    print("binds: the memory that one layer more than the largest would pass.")
    print(
        "seconds, at least: a bound by the machine's rates (machines.yaml, or doctor --calibrate), if all overlaps."
    )
    if foretold := dict.fromkeys(row["method"] for row in planned_rows if row["time_binds"]):
        print(
            f"seconds of {' and '.join(foretold)}: no bound, but foretold by the order of passes that the plan has."
        )
    for caution in dict.fromkeys(row["caution"] for row in planned_rows if row["caution"]):
        print(caution)


def _row_title(row: JsonObject, sizes: list[str]) -> str:
    """Return a row's title: its method, its number of layers, and its other sizes named in the list `sizes`."""
    others = [f"{SIZE_HEADINGS[name]} {row[name]}" for name in sizes if name != "num_layers"]
    return ", ".join([row["method"], counted(row["num_layers"], "layer"), *others])


def _needs_lines(row: JsonObject, title: list[str], exact: bool) -> Iterator[list[str]]:
    cells = [str(row[name]) for name in title]
    for memory in MEMORIES:
        if memory == "device" or row[f"{memory}_bytes"]:
            sizes = [*(row[memory].get(kind) for kind in STATE_KINDS), row[f"{memory}_bytes"]]
            sizes += [row["exact"].get(f"{memory}_bytes")] if exact else []
            yield [*cells, memory, *map(_size, sizes)]
            cells = [""] * len(title)


def _outcome_cells(row: JsonObject, sizes: list[str]) -> list[str]:
    seconds = row["least_step_seconds"]
    return [
        row["method"],
        *(str(row[name]) for name in sizes),
        "yes" if row["fits"] else "no",
        row["binding"] or "-",
        f"-l {row['largest_layers']}",
        _size(row["moved_bytes"]),
        f"{seconds:.3g}" if seconds else "-",
    ]


def print_published_limits(laws: list[JsonObject]) -> None:
    numbers = ("published", "its seconds a step", "device", "device, as reserved", "host")
    rows = []
    for row in laws:
        seconds = f"{row['step_seconds']:.3g}" if row["step_seconds"] else "-"
        depths = (
            row["published_layers"],
            seconds,
            row["device"],
            row["device_as_reserved"],
            row["host"] or "-",
        )
        rows.append((row["method"], *depths, row["verdict"]))
    title = "What bound the published runs, by laws recovered from their logs (largest depths)"
    print_table(("method", *numbers, "verdict"), rows, title, numbers=numbers)
    print("Of the engines that were published; the rows above are of those that run here.")
    for row in laws:
        if row["here"]:
            print(f"{row['method']} here: {row['here']}.")


def _size(size: int | None) -> str:
    return gib(size) if size else "-"
