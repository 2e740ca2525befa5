"""The simplex method against scipy's, on programs such as placements make."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linprog

from methods.streaming.linear_program import LinearProgram

WITHIN = 1e-6


def program(seed: int) -> tuple[np.ndarray, np.ndarray, list[float], int, np.random.Generator]:
    """Rows of time in one or two pools, rows of memory, and a number of layers; in half of them one memory is small."""
    draw = np.random.default_rng(seed)
    kinds, num_rows, pools, memories = (int(draw.integers(*ends)) for ends in ((2, 7), (2, 18), (1, 3), (0, 4)))
    layers = int(draw.integers(1, 200)) if seed % 3 else 2**20
    times = draw.random((num_rows, kinds)) * (draw.random((num_rows, kinds)) > 0.4)
    of_pool = -np.eye(pools)[draw.integers(0, pools, num_rows)]
    bytes_each = draw.random((memories, kinds)) * (draw.random((memories, kinds)) > 0.3)
    upper = np.vstack([np.hstack([times, of_pool]), np.hstack([bytes_each, np.zeros((memories, pools))])])
    limits = np.concatenate(
        [-draw.random(num_rows), layers * (draw.random(memories) * 0.8 - 0.05 * draw.random(memories))]
    )
    return upper, limits, [1.0] * kinds + [0.0] * pools, layers, draw


@pytest.mark.parametrize("seed", range(150))
def test_the_least_is_scipys_and_so_is_that_within_a_limit_added_later(seed: int) -> None:
    upper, limits, equal, layers, draw = program(seed)
    time = [1.0 - each for each in equal]
    other = [float(number) * each for number, each in zip(draw.random(len(equal)), equal, strict=True)]
    known = linprog(time, A_ub=upper, b_ub=limits, A_eq=[equal], b_eq=[layers])
    made = LinearProgram(upper.tolist(), limits.tolist(), equal, layers)
    assert made.is_feasible == (known.status == 0)
    if not made.is_feasible:
        return
    least, x = made.least(time)
    assert least == pytest.approx(known.fun, rel=WITHIN)
    made.limit(time, 1.02 * least)
    second, x = made.least(other)
    known = linprog(other, A_ub=[*upper, time], b_ub=[*limits, 1.02 * known.fun], A_eq=[equal], b_eq=[layers])
    assert second == pytest.approx(known.fun, rel=WITHIN, abs=WITHIN)
    assert (upper @ x <= limits + WITHIN * layers).all() and sum(x * equal) == pytest.approx(layers) and (x >= 0).all()


def test_rows_that_say_the_same_go_in_no_circle() -> None:
    """Beale's example, which the steepest column alone walks round for ever: the least is -0.05."""
    rows = [[0.25, -60, -0.04, 9, 0], [0.5, -90, -0.02, 3, 0], [0, 0, 1, 0, 0]]
    made = LinearProgram(rows, [0, 0, 1], [0, 0, 0, 0, 1], 1)
    assert made.is_feasible and made.least([-0.75, 150, -0.02, 6, 0])[0] == pytest.approx(-0.05)
