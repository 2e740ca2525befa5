"""The proved optimum of small scheduling instances, by OR-tools' CP-SAT: the extra `optimum` of pyproject.toml.

Units are intervals and devices are alike, so a capacity constraint replaces the assignment of units to devices: where
at most n intervals overlap at any time, n devices suffice.
"""

from __future__ import annotations

from collections.abc import Sequence

from methods._scheduler import lower_bound


def optimum(chains: Sequence[Sequence[int]], num_devices: int, limit_seconds: float = 10.0) -> int | None:
    """The shortest makespan there is, for times in whole numbers; None where the limit passes before it is proved.

    Raises ValueError where OR-tools is missing.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ValueError("the proved optimum needs OR-tools: pip install '.[optimum]'") from error
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
    solver.parameters.max_time_in_seconds = limit_seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
