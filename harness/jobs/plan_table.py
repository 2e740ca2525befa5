"""What each method would need for each size, before anything is allocated: by kind and memory, whether it fits, which
memory binds, and the largest depth that should fit. Arithmetic alone; no torch in this process."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from harness.core import method
from harness.core.child_process import ask
from harness.core.job import KINDS, Budget, Job, Plan, Workload, gib
from harness.core.rates import ADAM_BYTES, Rates
from harness.devices import machine
from harness.jobs import published_laws
from harness.jobs.sweep import largest, one_pool, resolve

MEMORIES = ("device", "host", "disk")
OPTIMIZER_BYTES = {"fp32": 8, "bf16": 12, "fp16": 12}  # a parameter: two moments, in mixed precision a master, too
WIDTH = 200  # columns where there is no terminal to ask: nothing is cut off


def rows(jobs: list[Job], folders: tuple[Path, ...], exact: bool = False) -> list[dict[str, Any]]:
    """A row for each job; one that cannot be planned has an `error` and no numbers."""
    return [_row(job, folders, exact) for job in jobs]


def least_step_seconds(workload: Workload, plan: Plan, rates: Rates | None) -> float | None:
    """No step is shorter than its arithmetic at the rate that the machine achieves, than its copies with both
    directions of the link full, than the host's Adam over what the host holds, or than what these two read and write
    in the host's memory, however well they overlap. None where the machine's rates are not known."""
    if rates is None:
        return None
    at_host = plan.updates_on_host * plan.host.get("optimizer", 0) / OPTIMIZER_BYTES[workload.dtype]
    link = (rates.inbound_bytes_per_second + rates.outbound_bytes_per_second) / 2
    return max(
        sum(rates.compute_seconds(workload.flops_per_step, workload.head_flops_per_step)),
        plan.moved_bytes / 2 / link,
        at_host / rates.host_adam_params_per_second,
        (ADAM_BYTES[workload.dtype] * at_host + plan.moved_bytes) / rates.host_bytes_per_second,
    )


def _row(job: Job, folders: tuple[Path, ...], exact: bool) -> dict[str, Any]:
    workload = job.workload
    row: dict[str, Any] = {"method": job.method, "num_layers": workload.num_layers}
    row |= {"hidden_size": workload.hidden_size, "batch_size": workload.batch_size, "num_params": workload.num_params}
    try:
        resolved, plan, shortfall = resolve(job, folders)
    except ValueError as error:
        return {**row, "error": str(error)}
    budget = machine.rank_budget(job)
    trained = method.create(job.method, job.options, folders)
    devices = job.world_size if job.device == "cuda" else 1  # of a CPU all ranks share the one
    part = dataclasses.replace(workload, batch_size=workload.batch_size // devices)
    depth = largest(trained, job, budget)
    row |= {
        "options": resolved.options,
        "device": plan.device,
        "host": plan.host,
        "disk": plan.disk,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "disk_bytes": plan.disk_bytes,
        "moved_bytes": plan.moved_bytes,
        "least_step_seconds": plan.step_seconds or least_step_seconds(part, plan, budget.rates),
        "time_binds": plan.binds,
        "fits": shortfall is None,
        "shortfall": shortfall,
        "largest_layers": depth,
        "binding": _binding(trained, job, budget, depth),
    }
    return {**row, "exact": _exact(resolved, folders)} if exact else row


def _binding(trained: method.Method, job: Job, budget: Budget, depth: int) -> str | None:
    """The memory that one layer more than fits would pass first."""
    try:
        plan = one_pool(trained.plan(job.workload.at_depth(depth + 1), budget), budget)
    except ValueError:
        return None
    return next((memory for memory in MEMORIES if _passes(plan, budget, memory)), None)


def _passes(plan: Plan, budget: Budget, memory: str) -> bool:
    have = getattr(budget, f"{memory}_bytes")
    return have is not None and getattr(plan, f"{memory}_bytes") > have


def _exact(job: Job, folders: tuple[Path, ...]) -> dict[str, Any]:
    """The peaks of a memory rehearsal: {device_bytes, host_bytes, seconds} or {unavailable}."""
    arguments = {"job": job.to_dict(), "folders": [str(folder) for folder in folders]}
    try:
        return ask("harness.devices.memory_rehearsal", arguments)
    except ValueError as error:
        return {"unavailable": f"{job.method}: {error}"}


def published_rows(budget: Budget) -> list[dict[str, Any]]:
    """For each published method its law's limits in this budget, beside the largest size it was published with."""
    if not budget.device_bytes or not budget.host_bytes:
        return []
    found = []
    for law in published_laws.LAWS:
        limits = law.limits(budget.device_bytes, budget.host_bytes - published_laws.HOST_TAKEN_BYTES)
        deepest = published_laws.PUBLISHED.at_depth(law.published_layers)
        found.append(
            {
                "method": law.method,
                "published_layers": law.published_layers,
                "step_seconds": budget.rates and published_laws.step_seconds(law.method, deepest, budget.rates),
                **dataclasses.asdict(limits),
                "binding": limits.binding,
                "was_the_limit": limits.largest == law.published_layers,
                "verdict": law.verdict(limits),
                "host_source": law.host_source,
            }
        )
    return found


