"""Placements and the bytes that a placement needs. A placement is one letter for each layer, written as runs: R2W5S1.
This file does not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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

    A last run without a length takes all layers that are left. `~S2` at the end spreads two streamed layers evenly
    among the layers above the resident ones at the bottom; `~R2` spreads two more resident layers in the same way.
    Raises ValueError if the text does not place `num_layers`.
    """
    spreads = re.fullmatch(r"(.*)~([RS])(\d+)", text)
    if spreads and int(spreads[3]) < num_layers:
        others = parse(spreads[1], num_layers - int(spreads[3]))
        bottom = len(others) - len(others.lstrip("R"))
        return others[:bottom] + spread(others[bottom:], spreads[2], int(spreads[3]))
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


def text_of(kinds: str) -> str:
    """Format a placement: RRWWW as R2W3, RRSSW as R2W1~S2, RRSRSW as R1W1~S2~R2."""
    bottom = len(kinds) - len(kinds.lstrip("R"))
    letter, below, above = "S", bottom, kinds[bottom:].count("R")
    if above:  # the lowest spread R look as if they were among the R at the bottom
        letter, below = "R", bottom - math.ceil(above / max(1, len(kinds) - bottom - above - 1))
    rest = kinds[max(below, 0) :].replace(letter, "")
    number = len(kinds) - below - len(rest)
    if below >= 0 and rest and number and "R" not in rest and spread(rest, letter, number) == kinds[below:]:
        return f"{text_of(kinds[:below] + rest)}~{letter}{number}"
    return _runs(kinds)


