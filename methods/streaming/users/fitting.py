"""Measures a user's model, and chooses the placement with which its training fits limits of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.core.job import Budget, Plan, Room
from harness.devices import cuda_budget
from harness.devices.budgets import capped, device_peaks, reset_peaks
from harness.devices.room import room_within
from methods.streaming.placement.choice import PlacementChoice, with_homes
from methods.streaming.placement.placed_layers import UserSizes
from methods.streaming.placement.placement import home_of_boundaries
from methods.streaming.users.model import give
from methods.streaming.users.streams import TrialStream
from methods.streaming.users.training import Script, UserTraining

SMALL_BYTES = 512  # bytes that the device's allocator takes for a tensor of one number, such as a norm
NUM_SMALL = 64


@dataclass(frozen=True)
class MemoryLimits:
    """Limits in bytes; `host_bytes` of None: no limit. `example`: returns the loss of the largest batch."""

    device_bytes: int
    host_bytes: int | None
    example: Callable[[], Tensor]


@dataclass(frozen=True)
class PlacementOptions:
    """The options of a trainer that have these names; None: the user has not chosen."""

    placement: str | None
    window_size: int | None
    clipping: str | None
    disk: str | None
    activations: str | None


def fitting(script: Script, options: PlacementOptions, limits: MemoryLimits) -> PlacementOptions:
    """Return the options with which the training fits the limits. Raises ValueError if no options fit."""
    room = room_within(Budget(limits.device_bytes, limits.host_bytes), torch.device(script.device).type)
    too_large = Plan({"activations": limits.device_bytes + 1})

    def plan_at(_: str | None, memory: str | None) -> Plan:
        home, sizes = home_of_boundaries(memory), None
        try:
            sizes = sizes_by_trial(script, limits, home)
        except torch.OutOfMemoryError:
            if home == "host" or options.activations:  # no other home is left to try
                raise
        if sizes is None:
            free_failed_pass(script.device)
            return too_large
        return PlacementChoice(
            sizes,
            room,
            options.window_size,
            placement=options.placement,
            clipping=options.clipping,
            disk=options.disk,
            activations=home,
        ).plan()

    plan = with_homes(plan_at, room, None, options.activations, ends_may_move=False)
    if shortfall := plan.shortfall(room):
        raise ValueError(_too_large(plan, room, shortfall, torch.device(script.device).type))
    return replace(
        options,
        placement=plan.options["placement"],
        window_size=plan.options["window_size"],
        disk=plan.options.get("disk"),
        activations=plan.options["activations"],
    )


def _too_large(plan: Plan, room: Room, shortfall: str, device: str) -> str:
    tried = f"; tried, too: {plan.tried}" if plan.tried else ""
    advised_memory = "more memory"
    if device == "cuda" and "device" in plan.lacks(room):
        least = cuda_budget.budget_bytes(plan.device_bytes, cuda_budget.context_bytes())
        advised_memory = f"device_memory={least}, which covers the GPU's context and a reserve"
    return f"{shortfall}{tried}; try another placement, smaller batches, or {advised_memory}"


def free_failed_pass(device: str) -> None:
    """Free the memory of a backward pass that raised an error. One thread of autograd frees this memory, after
    backward() has raised the error. So run another pass in the same thread, which ends only when the memory is free."""
    torch.zeros((), device=device, requires_grad=True).neg().backward()
    gc.collect()


def sizes_by_trial(script: Script, limits: MemoryLimits, boundaries: str) -> UserSizes:
    """Return the model's sizes, measured in one forward and backward pass of the example. The gradients of this pass
    are dropped. `boundaries`: the memory that keeps the layers' inputs between both passes, "device" or "host"."""
    trial = UserTraining(script)
    device_type = trial.device.type
    if device_type == "cpu":
        raise ValueError(
            "device_memory: expected a device with its own memory, got cpu; leave device_memory out"
        )
    trial._set_up(TrialStream, bare=True, boundaries=boundaries)
    buffers = [(buffer, buffer.clone()) for buffer in script.model.buffers()]
    try:
        indices = [torch.cuda.current_device()] if device_type == "cuda" else []
        forked_random_state = torch.random.fork_rng(indices, device_type="cuda")
        with trial, capped(trial.device, limits.device_bytes), forked_random_state:
            reset_peaks(device_type)
            trial.scale(limits.example()).backward()
            peak_bytes = device_peaks(device_type)["device_allocated"]
    finally:
        for buffer, values_before in buffers:
            buffer.copy_(values_before)
        for parameter in trial.user.rest:
            parameter.grad = None
            give(parameter, parameter.detach().cpu())
    sizes = _sizes_of(trial, peak_bytes)
    del trial
    gc.collect()  # frees the trial's memory before the training takes its own
    return sizes


def _sizes_of(trial: UserTraining, peak_bytes: int) -> UserSizes:
    """Return the sizes of a model whose trial took `peak_bytes` of the device at its peak."""
    states, stream = trial.stream.states, trial.stream
    assert isinstance(stream, TrialStream)
    num_tensors = sum(len(state.layout.places) for state in (trial.ends, *states))
    user = trial.user
    return UserSizes(
        user.layer_dtype,
        tuple(state.layout.numel for state in states),
        trial.ends.layout.numel,
        peak_bytes - stream.known_bytes + SMALL_BYTES * (num_tensors + NUM_SMALL),
        trial.terms.waits_for_norm,
        max(state.boundary.num_bytes if state.boundary else 0 for state in states),
        tuple(user.are_frozen),
        None if user.dtype == user.layer_dtype else user.dtype,
    )
