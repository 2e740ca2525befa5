"""Computes the proved optimum of small scheduling instances with OR-tools' CP-SAT, and the ratio of each scheduling
rule's makespan to this optimum.

A unit is an interval of time in which one device computes, and all devices are alike. Therefore one constraint replaces
the assignment of units to devices: with n devices, at most n units overlap at any time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from methods.sharding.scheduler import POLICIES, lower_bound, simulate_policy, whole_models

SIZES = ((2, 3), (3, 5), (4, 6), (8, 12))  # numbers of devices and models
INSTANCES = 20  # instances of each size
WHOLE = "whole models"


def chain(shards: Sequence[float], minibatches: int) -> list[float]:
    """Return the units of a model in seconds. A backward unit recomputes its shard and takes twice the time of the
    forward unit. The last shard has one unit for forward and backward pass, which takes three times the time of a
    forward unit. `shards`: seconds of each forward unit."""
    *below, last = shards
    return ([*below, 3 * last] + [2 * seconds for seconds in reversed(below)]) * minibatches


def instance(seed: int, num_models: int) -> list[list[int]]:
    """Return the chains of units of random models. Each model has 2 to 4 shards and 2 to 4 minibatches, and the times
    are whole numbers."""
    rng = random.Random(seed)
    shards = ([rng.randint(1, 9) for _ in range(rng.randint(2, 4))] for _ in range(num_models))
    return [[int(unit) for unit in chain(seconds, rng.randint(2, 4))] for seconds in shards]


@functools.cache
def ratios_to_optimum(num_devices: int, num_models: int) -> dict[str, list[float]]:
    """Return ratios of makespan to optimum, by scheduling rule, and under WHOLE for models that are placed whole. There
    is one ratio for each instance whose optimum was proved within the limit of optimum().
    """
    ratios_by_rule: dict[str, list[float]] = {name: [] for name in (*POLICIES, WHOLE)}
    for seed in range(INSTANCES):
        chains = instance(1000 * num_devices + seed, num_models)
        best = optimum(chains, num_devices)
        if best is not None:
            for name in POLICIES:
                ratios_by_rule[name].append(simulate_policy(chains, num_devices, name).makespan / best)
            ratios_by_rule[WHOLE].append(simulate_policy(whole_models(chains), num_devices).makespan / best)
    return ratios_by_rule


def optimum(chains: Sequence[Sequence[int]], num_devices: int, limit: float = 10.0) -> int | None:
    """Return the shortest makespan of chains whose times are whole numbers. Return None if the proof does not end
    within `limit`, in CP-SAT's deterministic time (about seconds), by which a loaded machine proves as many instances
    as an idle one.
    """
    from ortools.sat.python import cp_model

    model, horizon = cp_model.CpModel(), sum(map(sum, chains))
    makespan = model.new_int_var(-int(-lower_bound(chains, num_devices) // 1), horizon, "makespan")
    intervals = []
    for chain in chains:
        end: object = 0
        for seconds in chain:
            start = model.new_int_var(0, horizon, "start")
            intervals.append(model.new_fixed_size_interval_var(start, seconds, "unit"))
            model.add(start >= end)
            end = start + seconds
        model.add(makespan >= end)
    model.add_cumulative(intervals, [1] * len(intervals), num_devices)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
