"""Tells whether a job fits the given memories (a Room), and up to which number of layers, by arithmetic on the method's
plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from harness.base.counted import counted
from harness.core import method
from harness.core.job import OF_SEVERAL_MODELS, Job, Plan, Room
from harness.devices import cuda_budget
from harness.devices.room import check_device, imports_text, room_of

T = TypeVar("T")


class Planned(NamedTuple):
    """A job whose options are chosen, its plan, and a text on the memory that it lacks; the text is None if it fits."""

    job: Job
    plan: Plan
    shortfall: str | None


def resolve(job: Job, folders: tuple[Path, ...] = (), room: Room | None = None) -> Planned:
    """Plan the job, and give it the options that its plan chose.

    `room`: the memories to fill; None: those of this machine. Raises ValueError for wrong options.
    """
    trained = method.create(job.method, job.options, folders)
    method.check(trained, job.workload, folders)
    if job.device == "cuda":
        check_device(job.budget.device_bytes, job.world_size)
    less = imports_text(job.budget, job.device) if room is None else ""
    room = room or room_of(job)
    plan = trained.plan(job.workload, room)
    options = plan.options or dataclasses.asdict(trained)  # type: ignore[call-overload]
    for name in OF_SEVERAL_MODELS:
        if (told := options.get(name, 1)) != (asked := job.options.get(name, 1)):
            raise ValueError(
                f"{job.method}: expected a plan with {name} {asked}, as the job asks, got {told}"
            )
    resolved = dataclasses.replace(job, options=options)
    shortfall = plan.shortfall(room)
    if shortfall is None:
        return Planned(resolved, plan, None)
    asked = _asked(job, room, folders)
    tried = method.create(job.method, asked, folders).plan(job.workload, room).tried
    hint = _hint(job, asked, room, folders)
    if room.device_bytes is not None and plan.device_bytes > room.device_bytes:
        least = plan.device_bytes
        if job.device == "cuda":
            least = cuda_budget.budget_bytes(least, cuda_budget.context_bytes(job.world_size))
        hint += f", and this one needs --device-memory {-(-least // 1024)}KiB at least"
    each = f" on each of {job.world_size} ranks" if job.world_size > 1 else ""
    shortfall += f" (--host-memory {less})" if less and next(iter(plan.lacks(room))) == "host" else ""
    told = f"{shortfall}; tried, too: {tried}" if tried else shortfall
    size = f"{job.method} with {counted(job.workload.num_layers, 'layer')}{each}"
    return Planned(resolved, plan, f"{size} {told}; {hint}")


def _hint(job: Job, asked: dict[str, Any], room: Room, folders: tuple[Path, ...]) -> str:
    """Return a text on the largest number of layers that fits with the given options. If none fits with --placement,
    the text gives the largest number without --placement."""
    depth, placement = (
        largest(method.create(job.method, asked, folders), job, room),
        asked.pop("placement", None),
    )
    if not depth and placement:
        depth = largest(method.create(job.method, asked, folders), job, room)
        if depth:
            return f"the largest that should fit without --placement {placement} has -l {depth}"
    return f"the largest that should fit has -l {depth}" if depth else "no depth fits: lower -h, -b or --seq"


def _asked(job: Job, room: Room, folders: tuple[Path, ...]) -> dict[str, Any]:
    """Return the options that the user gave. These are the job's options but for those that the plan would choose
    itself."""

    def planned(options: dict[str, Any]) -> dict[str, Any]:
        return method.create(job.method, options, folders).plan(job.workload, room).options

    asked, chosen = dict(job.options), planned(job.options)
    for name in job.options if chosen.keys() == asked.keys() else ():
        others = {option: value for option, value in asked.items() if option != name}
        with contextlib.suppress(ValueError):  # the method has no plan without this option
            asked = others if planned(others) == chosen else asked
    return asked


def next_planned(planned: Callable[[int], T], size: int, num_ranks: int) -> tuple[int, T] | None:
    """Try `num_ranks` sizes, from `size` up. Return the first size that has a plan, and what `planned` returns for this
    size. None if none of the sizes has a plan.

    `planned` raises ValueError for a size without a plan. A window or a placement may need more layers. A number of
    pipeline stages, which divides the number of ranks, must also divide the number of layers.
    """
    for each in range(size, size + num_ranks):
        with contextlib.suppress(ValueError):
            return each, planned(each)
    return None


def largest(trained: method.Method, job: Job, room: Room) -> int:
    """Return the largest number of layers for which the method's plan fits the room; 0 if no number does."""

    def fits(num_layers: int, unplanned: bool) -> bool:
        found = next_planned(
            lambda depth: trained.plan(job.workload.at_depth(depth), room), num_layers, job.world_size
        )
        return found[1].shortfall(room) is None if found else unplanned

    def may_fit(num_layers: int) -> bool:
        # there are fewer pipeline stages than ranks, so a stage may need more memory than at a larger depth
        is_shallow = num_layers < job.world_size
        return is_shallow or fits(num_layers, num_layers < job.workload.num_layers)

    depth = method.largest_depth(may_fit)
    lower = range(min(depth, job.world_size) - 1, 0, -1)
    return next((found for found in (depth, *lower) if found and fits(found, False)), 0)
