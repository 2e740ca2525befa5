"""Measures a model's profile in a process of its own, while no other job runs on the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.base.child_process import ask
from harness.core.job import Job, Workload
from harness.devices import machine
from harness.devices.device_lock import turn


def measure_profile(
    workload: Workload,
    sizes: Sequence[int],
    num_ranks: int,
    folder: Path,
    device: str,
    report: Callable[[dict[str, Any]], None],
) -> str:
    """Measure the workload's model, cut after every layer, and write the profile to `folder`. `sizes`: samples of the
    micro-batches. `device`: cpu, cuda or auto. `report`: gets an event if the devices are in use, which are then waited
    for. Return a note for people, or "". Raises ValueError if the measurement failed."""
    order = {
        "workload": asdict(workload),
        "sizes": sizes,
        "num_ranks": num_ranks,
        "folder": str(folder.resolve()),
    }
    on = machine.devices()[0] if device == "auto" else device
    with turn(Job("profile", workload, {"world_size": num_ranks}, device=on), report):
        return str(ask("methods.pipeline.config.measure_model", {**order, "device": device}))
