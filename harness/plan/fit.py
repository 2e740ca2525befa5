"""Tells whether a job fits the given memories (a Room), up to which number of layers, and scaled down by which factor.
All answers are arithmetic on the method's plan; nothing runs.

A scaled job still shows which models fit: its number of layers stays; its width, sequence and vocabulary are divided by
a factor f, its memories by f squared. The bytes of layers, ends, activations and logits shrink by f squared, too, so a
model that fits at full size also fits when scaled.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core import method
from harness.core.job import Budget, Job, Plan, Room, Workload
from harness.core.method import OF_SEVERAL_MODELS
from harness.devices import cuda_budget, machine, named_machines
from harness.devices.room import check_device, imports_text, room_of
from harness.plan.run_time import run_seconds

MOST_SCALED_SECONDS = 60.0  # most seconds that a scaled run and its reference may take together
MOST_HOST_SHARE = 0.5  # largest share of this machine's memory that a scaled run may take
SCALE_FACTORS = (1, 2, 4, 8, 16, 32, 64)
LEAST_SEQ_LEN, LEAST_VOCAB_SIZE = 16, 64

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
    configured_method = method.create(job.method, job.options, folders)
    method.check(configured_method, job.workload, folders)
    if job.device == "cuda":
        check_device(job.budget.device_bytes, job.world_size)
    imports_note = imports_text(job.budget, job.device) if room is None else ""
    room = room or room_of(job)
    plan = configured_method.plan(job.workload, room)
    options = plan.options or dataclasses.asdict(configured_method)  # type: ignore[call-overload]
    for name in OF_SEVERAL_MODELS:
        planned_number, requested_number = options.get(name, 1), job.options.get(name, 1)
        if planned_number != requested_number:
            expected = f"expected a plan with {name} {requested_number}, as the job asks"
            raise ValueError(f"{job.method}: {expected}, got {planned_number}")
    planned_job = dataclasses.replace(job, options=options)
    shortfall = plan.shortfall(room)
    if shortfall is None:
        return Planned(planned_job, plan, None)
    if imports_note and next(iter(plan.lacks(room))) == "host":
        shortfall += f" (--host-memory {imports_note})"
    ranks = f" on each of {job.world_size} ranks" if job.world_size > 1 else ""
    size = f"{job.method} with {counted(job.workload.num_layers, 'layer')}{ranks}"
    return Planned(planned_job, plan, f"{size} {shortfall}{_remedies_text(job, plan, room, folders)}")


def _remedies_text(job: Job, plan: Plan, room: Room, folders: tuple[Path, ...]) -> str:
    """Return a text on the other options that do not fit either, and on the largest number of layers that fits. If no
    number fits with --placement, the text gives the largest number without --placement."""
    options = _options_of_user(job, room, folders)
    tried_text = method.create(job.method, options, folders).plan(job.workload, room).tried
    text = f"; tried, too: {tried_text}" if tried_text else ""
    depth, without_text = most_layers(dataclasses.replace(job, options=options), room, folders), ""
    placement = options.pop("placement", None)
    if not depth and placement:
        depth = most_layers(dataclasses.replace(job, options=options), room, folders)
        without_text = f" without --placement {placement}"
    if depth:
        text += f"; the largest that should fit{without_text} has -l {depth}"
    else:
        text += "; no depth fits: lower -h, -b or --seq"
    if room.device_bytes is not None and plan.device_bytes > room.device_bytes:
        needed_bytes = plan.device_bytes
        if job.device == "cuda":
            needed_bytes = cuda_budget.budget_bytes(needed_bytes, cuda_budget.context_bytes(job.world_size))
        text += f", and this one needs --device-memory {-(-needed_bytes // 1024)}KiB at least"
    return text


def _options_of_user(job: Job, room: Room, folders: tuple[Path, ...]) -> JsonObject:
    """Return the options that the user gave. These are the job's options but for those that the plan would choose
    itself."""

    def plan_options(options: JsonObject) -> JsonObject:
        return method.create(job.method, options, folders).plan(job.workload, room).options

    options, planned_options = dict(job.options), plan_options(job.options)
    if planned_options.keys() != options.keys():
        return options
    for name in job.options:
        other_options = {option: value for option, value in options.items() if option != name}
        with contextlib.suppress(ValueError):  # the method has no plan without this option
            if plan_options(other_options) == planned_options:
                options = other_options
    return options


def next_planned(plan_at: Callable[[int], T], size: int, num_ranks: int) -> tuple[int, T] | None:
    """Try `num_ranks` sizes, from `size` up. Return the first size that has a plan, and what `plan_at` returns for this
    size. None if none of the sizes has a plan.

    `plan_at` raises ValueError for a size without a plan. A window or a placement may need more layers. A number of
    pipeline stages, which divides the number of ranks, must also divide the number of layers.
    """
    for next_size in range(size, size + num_ranks):
        with contextlib.suppress(ValueError):
            return next_size, plan_at(next_size)
    return None


def most_layers(job: Job, room: Room, folders: tuple[Path, ...] = ()) -> int:
    """Return the largest number of layers for which the method's plan fits the room; 0 if no number does."""
    configured_method = method.create(job.method, job.options, folders)

    def fits(num_layers: int, if_unplanned: bool) -> bool:
        planned = next_planned(
            lambda depth: configured_method.plan(job.workload.at_depth(depth), room),
            num_layers,
            job.world_size,
        )
        return planned[1].shortfall(room) is None if planned else if_unplanned

    def may_fit(num_layers: int) -> bool:
        # there are fewer pipeline stages than ranks, so a stage may need more memory than at a larger depth
        is_shallow = num_layers < job.world_size
        return is_shallow or fits(num_layers, if_unplanned=num_layers < job.workload.num_layers)

    depth = method.largest_depth(may_fit)
    lower_depths = range(min(depth, job.world_size) - 1, 0, -1)
    for num_layers in (depth, *lower_depths):
        if num_layers and fits(num_layers, if_unplanned=False):
            return num_layers
    return 0


