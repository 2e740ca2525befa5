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

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

from harness.core.method import Unavailable
from harness.devices.budgets import capped
from methods.offload import adamw_kernel
from methods.shared.memory_needs import writable_folder
from methods.streaming.placement.choice import DEFAULT_WINDOW
from methods.streaming.placement.placement import (
    CLIPPINGS,
    home_of_boundaries,
    parse,
    placement_text,
    with_frozen,
)
from methods.streaming.users.fitting import MemoryLimits, PlacementOptions, fitting
from methods.streaming.users.streams import OneLayerStream, WindowStream
from methods.streaming.users.training import Script, UserTraining


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
        super().__init__(
            Script(model, list(layers), optimizer, max_norm, device or default_device(), accumulates=True)
        )
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
        home_of_boundaries(activations)  # refuses an unknown name before the kernel is compiled
        build_kernel()
        script = Script(model, list(layers), optimizer, max_norm, device or default_device(), accumulates)
        options = PlacementOptions(placement, window_size, clipping, disk, activations)
        _check_clipping(clipping, accumulates=accumulates)
        if (device_memory or host_memory) and (example is None or not device_memory):
            raise ValueError(
                "expected device_memory and example= (a function that returns a batch's loss) for memory limits; try"
                " both"
            )
        if device_memory and example:
            options = fitting(script, options, MemoryLimits(device_memory, host_memory, example))
        super().__init__(script)
        self._undo.enter_context(capped(self.device, device_memory))
        self._stream_by(options)

    def _stream_by(self, options: PlacementOptions) -> None:
        num_layers = len(self.user.layers)
        kinds = with_frozen(parse(options.placement or "W", num_layers), self.user.are_frozen)
        window = options.window_size or min(DEFAULT_WINDOW, num_layers)
        if not 1 <= window <= num_layers:
            raise ValueError(f"window_size: expected 1 to {num_layers}, got {options.window_size}")
        disk = str(writable_folder(options.disk)) if "D" in kinds else options.disk
        clipping = (options.clipping or "deferred") if self.terms.waits_for_norm else None
        self.placement, self.window_size = placement_text(kinds), window
        self.clipping, self.activations = clipping, home_of_boundaries(options.activations)
        self._set_up(
            lambda parts: WindowStream(parts, kinds, window, clipping, disk), boundaries=self.activations
        )


def _check_clipping(clipping: str | None, *, accumulates: bool) -> None:
    if accumulates and clipping == "speculate":
        raise ValueError(
            "accumulates=True and clipping='speculate' exclude each other: updates wait for step(); try 'deferred'"
        )
    if clipping not in (None, *CLIPPINGS):
        raise ValueError(f"clipping: expected {' or '.join(CLIPPINGS)}, got {clipping!r}")


def build_kernel() -> None:
    if adamw_kernel.to_build():
        with suppress(Unavailable):  # torch's kernels then make the updates
            adamw_kernel.build()


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
