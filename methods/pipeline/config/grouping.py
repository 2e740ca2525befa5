"""Groups a model's sections, the runs of modules between its CutPoints, into stages. Needs only the standard
library."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf


def group(
    below: Sequence[float], last: Sequence[float], has_parameters: Sequence[bool]
) -> list[list[int] | None]:
    """Return, for 1, 2, ... stages, the active cuts that make the longest stage as short as possible. Cuts are counted
    from 0. An entry is None if a stage would have no parameters.

    `below`: each section's cost in a stage that is not the last. `last`: each section's cost in the last stage.
    """
    num_sections = len(below)
    costs, last_costs = [0, *accumulate(below)], [0, *accumulate(last)]
    num_weighing = [0, *accumulate(map(int, has_parameters))]  # sections with parameters before each section
    # best[end]: for the sections before `end`, grouped into as many stages as the loop has reached: the cost of the
    # longest stage, and the first section of each stage
    best: list[tuple[float, list[int]]] = [(0.0, []), *[(inf, [])] * num_sections]
    cuts: list[list[int] | None] = []

    def shortest(end: int, sums: Sequence[float]) -> tuple[float, list[int]]:
        options = (
            (max(best[start][0], sums[end] - sums[start]), start)
            for start in range(end)
            if num_weighing[end] > num_weighing[start]
        )
        longest, start = min(options, default=(inf, 0))
        return longest, [*best[start][1], start]

    for _ in range(num_sections):
        longest, starts = shortest(num_sections, last_costs)
        cuts.append([start - 1 for start in starts[1:]] if longest < inf else None)
        best = [(inf, []), *(shortest(end, costs) for end in range(1, num_sections + 1))]
    return cuts