def scale_down(workload: Workload, budget: Budget, factor: int) -> tuple[Workload, Budget]:
    """Divide the workload's sizes by the factor, and the budget's memories by the factor's square.

    The hidden size stays a multiple of the number of heads. Sequence and vocabulary stay at or above LEAST_SEQ_LEN
    and LEAST_VOCAB_SIZE, unless they were smaller before.
    """
    heads = workload.num_heads
    widths: JsonObject = {
        "hidden_size": max(1, workload.hidden_size // factor // heads) * heads,
        "seq_len": max(min(LEAST_SEQ_LEN, workload.seq_len), workload.seq_len // factor),
        "vocab_size": max(min(LEAST_VOCAB_SIZE, workload.vocab_size), workload.vocab_size // factor),
    }
    sizes = {name: getattr(budget, name) for name in ("device_bytes", "host_bytes", "disk_bytes")}
    memories: JsonObject = {name: size // factor**2 for name, size in sizes.items() if size is not None}
    return dataclasses.replace(workload, **widths), dataclasses.replace(budget, **memories)


def scale_to_fit(job: Job, folders: tuple[Path, ...] = ()) -> tuple[Job, int]:
    """Scale the job down and move it to the simulated device; return the scaled job and the factor.

    The factor is the least one of SCALE_FACTORS with which the run and its reference take at most MOST_SCALED_SECONDS
    on this machine; if there is none, the largest. A budget that the job lacks is taken from the published runs'
    machine.
    """
    published = named_machines.load(named_machines.PUBLISHED).budget_on("sim")
    limits = {
        name: size for name, size in vars(job.budget).items() if size is not None and name.endswith("_bytes")
    }
    whole = dataclasses.replace(published, rates=None, **limits, seconds=job.budget.seconds)
    assert whole.device_bytes and whole.host_bytes
    for factor in SCALE_FACTORS:
        workload, budget = scale_down(job.workload, whole, factor)
        scaled = dataclasses.replace(job, workload=workload, budget=budget, device="sim")
        plan = method.create(job.method, job.options, folders).plan(workload, budget.room)
        has_room = (budget.device_bytes or 0) + (
            budget.host_bytes or 0
        ) < MOST_HOST_SHARE * machine.host_bytes()
        if has_room and 2 * run_seconds(scaled, plan) <= MOST_SCALED_SECONDS:
            break
    return scaled, factor