def show(found: list[dict[str, Any]], exact: bool) -> None:
    """What each method needs, a line for each memory; what comes of it; a line for each that does not fit or cannot be
    planned."""
    planned = [row for row in found if "error" not in row]
    depth = ["layers"] if len({row["num_layers"] for row in planned}) > 1 else []
    kinds = [*depth, "memory", *KINDS, "in all", *(["exact"] if exact else [])]
    needs = _table("What training needs, by arithmetic", *kinds)
    ends = _table("What comes of it", "layers", "fits", "binds", "largest", "moved a step", "seconds, at least")
    for row in planned:
        _add_needs(needs, row, [row["method"], *(str(row[f"num_{name}"]) for name in depth)], exact)
        _add_end(ends, row)
    for table in (needs, ends) if planned else ():
        _console().print(table)
    for row in planned:
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items() if value not in (None, False))
        if row["time_binds"]:
            options += f"; {row['least_step_seconds']:.3g} s a step, bound by {row['time_binds']}"
        if options:
            print(f"{row['method']}, {row['num_layers']} layers: {options}")
    if any(row["options"].get("world_size", 1) > 1 for row in planned):
        print("world_size: bytes are one rank's, who has a device of its own and its part of the host's budget.")
    print("binds: the memory that one layer more than the largest would pass.")
    print("seconds, at least: a bound by the machine's rates (machines.yaml, or doctor --calibrate), if all overlaps.")
    for row in found:
        if "error" in row:
            print(f"left out: {row['method']}, {row['num_layers']} layers: {row['error']}")
        elif row["shortfall"]:
            print(f"does not fit: {row['shortfall']}")
    for text in dict.fromkeys(row["exact"].get("unavailable") for row in found if "exact" in row):
        if text:
            print(text)


def _add_needs(table: Table, row: dict[str, Any], title: list[str], exact: bool) -> None:
    for memory in MEMORIES:
        if memory == "device" or row[f"{memory}_bytes"]:
            cells = [*title, memory, *(_size(row[memory].get(kind)) for kind in KINDS), _size(row[f"{memory}_bytes"])]
            if exact:
                cells.append(_size(row["exact"].get(f"{memory}_bytes")))
            table.add_row(*cells)
            title = [""] * len(title)


def _add_end(table: Table, row: dict[str, Any]) -> None:
    table.add_row(
        row["method"], str(row["num_layers"]), "yes" if row["fits"] else "no", row["binding"] or "-",
        f"-l {row['largest_layers']}", _size(row["moved_bytes"]),
        f"{row['least_step_seconds']:.3g}" if row["least_step_seconds"] else "-",
    )  # fmt: skip


def _table(title: str, *names: str) -> Table:
    """Without lines, narrow: it should fit a terminal of a hundred columns, and fold rather than cut off in less."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in names:
        table.add_column(name, justify="left" if name == "memory" else "right", overflow="fold")
    return table


def show_published(found: list[dict[str, Any]]) -> None:
    table = Table(title="What bound the published runs, by laws recovered from their logs (largest depths)")
    for name in ("method", "published", "its seconds a step", "device", "device, as reserved", "host", "verdict"):
        table.add_column(name, justify="left" if name in ("method", "verdict") else "right")
    for row in found:
        seconds = f"{row['step_seconds']:.3g}" if row["step_seconds"] else "-"
        depths = (row["published_layers"], seconds, row["device"], row["device_as_reserved"], row["host"] or "-")
        table.add_row(row["method"], *map(str, depths), row["verdict"])
    _console().print(table)
    print("Of the engines that were published; the rows above are of those that run here.")


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def _size(size: int | None) -> str:
    return gib(size) if size else "-"
