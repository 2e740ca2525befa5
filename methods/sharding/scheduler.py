"""Hydra's scheduling problem in the abstract: chains of units, devices that run one unit at a time, and a policy.

A model in training is a chain. Its units (forward, backward or update of one shard) run one after another, each on any
device, without interruption. The policy Sharded-LRTF gives a free device to the waiting model with the longest
remaining time. The result is a list schedule, so Graham's bound holds; for units of equal times the policy is Hu's
rule, which is optimal. This file simulates under a virtual clock; the dispatcher uses the same policies under the real
clock. Needs only the standard library.

Times may be in any unit, the same for all. Sources: Nagrecha and Kumar 2021, arXiv:2110.08633 (Hydra); Graham 1969,
SIAM J. Appl. Math. 17 (list schedules); Hu 1961, Oper. Res. 9; McNaughton 1959, Manage. Sci. 6 (the lower bound can be
reached if units may be interrupted).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from harness.simulation.event_core import Key, PoolUnit, run_pool

Chains = Sequence[Sequence[float]]  # for each model the times of its units, in their order

# A free device takes the waiting model with the smallest key. Among models with equal keys it takes the model that has
# waited longest.
POLICIES: dict[str, Key] = {
    "lrtf": lambda remaining, arrival, draw: -remaining,
    "srtf": lambda remaining, arrival, draw: remaining,
    "fifo": lambda remaining, arrival, draw: arrival,
    "random": lambda remaining, arrival, draw: draw,
}


def policy_key(policy: str) -> Key:
    """Return the key function of the policy of this name. Raises ValueError for an unknown name."""
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    return POLICIES[policy]


class UnitSchedule(NamedTuple):
    makespan: float
    units: list[PoolUnit]  # (model, device, start, end), in the order of starts


def simulate_policy(chains: Chains, num_devices: int, policy: str = "lrtf", seed: int = 0) -> UnitSchedule:
    """Simulate the policy's schedule under a virtual clock. `seed`: the seed of the random policy. Raises ValueError
    for an unknown policy, no device, or a time that is not positive."""
    _check_chains(chains, num_devices)
    units = run_pool(chains, num_devices, policy_key(policy), random.Random(seed).random)
    return UnitSchedule(max(unit.end for unit in units), units)


def lower_bound(chains: Chains, num_devices: int) -> float:
    """Return a makespan that no schedule can beat: the larger of two times. One is the time of all units, divided by
    the number of devices; the other is the time of the longest chain, run without a pause.
    """
    _check_chains(chains, num_devices)
    times = [sum(chain) for chain in chains]
    return max(sum(times) / num_devices, max(times))


def whole_models(chains: Chains) -> list[list[float]]:
    """Return chains in which each model is a single unit. For such chains lrtf is the longest-processing-time rule."""
    return [[sum(chain)] for chain in chains]


def _check_chains(chains: Chains, num_devices: int) -> None:
    if num_devices < 1:
        raise ValueError(f"num_devices: expected at least 1, got {num_devices}")
    if not any(len(chain) for chain in chains):
        raise ValueError("no tasks: expected at least one model with at least one unit")
    shortest = min(min(chain) for chain in chains if len(chain))
    if not shortest > 0:
        raise ValueError(f"expected positive times of units, got {shortest}")
