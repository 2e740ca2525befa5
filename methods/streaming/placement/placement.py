"""Placements and the bytes that a placement needs. A placement is one letter for each layer, written as runs: R2W5S1.
This file does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from harness.base.counted import counted
from harness.core.job import Plan, Workload
from harness.plan.resources import parts_sent, sum_sent
from methods.shared.memory_needs import (
    CHUNK,
    NUM_BUFFERS,
    UPDATE_COPIES,
    VECTOR,
    block_numel,
    shared_numel,
    state_bytes,
    stored_numel,
)

KINDS = {
    "R": "resident, all of it on the device",
    "P": "parked, weights on the device and states on the host",
    "W": "windowed, fetched and updated by the host",
    "S": "streamed, fetched with its states and updated by the device",
    "D": "as W with its states on the disk",
}
ON_DEVICE = "RP"  # kinds of layers whose weights stay on the device
BY_HOST = "PWD"  # kinds of layers that the host updates
BY_RANKS = "RW"  # kinds of layers that training on several ranks can use
CLIPPINGS = ("deferred", "speculate")
BOUNDARY_SLOTS = 2  # device slots for boundaries whose home is the host: one in use, one in transfer
HOMES = ("device", "host")  # the homes that the ends (embedding, head) and the boundaries can have


def parse(text: str, num_layers: int) -> str:
    """Parse a placement into a letter for each layer, bottom first.

    If the last run has no length, it takes all remaining layers. `~S2` at the end spreads two streamed layers evenly
    among the layers above the resident ones at the bottom; `~R2` spreads two more resident layers in the same way.
    Raises ValueError if the text does not place `num_layers`.
    """
    spreads = re.fullmatch(r"(.*)~([RS])(\d+)", text)
    if spreads and int(spreads[3]) < num_layers:
        other_layers = parse(spreads[1], num_layers - int(spreads[3]))
        bottom = len(other_layers) - len(other_layers.lstrip("R"))
        return other_layers[:bottom] + spread(other_layers[bottom:], spreads[2], int(spreads[3]))
    runs = re.findall(r"([A-Z])(\d*)", text)
    if not runs or "".join(map("".join, runs)) != text or not {letter for letter, _ in runs} <= set(KINDS):
        known = ", ".join(f"{letter} ({meaning})" for letter, meaning in KINDS.items())
        raise ValueError(
            f"placement: expected runs of {known}, bottom first, as R2W5S1, R2W or R2W4~S2, got {text!r}"
        )
    placed = sum(int(length or 1) for _, length in runs)
    if runs[-1][1] == "" and placed < num_layers:
        runs[-1] = (runs[-1][0], str(1 + num_layers - placed))
    elif placed != num_layers:
        layers = counted(num_layers, "layer")
        raise ValueError(f"placement {text}: expected the model's {layers}, got {placed}; try another -l")
    return "".join(letter * int(length or 1) for letter, length in runs)


def placement_text(kinds: str) -> str:
    """Format a placement: RRWWW as R2W3, RRSSW as R2W1~S2, RRSRSW as R1W1~S2~R2."""
    bottom = len(kinds) - len(kinds.lstrip("R"))
    letter, below, above = "S", bottom, kinds[bottom:].count("R")
    if above:  # the lowest of the spread R follow the R at the bottom directly
        letter, below = "R", bottom - math.ceil(above / max(1, len(kinds) - bottom - above - 1))
    others = kinds[max(below, 0) :].replace(letter, "")
    number = len(kinds) - below - len(others)
    if (
        below >= 0
        and others
        and number
        and "R" not in others
        and spread(others, letter, number) == kinds[below:]
    ):
        return f"{placement_text(kinds[:below] + others)}~{letter}{number}"
    return _runs(kinds)


def shrink(kinds: str, num_layers: int) -> str:
    """Return a placement of fewer layers with the same shares of kinds: every kind occurs at least once, if there are
    enough layers."""
    letters = [kinds[i * len(kinds) // num_layers] for i in range(num_layers)]
    for kind in dict.fromkeys(kinds):
        repeatable = [i for i, other in enumerate(letters) if letters.count(other) > 1]
        if kind not in letters and repeatable:
            letters[repeatable[-1]] = kind
            letters.sort(key=kinds.index)
    return "".join(letters)


def _runs(kinds: str) -> str:
    return "".join(f"{run[1]}{len(run[0])}" for run in re.finditer(r"(.)\1*", kinds))


def spread(kinds: str, letter: str, number: int) -> str:
    """Spread `number` layers of kind `letter` evenly among the layers `kinds`, whose last layer stays on top."""
    if not number:
        return kinds
    total = len(kinds) + number
    # for each spread layer, the number of other layers below it
    below = [place * total // number - place for place in range(number)]
    return "".join(letter + kinds[start:end] for start, end in pairwise([*below, len(kinds)]))


class UserSizes(NamedTuple):
    """The sizes of a user's model that a plan needs, in place of a Workload. `activations`: measured bytes of device
    memory, without the memory for the layers' weights, gradients and states. `boundary_bytes`: measured bytes of a
    layer's inputs; 0 if the device keeps the inputs."""

    dtype: str
    numels: tuple[int, ...]  # number of parameters of each layer, bottom first
    end_params: int
    activations: int
    waits_for_norm: bool
    boundary_bytes: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.numels)

    @property
    def layer_params(self) -> int:
        """Return the number of parameters of the largest layer, for which slots have room."""
        return max(self.numels)

    @property
    def weight_bytes(self) -> int:
        return 4 if self.dtype == "fp32" else 2


