"""Measures a model's profile in a process of its own, while no other job runs on the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness.base.child_process import ask
from harness.base.json_object import JsonObject
from harness.core.job import Job
from harness.devices import machine
from harness.devices.device_lock import turn


def measure_profile(
    job: Job, sizes: Sequence[int], folder: Path, report: Callable[[JsonObject], None]
) -> str:
    """Measure the job's model, cut after every layer, and write the profile to `folder`. `job`: a job `profile` with
    the option `world_size`, on the device cpu, cuda or auto. `sizes`: samples of the micro-batches. `report`: gets an
    event if the devices are in use, which are then waited for. Return a note for people, or "". Raises ValueError if
    the measurement failed."""
    order = {
        "workload": asdict(job.workload),
        "sizes": sizes,
        "num_ranks": job.options["world_size"],
        "folder": str(folder.resolve()),
        "device": job.device,
    }
    device = machine.devices()[0] if job.device == "auto" else job.device
    with turn(replace(job, device=device), report):
        return str(ask("methods.pipeline.config.measure_model", order))
