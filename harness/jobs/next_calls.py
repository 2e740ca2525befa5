"""Suggests calls in place of a job that cannot fit; each of them fits by plan."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.core import method
from harness.core.job import Budget, Job, Room, gib
from harness.devices import machine, named_machines
from harness.forecast.fit import largest, resolve
from harness.forecast.run_time import probe_seconds, run_seconds, text
from harness.gate.probe import Extent
from harness.jobs.command import command
from harness.jobs.scale import to_fit


def next_calls(job: Job, folders: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    """Return commands, each with its effect and duration, for a job as it was asked for."""
    with contextlib.suppress(ValueError):  # a fixed placement, or sizes that no factor divides
        scaled, factor = to_fit(job, folders)
        if factor > 1 and (told := _minutes(scaled, folders)):
            load = scaled.workload
            sizes = f"{load.num_layers} layers x {load.hidden_size}, {load.seq_len} tokens, {load.vocab_size} words"
            memories = f"{gib(scaled.budget.device_bytes or 0)} of device, {gib(scaled.budget.host_bytes or 0)} of host"
            yield f"{command(job, is_short=True)} --scale fit", f"scaled by {factor}: {sizes}, {memories}; {told}"
    yield from _on_disk(job, folders)
    trained = method.create(job.method, job.options, folders)
    depth = largest(trained, job, machine.rank_room(job))
    if depth:
        smaller = dataclasses.replace(job, workload=job.workload.at_depth(depth))
        if told := _minutes(smaller, folders):
            yield command(smaller, is_short=True), f"the largest depth that fits as it is; {told}"
    is_of_here = job.budget.device_bytes is None and job.budget.host_bytes is None  # the call gave no budget
    for name in sorted(named_machines.names(), key=lambda name: name != named_machines.PUBLISHED) if is_of_here else ():
        room = named_machines.load(name).room
        if room.device_bytes and room.host_bytes and _fits(job, room, folders):
            bare = dataclasses.replace(job, budget=Budget(), device=machine.devices()[0])
            words = command(bare, is_short=True).removeprefix("./run.sh ")
            yield (
                f"./run.sh plan {words} {named_machines.words(name)}",
                "the plan on a machine that holds it, in a second",
            )
            break


def _on_disk(job: Job, folders: tuple[Path, ...]) -> Iterator[tuple[str, str]]:
    """Put layers on the disk: at this depth, else at the largest that then fits."""
    if "disk" not in method.option_names(method.load(job.method, folders)) or job.options.get("disk"):
        return
    folder = tempfile.gettempdir()
    disk_bytes = job.budget.disk_bytes or shutil.disk_usage(folder).free
    asked = dataclasses.replace(job, options={**job.options, "disk": folder})
    room = dataclasses.replace(machine.rank_room(asked), disk_bytes=disk_bytes)
    depth = min(largest(method.create(job.method, asked.options, folders), asked, room), job.workload.num_layers)
    deeper = dataclasses.replace(asked, workload=job.workload.at_depth(depth)) if depth else asked
    without = largest(method.create(job.method, job.options, folders), job, machine.rank_room(job))
    if depth > without and (told := _minutes(deeper, folders)):
        yield command(deeper, is_short=True), f"with layers on the disk; {told}"


def _fits(job: Job, room: Room, folders: tuple[Path, ...]) -> bool:
    with contextlib.suppress(ValueError):
        return method.create(job.method, job.options, folders).plan(job.workload, room).shortfall(room) is None
    return False


def _minutes(job: Job, folders: tuple[Path, ...]) -> str:
    """Tell the time of the run and its reference, if it fits; empty if it does not."""
    resolved, plan, shortfall = resolve(job, folders)
    if shortfall:
        return ""
    rates = machine.rank_room(job).rates
    run = run_seconds(resolved, plan, rates)
    probe = probe_seconds(resolved, run, method.load(job.method, folders), Extent())
    return f"about {text(2 * run + probe)}, reference and probe included"
