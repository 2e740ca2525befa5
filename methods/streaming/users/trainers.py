"""The trainers that run STRONGHOLD and L2L in a user's own script. Import StrongholdTrainer from methods.stronghold,
and L2LTrainer from methods.l2l.

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    trainer = StrongholdTrainer(model, model.model.layers, optimizer, max_norm=1.0, placement="R4W")
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        norm = trainer.step()

On a CPU the losses, norms and weights are bit-equal to those of a plain script that checkpoints each layer, clips by
clip_grad_norm_() and updates by AdamW(fused=True). In bf16 and fp16 that script updates an fp32 master of each weight.
On a GPU the host's updates have the bits of torch's CPU kernel, and so have a GPU's updates in bf16; a GPU's updates in
fp32 and fp16 have those of torch's CUDA kernel, which rounds otherwise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from harness.core.job import Budget, Plan
from harness.core.method import Step, Unavailable
from harness.devices import cuda_budget
from harness.devices.budgets import capped, device_peaks, reset_peaks
from harness.devices.room import room_within
from methods.offload import adamw_kernel
from methods.offload.adamw import Settings
from methods.offload.clip import Clip
from methods.shared.loss_scale import LossScale
from methods.shared.memory_needs import writable
from methods.streaming.embedding_and_head import OnDevice
from methods.streaming.layer_kinds import Streamed, new_layers
from methods.streaming.layer_state import Home, LayerState, Passed
from methods.streaming.placement.choice import DEFAULT_WINDOW, PlacementChoice, with_homes
from methods.streaming.placement.placement import CLIPPINGS, UserSizes, home_of_boundaries, parse
from methods.streaming.slot import GradientRoom, Slot
from methods.streaming.update_rules import DEFERRED, UpdateRule, update_at_once
from methods.streaming.users.model import give
from methods.streaming.users.training import Parts, UserTraining, default_device
from methods.streaming.window import Window

SMALL_BYTES = 512  # bytes that the device's allocator takes for a tensor of one number, such as a norm
NUM_SMALL = 64


class WindowStream:
    """The body of the loop in methods/stronghold.py: layers slide through a window."""

    def __init__(
        self, parts: Parts, kinds: str, window_size: int, clipping: str | None, disk: str | None
    ) -> None:
        speculates = clipping == "speculate"
        self.layers = new_layers(parts.device, parts.layers, kinds, window_size, disk, speculates=speculates)
        self.states = [layer.state for layer in self.layers]
        ends = OnDevice(parts.ends)
        self.rule = UpdateRule(parts.layers.terms, ends, self.layers, clipping, parts.order)
        self.scale = self.rule.scale
        self.waits = self.rule.usual_timing is DEFERRED
        self.window = Window(self.layers, kinds, window_size, self.rule)
        self.window.refill()

    @property
    def clip(self) -> Clip:
        return self.rule.clip

    def forward(self, place: int, xs: list[Passed]) -> list[Passed]:
        xs = self.layers[place].forward(xs)
        self.window.slide_up(self.layers[place])
        return xs

    def begin(self, settings: Settings) -> None:
        self.rule.begin(settings)

    def backward(self, place: int, dxs: list[Passed]) -> list[Passed]:
        layer = self.layers[place]
        dxs = layer.backward(dxs)
        self.rule.gradient_ready(layer)
        self.window.slide_down(layer)
        return dxs

    def finish(self, settings: Settings) -> Step:
        if self.rule.usual_timing is not DEFERRED and settings != self.rule.settings:
            raise ValueError(
                "step: expected the optimizer's settings as in the backward pass, got others; try to change them after"
                " step()"
            )
        self.rule.settings = settings
        self.rule.finish()
        self.window.refill()
        return self.rule.step(self.rule.clip.total)

    def rewind(self) -> None:
        self.window.rewind()

    def is_late(self) -> bool:
        return any(isinstance(layer, Streamed) and layer.due is not None for layer in self.layers)

    def settle(self) -> None:
        self.window.settle()
        self.window.rewind()

    def refetch(self) -> None:
        self.window.refill()


class OneLayerStream:
    """The body of the loop in methods/l2l.py: one layer at a time on the device."""

    clip: Clip
    waits = True

    def __init__(self, parts: Parts) -> None:
        self.device, self.ends, self.order, layers = (
            parts.device,
            OnDevice(parts.ends),
            parts.order,
            parts.layers,
        )
        home = Home(on_host=True)
        self.states = layers.start(
            LayerState(parts.device, layer, layers.terms, home) for layer in layers.layers
        )
        self.max_norm, self.scale = layers.terms.clip_norm, LossScale(layers.terms)
        largest = max(self.states, key=lambda state: state.layout.numel)
        self.slot, self.gradients = Slot(largest), GradientRoom(largest)

    def forward(self, place: int, xs: list[Passed]) -> list[Passed]:
        self.slot.load(self.states[place])
        return self.states[place].forward(xs)

    def begin(self, settings: Settings) -> None:
        self.clip = Clip(self.device, self.max_norm, self.scale, self.order)

    def backward(self, place: int, dxs: list[Passed]) -> list[Passed]:
        layer = self.states[place]
        self.slot.load(layer)
        dxs = self.gradients.backward(layer, dxs)
        self.clip.add(layer.norms())
        self.gradients.send_home(layer)
        self.device.synchronize()
        return dxs

    def finish(self, settings: Settings) -> Step:
        is_skipped = update_at_once(self.clip, self.ends, self.states, settings)
        return self.scale.step(self.clip.total, self.clip.total, is_skipped=is_skipped)

    def rewind(self) -> None: ...
    def is_late(self) -> bool:
        return False

    def settle(self) -> None: ...
    def refetch(self) -> None: ...


class TrialStream:
    """Runs both passes, one layer at a time, without updates, to measure the memory that the model needs beside its
    layers.
    """

    clip: Clip  # never set: a trial makes no step
    waits = False

    def __init__(self, parts: Parts) -> None:
        layers = parts.layers
        self.scale = LossScale(layers.terms)
        self.states = layers.start(
            LayerState(parts.device, layer, layers.terms, Home(on_host=True, bare=True))
            for layer in layers.layers
        )
        largest = max(self.states, key=lambda state: state.layout.numel)
        self.slot, self.gradients = Slot(largest), GradientRoom(largest)
        slabs = (self.slot.state.weights, self.gradients.slab, parts.ends.current.weights, parts.ends.grads)
        # the part of the peak that a plan computes by arithmetic
        self.known_bytes = sum(slab.nbytes for slab in slabs)

    def forward(self, place: int, xs: list[Passed]) -> list[Passed]:
        self.slot.load(self.states[place])
        return self.states[place].forward(xs)

    def backward(self, place: int, dxs: list[Passed]) -> list[Passed]:
        self.slot.load(self.states[place])
        return self.gradients.backward(self.states[place], dxs)

    def begin(self, settings: Settings) -> None: ...
    def finish(self, settings: Settings) -> Step:
        raise AssertionError("a trial makes no step")

    def rewind(self) -> None: ...
    def is_late(self) -> bool:
        return False

    def settle(self) -> None: ...
    def refetch(self) -> None: ...


class L2LTrainer(UserTraining):
    """L2L: one layer at a time on the device. Several backward passes may sum their gradients before a step.

    `layers`: the model's layers, in the order in which the model calls them. `optimizer`: an AdamW, whose groups and
    settings apply; a schedule may change the settings. `max_norm`: limit of the norm of all gradients together; 0 or
    None: no clipping. `device`: a name; None: cuda if there is a GPU, otherwise cpu. `activations`: the memory where
    the layers' inputs wait for the backward pass, device or host; default: device. Raises ValueError, with a message of
    one line, if the model cannot be trained in this way.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        optimizer: torch.optim.AdamW,
        *,
        max_norm: float | None = None,
        device: str | None = None,
        activations: str | None = None,
    ) -> None:
        home = home_of_boundaries(activations)
        build_kernel()
        super().__init__(model, layers, optimizer, max_norm, device, accumulates=True)
        self._set_up(OneLayerStream, boundaries=home)