Sizes = Workload | UserSizes


class Ring(NamedTuple):
    """Layers, bottom first, that take turns in `num_slots` slots."""

    layers: list[int]
    num_slots: int

    @property
    def above(self) -> dict[int, int]:
        """Return a dictionary: for each layer that leaves its slot in the forward pass, the layer that takes the slot
        next."""
        return dict(zip(self.layers, self.layers[self.num_slots :], strict=False))


def rings(kinds: str, window_size: int) -> tuple[Ring, Ring]:
    """Return two rings: the window of layers whose weights alone travel (W and D), and the window of streamed layers
    (S). The second ring has at most two slots, for the current layer and for the next layer."""
    alone, streamed = ([i for i, kind in enumerate(kinds) if kind in group] for group in ("WD", "S"))
    return Ring(alone, min(window_size, len(alone))), Ring(streamed, min(window_size, 2, len(streamed)))


def num_gradients(kinds: str, window_size: int, *, waits: bool) -> int:
    """Return the number of gradient rooms on the device: one for the gradient that is being computed, and one for the
    gradient on its way home. If updates do not wait for the norm (`waits` is False), resident layers use these rooms,
    too."""
    return max(min(window_size, 2, len(kinds) - kinds.count("R")), int("R" in kinds and not waits))


def num_boundaries(num_layers: int) -> int:
    """Return the number of boundaries that the device has room for, if boundaries are on the host."""
    return min(BOUNDARY_SLOTS, num_layers)


def params_of(workload: Sizes, kinds: str) -> dict[str, int]:
    """Return, for each kind, the number of parameters of all its layers."""
    if isinstance(workload, UserSizes):
        pairs = [*zip(kinds, workload.numels, strict=True)]
        return {kind: sum(numel for layer_kind, numel in pairs if layer_kind == kind) for kind in KINDS}
    # a search may ask for a million layers
    return {kind: kinds.count(kind) * workload.layer_params for kind in KINDS}


def ends_on_host(workload: Workload, home: str | None, num_ranks: int = 1) -> list[int]:
    """Return the numbers of parameters of the embedding and of the head if `home` is the host; for any other `home`,
    an empty list. Raises ValueError for an unknown home, and for the host with several ranks."""
    if home not in (None, *HOMES):
        raise ValueError(f"ends: expected {' or '.join(HOMES)}, got {home!r}; try --option ends=device")
    if home == "host" and num_ranks > 1:
        raise ValueError(
            f"ends: expected device with --ranks {num_ranks}, got host; try --option ends=device"
        )
    return workload.anatomy.end_parts if home == "host" else []


def home_of_boundaries(home: str | None) -> str:
    """Return the memory that keeps boundaries for the backward pass, "device" or "host"; if `home` is None, "device".
    Raises ValueError for any other name."""
    if home not in (None, *HOMES):
        raise ValueError(
            f"activations: expected {' or '.join(HOMES)}, got {home!r}; try --option activations=host"
        )
    return home or "device"


class Activations(NamedTuple):
    """Bytes of a layer's inputs (`boundary`), of a step's small tensors, and of all activations at their peak."""

    boundary: int
    small: int
    peak: int


