"""Records as finished runs leave them, made without a run, and a folder that holds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.core.job import Job
from harness.core.method import workloads_of
from harness.core.record import Gate, Record, new_stem
from harness.devices import machine
from harness.plan.fit import resolve

PASSED = Gate("exact")
TENSOR = {"changed": 1.0, "moved": 1.0, "sha256": "0" * 16}


def record(job: Job, seconds: float = 1.0, **changes: Any) -> Record:
    """The record of a job that trained as the reference does, each step in so many seconds."""
    made = Record(job, "key", "ok", step_seconds=[seconds] * job.steps, losses=[1.0] * job.steps, gate=PASSED)
    return dataclasses.replace(made, **changes)


def write(folder: Path, *records: Record) -> Path:
    folder.mkdir(exist_ok=True)
    for number, one in enumerate(records):
        one.write(folder / f"log_{number}.json")
    return folder


def others(job: Job) -> list[dict[str, Any]]:
    """What the models of a job beyond the first left behind, each trained like the first on as many samples."""
    first, *loads = map(dataclasses.asdict, workloads_of(job))
    return [
        {
            "workload": {name: value for name, value in load.items() if value != first[name]},
            "losses": [1.0] * (job.steps * first["batch_size"] // load["batch_size"]),
            "grad_norms": [],
            "tensors": {"wte": TENSOR},
        }
        for load in loads
    ]


def launch(
    job: Job,
    key: Callable[[], str],
    results: Path,
    folders: tuple[Path, ...],
    report: Callable[[dict[str, Any]], None],
    recorded: Callable[[str], Path | None],
    **turn: Any,
) -> Path:
    """In place of harness.run.launch: the record of a run that ends as its plan foretells, trained like the
    reference."""
    if known := recorded(before := key()):
        return known
    num_models = job.options.get("num_models", 1)
    turns = [
        [turn % num_models, 0, "forward", 0, turn / 10, (turn + 1) / 10] for turn in range(2 * num_models)
    ]
    changes: dict[str, Any] = (
        {"schedule": {"num_models": num_models, "turns": turns}} if num_models > 1 else {}
    )
    _, plan, shortfall = resolve(job, folders)
    if shortfall:
        changes = {"status": "oom-device", "reason": shortfall, "losses": [], "step_seconds": []}
    else:
        changes |= {"tensors": {"wte": TENSOR}, "others": others(job)}
        changes |= {"peaks": {"device_allocated": plan.device_bytes, "host_anonymous": plan.host_bytes}}
    changes["predicted"] = {"device": plan.device, "host": plan.host}
    surroundings = {**machine.facts(), **machine.kernel_environment()}
    facts = {"machine": surroundings, "software": machine.software(), "clock": job.device, "gate": Gate()}
    path = Path(f"{new_stem(results, job)}.json")
    path.with_suffix(".txt").touch()
    record(job, key=before, **facts, **changes).write(path)
    return path
