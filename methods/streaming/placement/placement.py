"""Placements: one letter for each layer, written as runs: R2W5S1. This file does not import torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from harness.base.console import counted
from harness.core.job import Workload

KINDS = {
    "R": "resident, all of it on the device",
    "P": "parked, weights on the device and states on the host",
    "W": "windowed, fetched and updated by the host",
    "S": "streamed, fetched with its states and updated by the device",
    "D": "as W with its states on the disk",
}
ON_DEVICE = "RP"  # kinds of layers whose weights stay on the device
BY_HOST = "PWD"  # kinds of layers that the host updates
RESIDENT_AND_WINDOWED = "RW"  # kinds of layers that training on several ranks, and frozen layers, can use
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
        kinds_text = ", ".join(f"{letter} ({meaning})" for letter, meaning in KINDS.items())
        raise ValueError(
            f"placement: expected runs of {kinds_text}, bottom first, as R2W5S1, R2W or R2W4~S2, got {text!r}"
        )
    num_placed = sum(int(length or 1) for _, length in runs)
    if runs[-1][1] == "" and num_placed < num_layers:
        runs[-1] = (runs[-1][0], str(1 + num_layers - num_placed))
    elif num_placed != num_layers:
        layers = counted(num_layers, "layer")
        raise ValueError(f"placement {text}: expected the model's {layers}, got {num_placed}; try another -l")
    return "".join(letter * int(length or 1) for letter, length in runs)


def placement_text(kinds: str) -> str:
    """Format a placement: RRWWW as R2W3, RRSSW as R2W1~S2, RRSRSW as R1W1~S2~R2."""
    bottom = len(kinds) - len(kinds.lstrip("R"))
    spread_kind, num_below, num_spread_above = "S", bottom, kinds[bottom:].count("R")
    if num_spread_above:  # the lowest of the spread R follow the R at the bottom directly
        num_others_above = len(kinds) - bottom - num_spread_above
        spread_kind, num_below = "R", bottom - math.ceil(num_spread_above / max(1, num_others_above - 1))
    other_kinds = kinds[max(num_below, 0) :].replace(spread_kind, "")
    num_spread = len(kinds) - num_below - len(other_kinds)
    if (
        num_below >= 0
        and other_kinds
        and num_spread
        and "R" not in other_kinds
        and spread(other_kinds, spread_kind, num_spread) == kinds[num_below:]
    ):
        return f"{placement_text(kinds[:num_below] + other_kinds)}~{spread_kind}{num_spread}"
    return _runs(kinds)


def shrink(kinds: str, num_layers: int) -> str:
    """Return a placement of fewer layers with the same shares of kinds: every kind occurs at least once, if there are
    enough layers."""
    kept_kinds = [kinds[i * len(kinds) // num_layers] for i in range(num_layers)]
    for kind in dict.fromkeys(kinds):
        replaceable_indices = [i for i, kept_kind in enumerate(kept_kinds) if kept_kinds.count(kept_kind) > 1]
        if kind not in kept_kinds and replaceable_indices:
            kept_kinds[replaceable_indices[-1]] = kind
            kept_kinds.sort(key=kinds.index)
    return "".join(kept_kinds)


def _runs(kinds: str) -> str:
    return "".join(f"{run[1]}{len(run[0])}" for run in re.finditer(r"(.)\1*", kinds))


def spread(kinds: str, letter: str, num_spread: int) -> str:
    """Spread `num_spread` layers of kind `letter` evenly among the layers `kinds`, whose last layer stays on top."""
    if not num_spread:
        return kinds
    num_layers = len(kinds) + num_spread
    # for each spread layer, the number of other layers below it
    nums_below = [index * num_layers // num_spread - index for index in range(num_spread)]
    return "".join(letter + kinds[start:end] for start, end in pairwise([*nums_below, len(kinds)]))


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
    weights_only_layers = [i for i, kind in enumerate(kinds) if kind in "WD"]
    streamed_layers = [i for i, kind in enumerate(kinds) if kind == "S"]
    window = Ring(weights_only_layers, min(window_size, len(weights_only_layers)))
    return window, Ring(streamed_layers, min(window_size, 2, len(streamed_layers)))


def num_gradient_rooms(kinds: str, window_size: int, *, waits: bool) -> int:
    """Return the number of gradient rooms on the device: one for the gradient that is being computed, and one for the
    gradient on its way home. If updates do not wait for the norm (`waits` is False), resident layers use these rooms,
    too."""
    return max(min(window_size, 2, len(kinds) - kinds.count("R")), int("R" in kinds and not waits))


def num_boundaries(num_layers: int) -> int:
    """Return the number of boundaries that the device has room for, if boundaries are on the host."""
    return min(BOUNDARY_SLOTS, num_layers)


def with_frozen(kinds: str, are_frozen: Iterable[bool]) -> str:
    """Return the kinds, with a W in place of S and D for each frozen layer, which has no state to take along."""
    pairs = zip(kinds, are_frozen, strict=True)
    return "".join("W" if is_frozen and kind in "SD" else kind for kind, is_frozen in pairs)


def ends_on_host(workload: Workload, home: str | None, num_ranks: int = 1) -> list[int]:
    """Return the numbers of parameters of the embedding and of the head if `home` is the host; for any other `home`,
    an empty list. Raises ValueError for an unknown home, and for the host with several ranks."""
    if home not in (None, *HOMES):
        raise ValueError(f"ends: expected {' or '.join(HOMES)}, got {home!r}; try --option ends=device")
    if home == "host" and num_ranks > 1:
        raise ValueError(
            f"ends: expected device with --ranks {num_ranks}, got host; try --option ends=device"
        )
    if home == "host" and workload.lora:
        raise ValueError("ends: expected device with --lora, got host; try --option ends=device")
    return workload.anatomy.end_parts if home == "host" else []


def home_of_boundaries(home: str | None) -> str:
    """Return the memory that keeps boundaries for the backward pass, "device" or "host"; if `home` is None, "device".
    Raises ValueError for any other name."""
    if home not in (None, *HOMES):
        raise ValueError(
            f"activations: expected {' or '.join(HOMES)}, got {home!r}; try --option activations=host"
        )
    return home or "device"