@dataclass(frozen=True)
class PlacedLayers:
    """Layers of these kinds, and the bytes that they need. `workload`: the workload of one rank; with several ranks,
    each rank has its part of every layer that is not resident. `clipping`: "deferred" or "speculate"; None: updates
    do not wait for the norm. `activations`: the memory that keeps the layers' inputs for the backward pass.
    `hosted_ends`: parameters of the parts of embedding and head that live on the host; empty: both are on the
    device."""

    workload: Sizes
    kinds: str
    window_size: int
    clipping: str | None = "deferred"
    num_ranks: int = 1
    activations: str = "device"
    hosted_ends: Sequence[int] = ()

    def plan(self) -> Plan:
        """Return the plan of these layers. Raises ValueError if some rank's part of a layer would hold nothing but
        padding."""
        layer = self.workload.layer_params
        if self.num_ranks > 1 and layer < VECTOR * self.num_ranks**2:
            raise ValueError(
                f"--ranks: expected at most {math.isqrt(layer // VECTOR)} for layers of {layer} parameters, got"
                f" {self.num_ranks}; try a larger -h"
            )
        device, host = self._device_bytes(), self._host_bytes()
        if self.workload.dtype != "fp32":
            self._add_update_copies(device, host)
        if num_homes := self.num_hosted + len(self.hosted_ends):
            # the clip factor, 512 bytes, and each home's number of steps, 4 bytes
            host["optimizer"] += 512 + 4 * num_homes
        disk = {"optimizer": self.count["D"] * self.stored_bytes} if self.count["D"] else {}
        moved = self._moved_bytes() + 2 * host.get("activations", 0)
        return Plan(device=device, host=host, disk=disk, moved_bytes=moved, exchanged=self._exchanged_bytes())

    @cached_property
    def count(self) -> dict[str, int]:
        """Number of layers of each kind."""
        return {kind: self.kinds.count(kind) for kind in KINDS}

    @cached_property
    def params(self) -> dict[str, int]:
        return params_of(self.workload, self.kinds)

    @cached_property
    def bytes_at_home(self) -> dict[str, int]:
        """Bytes per parameter of weights, gradients and the optimizer's state."""
        return state_bytes(self.workload)  # type: ignore[arg-type]  # state_bytes() reads the dtype alone

    @property
    def updated_bytes(self) -> int:
        """Bytes per parameter that an update changes."""
        return self.bytes_at_home["weights"] + self.bytes_at_home["optimizer"]

    @property
    def stored_bytes(self) -> int:
        """Bytes of a layer on the disk."""
        return self.bytes_at_home["optimizer"] * stored_numel(self.workload.layer_params)

    @cached_property
    def num_hosted(self) -> int:
        """Number of layers whose home is not the device."""
        return len(self.kinds) - self.count["R"]

    @cached_property
    def numel_at_home(self) -> int:
        """Elements of a layer, or of a rank's part of it, at home."""
        return shared_numel(self.workload.layer_params, self.num_ranks) // self.num_ranks

    @property
    def num_windowed(self) -> int:
        return self.count["W"] + self.count["D"]

    @property
    def num_windowed_slots(self) -> int:
        return min(self.window_size, self.num_windowed)

    @property
    def num_streamed_slots(self) -> int:
        return min(self.window_size, 2, self.count["S"])

    @property
    def ends_on_device(self) -> int:
        """Number of the parameters of embedding and head that live on the device."""
        return 0 if self.hosted_ends else self.workload.end_params

    @property
    def ends_numel(self) -> int:
        """Elements of the device memory that embedding and head use in turn if they live on the host: the elements of
        the larger of the two; 0 if they live on the device."""
        return max(self.hosted_ends, default=0)

    @property
    def num_kept(self) -> int:
        """Number of layers whose inputs fit the device's memory for boundaries."""
        return len(self.kinds) if self.activations == "device" else num_boundaries(len(self.kinds))

    @cached_property
    def activation_bytes(self) -> Activations:
        workload = self.workload
        if isinstance(workload, UserSizes):  # at an update all measured activations may still be in memory
            return Activations(workload.activations, 0, workload.activations)
        # While one micro-batch computes, the other micro-batches wait in memory. At the loss each micro-batch keeps its
        # output and the output's gradient; at the top layers each also keeps its input and the input's gradient.
        boundary = workload.boundary_bytes
        others = boundary - boundary // workload.micro_batches
        at_head = self.num_kept * boundary + workload.head_bytes + 2 * others
        at_layer = (self.num_kept - 1) * boundary + workload.layer_bytes + 4 * others
        # Small tensors matter when a device is nearly full: gradient norms and other scalars, 512 bytes each, and the
        # statistics that attention keeps for its backward pass, 8 bytes for each head and token.
        num_tensors = len(workload.anatomy.layer) * workload.num_layers
        small = 512 * (num_tensors + 32) + 8 * workload.batch_size * workload.num_heads * workload.seq_len
        small += workload.given_bytes
        return Activations(boundary, small, max(at_head, at_layer) + small)

    def _device_bytes(self) -> dict[str, int]:
        size, on_device = self.workload.weight_bytes, self.ends_on_device + self.params["R"]
        device = {kind: per_param * on_device for kind, per_param in self.bytes_at_home.items()}
        # If embedding and head live on the host, they use the same memory on the device in turn. This memory has room
        # for the weights and the gradient of the larger of the two.
        device["weights"] += size * (self.params["P"] + self.ends_numel)
        device["gradients"] += size * self.ends_numel - (0 if self.clipping else size * self.params["R"])
        waits = self.clipping is not None
        num_rooms = num_gradients(self.kinds, self.window_size, waits=waits)
        slots = size * (self.num_windowed_slots + num_rooms)
        slots += (self.updated_bytes + (size if waits else 0)) * self.num_streamed_slots
        device["buffers"] = slots * self.numel_at_home * self.num_ranks
        device["activations"] = self.activation_bytes.peak
        return device

    def _host_bytes(self) -> dict[str, int]:
        workload, params, at_home = self.workload, self.params, self.bytes_at_home
        if self.num_ranks == 1:
            numel = sum(params.values()) - params["R"] + sum(self.hosted_ends)
        else:
            numel = self.num_hosted * self.numel_at_home
        host = {kind: per_param * numel for kind, per_param in at_home.items()}
        host["optimizer"] -= at_home["optimizer"] * params["D"]
        host["gradients"] -= 0 if self.clipping else at_home["gradients"] * params["S"]
        if self.num_kept < len(self.kinds):
            host["activations"] = workload.boundary_bytes * (len(self.kinds) - self.num_kept)
        if self.num_ranks > 1:
            # gloo gathers and sums in copies of a slab, one for each of two threads; NCCL makes no copies
            host["buffers"] = 2 * workload.weight_bytes * self.numel_at_home * self.num_ranks
        if self.count["D"]:
            host["buffers"] = min(NUM_BUFFERS, self.count["D"]) * self.stored_bytes
        if self.clipping == "speculate":
            host["optimizer"] += self.updated_bytes * (sum(params.values()) - params["R"] - params["D"])
        return host

    def _add_update_copies(self, device: dict[str, int], host: dict[str, int]) -> None:
        """Add the fp32 copies that updates make without a compiled kernel, at a time when boundaries are in memory,
        too."""
        dtype, layer = self.workload.dtype, self.workload.layer_params
        copied, block = UPDATE_COPIES[dtype], block_numel(dtype)
        boundary, small, peak = self.activation_bytes
        resident = layer if self.count["R"] else 0
        moments = [(copied * min(block, max(self.ends_on_device, resident)), boundary)]
        below = max(self.kinds.rfind("S"), -1 if self.clipping else self.kinds.rfind("R"))
        if below >= 0:  # a deferred update of this layer runs in the forward pass, other updates in backward
            others = min(below, self.num_kept)
            kept = min(boundary * (others + (1 if self.clipping == "deferred" else 3)), peak)
            moments.append((copied * min(block, layer), kept))
        updated, kept = max(moments, key=sum)
        if updated + kept + small > peak:
            device["gradients"] += updated
            device["activations"] = kept + small
        at_home = self.numel_at_home if self.num_hosted - self.count["S"] else 0
        host["gradients"] += copied * min(CHUNK, max(at_home, self.ends_numel))

    def _moved_bytes(self) -> int:
        """Return the bytes of a step's copies, without boundaries. The weights of a travelling layer are fetched twice
        a step, but only once if the layer is still in a slot when the backward pass begins. The gradient goes home
        once; the gradient of a layer of kind S only if its update may have to wait for the norm, and if the update is
        deferred, it comes in once more."""
        size = self.workload.weight_bytes
        gradient = 0 if self.clipping is None else size * (2 if self.clipping == "deferred" else 1)
        moved = size * (2 * self.count["P"] + 3 * self.num_windowed - self.num_windowed_slots)
        moved += (size + 2 * self.updated_bytes + gradient) * self.count["S"] - size * self.num_streamed_slots
        return moved * self.numel_at_home + 2 * size * sum(self.hosted_ends)

    def _exchanged_bytes(self) -> dict[str, float]:
        """Return the bytes that a rank sends. Ranks gather a layer when it is fetched, and sum its gradient in parts.
        Gradients of resident layers and ends are summed whole."""
        size = self.workload.weight_bytes
        whole = size * self.numel_at_home * self.num_ranks
        fetches = 2 * self.num_windowed - self.num_windowed_slots
        alike = sum_sent(size * (self.workload.end_params + self.params["R"]), self.num_ranks)
        return {
            "gathers": parts_sent(fetches * whole, self.num_ranks),
            "sums": parts_sent(self.num_windowed * whole, self.num_ranks) + alike,
        }