class StrongholdTrainer(UserTraining):
    """STRONGHOLD: layers slide through a window, or stay where a placement says (docs/methods-and-placements.md).

    Takes L2LTrainer's arguments, and these. `device_memory`, `host_memory`: limits in bytes; None: no limit. On a GPU
    `device_memory` covers the context and the allocator's reserve, too. Within limits the trainer chooses the placement
    with the most resident layers; if no placement fits, it chooses host for `activations` and tries again. `example`: a
    function that returns the loss of the largest batch; the trainer calls this function in a trial pass for each choice
    of `activations` that it tries. `placement`, `window_size`: the trainer takes these values and chooses nothing. If
    all these arguments are None, every layer is windowed. `accumulates`: True: several backward passes sum their
    gradients before a step, so no update begins before step(). `clipping`: deferred or speculate; None: deferred if
    updates wait for the norm. `disk`: the folder for layers that a placement puts on the disk; None: the system's
    temporary folder.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        optimizer: torch.optim.AdamW,
        *,
        max_norm: float | None = None,
        device: str | None = None,
        example: Callable[[], Tensor] | None = None,
        device_memory: int | None = None,
        host_memory: int | None = None,
        placement: str | None = None,
        window_size: int | None = None,
        clipping: str | None = None,
        accumulates: bool = False,
        disk: str | None = None,
        activations: str | None = None,
    ) -> None:
        home = home_of_boundaries(activations)
        build_kernel()
        layers = list(layers)
        if accumulates and clipping == "speculate":
            raise ValueError(
                "accumulates=True and clipping='speculate' exclude each other: updates wait for step(); try 'deferred'"
            )
        if clipping not in (None, *CLIPPINGS):
            raise ValueError(f"clipping: expected {' or '.join(CLIPPINGS)}, got {clipping!r}")
        if (device_memory or host_memory) and (example is None or not device_memory):
            raise ValueError(
                "expected device_memory and example= (a function that returns a batch's loss) for memory limits; try"
                " both"
            )
        if device_memory and example:
            kind = torch.device(device or default_device()).type
            room = room_within(Budget(device_memory, host_memory), kind)
            too_large = Plan({"activations": device_memory + 1})

            def plan_at(_: str | None, memory: str | None) -> Plan:
                home, sizes = home_of_boundaries(memory), None
                try:
                    limits: dict[str, Any] = {"device_memory": device_memory, "accumulates": accumulates}
                    sizes = measured(model, layers, optimizer, max_norm, device, example, home, **limits)
                except torch.OutOfMemoryError:
                    if home == "host" or activations:  # no other home is left to try
                        raise
                if sizes is None:
                    free_failed_pass(device or default_device())
                    return too_large
                choice = PlacementChoice(
                    sizes,
                    room,
                    window_size,
                    placement=placement,
                    clipping=clipping,
                    disk=disk,
                    activations=home,
                )
                return choice.plan()

            plan = with_homes(plan_at, room, None, activations, ends_may_move=False)
            if short := plan.shortfall(room):
                short += f"; tried, too: {plan.tried}" if plan.tried else ""
                more = "more memory"
                if kind == "cuda" and "device" in plan.lacks(room):
                    least = cuda_budget.budget_bytes(plan.device_bytes, cuda_budget.context_bytes())
                    more = f"device_memory={least}, which covers the GPU's context and a reserve"
                raise ValueError(f"{short}; try another placement, smaller batches, or {more}")
            placement, window_size = plan.options["placement"], plan.options["window_size"]
            disk, home = plan.options.get("disk"), plan.options["activations"]
        super().__init__(model, layers, optimizer, max_norm, device, accumulates=accumulates)
        self._undo.enter_context(capped(self.device, device_memory))
        clipping = (clipping or "deferred") if self.terms.waits_for_norm else None
        num_layers = len(layers)
        kinds = parse(placement or "W", num_layers)
        window = window_size or min(DEFAULT_WINDOW, num_layers)
        if not 1 <= window <= num_layers:
            raise ValueError(f"window_size: expected 1 to {num_layers}, got {window_size}")
        if "D" in kinds:
            disk = str(writable(disk))
        self.placement, self.window_size, self.clipping = placement or f"W{num_layers}", window, clipping
        self.activations = home
        self._set_up(lambda parts: WindowStream(parts, kinds, window, clipping, disk), boundaries=home)


def free_failed_pass(device: str) -> None:
    """Free the memory of a backward pass that raised an error. Autograd's thread of the device frees the pass after
    backward() has raised; another pass through the same thread ends only after that."""
    torch.zeros((), device=device, requires_grad=True).neg().backward()
    gc.collect()


def measured(
    model: nn.Module,
    layers: list[nn.Module],
    optimizer: torch.optim.AdamW,
    max_norm: float | None,
    device: str | None,
    example: Callable[[], Tensor],
    boundaries: str,
    *,
    device_memory: int,
    accumulates: bool,
) -> UserSizes:
    """Return the model's sizes, measured in one forward and backward pass of the example, whose gradients are dropped.
    `boundaries`: the memory that keeps the layers' inputs meanwhile."""
    trial = UserTraining(model, layers, optimizer, max_norm, device, accumulates=accumulates)
    name = trial.device.type
    if name == "cpu":
        raise ValueError(
            "device_memory: expected a device with its own memory, got cpu; leave device_memory out"
        )
    trial._set_up(TrialStream, bare=True, boundaries=boundaries)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        indices = [torch.cuda.current_device()] if name == "cuda" else []
        with trial, capped(trial.device, device_memory), torch.random.fork_rng(indices, device_type="cuda"):
            reset_peaks(name)
            trial.scale(example()).backward()
            peak_bytes = device_peaks(name)["device_allocated"]
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)
        for parameter in trial.user.rest:
            parameter.grad = None
            give(parameter, parameter.detach().cpu())
    states = (trial.ends, *trial.stream.states)
    small = SMALL_BYTES * (sum(len(state.layout.places) for state in states) + NUM_SMALL)
    numels = tuple(state.layout.numel for state in trial.stream.states)
    activations = peak_bytes - trial.stream.known_bytes + small  # type: ignore[attr-defined]
    boundary = max(state.boundary.num_bytes if state.boundary else 0 for state in trial.stream.states)
    ends, waits = trial.ends.layout.numel, trial.terms.waits_for_norm
    sizes = UserSizes(trial.terms.dtype, numels, ends, activations, waits, boundary)
    del trial, states
    gc.collect()  # frees the trial's memory before the training takes its own
    return sizes


def build_kernel() -> None:
    if adamw_kernel.to_build():
        with suppress(Unavailable):  # torch's kernels then make the updates
            adamw_kernel.build()