def shrink(kinds: str, num_layers: int) -> str:
    """Return a placement of fewer layers with the same shares of kinds: every kind occurs at least once, if there are
    enough layers."""
    found = [kinds[i * len(kinds) // num_layers] for i in range(num_layers)]
    for kind in dict.fromkeys(kinds):
        several = [i for i, other in enumerate(found) if found.count(other) > 1]
        if kind not in found and several:
            found[several[-1]] = kind
            found.sort(key=kinds.index)
    return "".join(found)


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
        return {kind: sum(numel for own, numel in pairs if own == kind) for kind in KINDS}
    # a search may ask for a million layers
    return {kind: kinds.count(kind) * workload.layer_params for kind in KINDS}


def ends_on_host(workload: Workload, home: str | None, num_ranks: int = 1) -> list[int]:
    """Return the number of parameters of each part of the ends if `home` is the host; for any other `home`, an empty
    list. Raises ValueError for an unknown home, and for the host with several ranks."""
    if home not in (None, *HOMES):
        raise ValueError(f"ends: expected {' or '.join(HOMES)}, got {home!r}; try --option ends=device")
    if home == "host" and num_ranks > 1:
        raise ValueError(
            f"ends: expected device with --ranks {num_ranks}, got host; try --option ends=device"
        )
    return workload.anatomy.end_parts if home == "host" else []


def home_of_boundaries(asked: str | None) -> str:
    """Return the memory that keeps boundaries for the backward pass, "device" or "host"; if `asked` is None, "device".
    Raises ValueError for any other name."""
    if asked not in (None, *HOMES):
        raise ValueError(
            f"activations: expected {' or '.join(HOMES)}, got {asked!r}; try --option activations=host"
        )
    return asked or "device"


def placed_plan(
    workload: Sizes,
    kinds: str,
    window_size: int,
    clipping: str | None = "deferred",
    num_ranks: int = 1,
    activations: str = "device",
    hosted_ends: Sequence[int] = (),
) -> Plan:
    """Return the plan of layers of these kinds. `workload`: the workload of one rank; with several ranks, each rank
    keeps its part of every layer that is not resident. `clipping`: "deferred" or "speculate"; None: updates do not wait
    for the norm. `activations`: the memory that keeps the layers' inputs for the backward pass. `hosted_ends`:
    parameters of the parts of embedding and head that live on the host; empty: both are on the device. Raises
    ValueError if some rank's part of a layer would hold nothing but padding.

    The weights of a travelling layer are fetched twice a step, but only once if the layer is still in a slot when the
    backward pass begins. The gradient goes home once; the gradient of a layer of kind S only if its update may have to
    wait for the norm.
    """
    size, layer = workload.weight_bytes, workload.layer_params
    if num_ranks > 1 and layer < VECTOR * num_ranks**2:
        raise ValueError(
            f"--ranks: expected at most {math.isqrt(layer // VECTOR)} for layers of {layer} parameters, got"
            f" {num_ranks}; try a larger -h"
        )
    count, params = {kind: kinds.count(kind) for kind in KINDS}, params_of(workload, kinds)
    at_home = state_bytes(workload)  # type: ignore[arg-type]  # state_bytes() reads the dtype alone
    states = at_home["weights"] + at_home["optimizer"]  # bytes that an update changes
    num_windowed = count["W"] + count["D"]
    windowed_slots, streamed_slots = min(window_size, num_windowed), min(window_size, 2, count["S"])
    hosted, home = len(kinds) - count["R"], shared_numel(layer, num_ranks) // num_ranks

    # Both parts of ends on the host take turns in device memory for the weights and the gradient of the larger part.
    ends_here, room = 0 if hosted_ends else workload.end_params, max(hosted_ends, default=0)
    device = {kind: each * (ends_here + params["R"]) for kind, each in at_home.items()}
    device["weights"] += size * (params["P"] + room)
    device["gradients"] += size * room - (0 if clipping else size * params["R"])
    slots = size * (windowed_slots + num_gradients(kinds, window_size, waits=clipping is not None))
    slots += (states + (size if clipping else 0)) * streamed_slots
    device["buffers"] = slots * home * num_ranks
    num_kept = len(kinds) if activations == "device" else num_boundaries(len(kinds))
    boundary, small, device["activations"] = _activations(workload, num_kept)

    at_home_numel = sum(params.values()) - params["R"] + sum(hosted_ends) if num_ranks == 1 else hosted * home
    host = {kind: each * at_home_numel for kind, each in at_home.items()}
    on_disk = at_home["optimizer"] * stored_numel(layer)
    host["optimizer"] -= at_home["optimizer"] * params["D"]
    host["gradients"] -= 0 if clipping else at_home["gradients"] * params["S"]
    if num_kept < len(kinds):
        host["activations"] = workload.boundary_bytes * (len(kinds) - num_kept)
    if num_ranks > 1:
        # gloo gathers and sums in copies of a slab, one for each of two threads; NCCL makes no copies
        host["buffers"] = 2 * size * home * num_ranks
    if count["D"]:
        host["buffers"] = min(NUM_BUFFERS, count["D"]) * on_disk
    if clipping == "speculate":
        host["optimizer"] += states * (sum(params.values()) - params["R"] - params["D"])
    if workload.dtype != "fp32":
        # Without a compiled kernel an update makes fp32 copies at a time when boundaries are in memory, too.
        each, block = UPDATE_COPIES[workload.dtype], block_numel(workload.dtype)
        updates = [(each * min(block, max(ends_here, layer if count["R"] else 0)), boundary)]
        below = max(kinds.rfind("S"), -1 if clipping else kinds.rfind("R"))
        if below >= 0:  # a deferred update of this layer runs in the forward pass, other updates in backward
            others = min(below, num_kept)
            kept = min(boundary * (others + (1 if clipping == "deferred" else 3)), device["activations"])
            updates.append((each * min(block, layer), kept))
        updated, kept = max(updates, key=sum)
        if updated + kept + small > device["activations"]:
            device["gradients"] += updated
            device["activations"] = kept + small
        host["gradients"] += each * min(CHUNK, max(home if hosted - count["S"] else 0, room))

    if num_homes := hosted + len(hosted_ends):
        # the clip factor, 512 bytes, and each home's number of steps, 4 bytes
        host["optimizer"] += 512 + 4 * num_homes
    # S's gradient goes out and comes in
    waits = 0 if clipping is None else size * (2 if clipping == "deferred" else 1)
    moved = size * (2 * count["P"] + 3 * num_windowed - windowed_slots)
    moved += (2 * size + (states - size) + states + waits) * count["S"] - size * streamed_slots
    disk = {"optimizer": count["D"] * on_disk} if count["D"] else {}
    # Ranks gather a layer when it is fetched, and sum its gradient in parts. Gradients of resident layers and ends are
    # summed whole.
    fetches, whole = 2 * num_windowed - windowed_slots, size * home * num_ranks
    alike = sum_sent(size * (workload.end_params + params["R"]), num_ranks)
    sent = {
        "gathers": parts_sent(fetches * whole, num_ranks),
        "sums": parts_sent(num_windowed * whole, num_ranks) + alike,
    }
    moved = moved * home + 2 * size * sum(hosted_ends) + 2 * host.get("activations", 0)
    return Plan(device=device, host=host, disk=disk, moved_bytes=moved, exchanged=sent)


def _activations(workload: Sizes, num_kept: int) -> tuple[int, int, int]:
    """Return the bytes of a layer's inputs, of a step's small tensors, and of all activations at their peak, if the
    device keeps the inputs of `num_kept` layers."""
    if isinstance(workload, UserSizes):  # at an update all measured activations may still be in memory
        return workload.activations, 0, workload.activations
    # While one micro-batch computes, the other micro-batches wait in memory. At the loss each micro-batch keeps its
    # output and the output's gradient; at the top layers each also keeps its input and the input's gradient.
    boundary = workload.boundary_bytes
    others = boundary - boundary // workload.micro_batches
    at_head = num_kept * boundary + workload.head_bytes + 2 * others
    at_layer = (num_kept - 1) * boundary + workload.layer_bytes + 4 * others
    # Small tensors matter when a device is nearly full: gradient norms and other scalars, 512 bytes each, and the
    # statistics that attention keeps for its backward pass, 8 bytes for each head and token.
    num_tensors = len(workload.anatomy.layer) * workload.num_layers
    small = 512 * (num_tensors + 32) + 8 * workload.batch_size * workload.num_heads * workload.seq_len
    small += workload.given_bytes
    return boundary, small, max(at_head, at_layer) + small
