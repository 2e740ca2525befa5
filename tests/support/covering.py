"""Thins a grid of cases: @pytest.mark.cover(2) leaves plain ./test.sh a few that show every pair of values together.

Source: Cohen et al. 1997, the AETG system (pairwise covering arrays, by a greedy choice).
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest


def mark(items: list[pytest.Item]) -> None:
    """Mark as heavy the cases that a covering of cover(n) does without."""
    grids: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cover"):
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        strength = cases[0].get_closest_marker("cover").args[0]
        chosen = choose([_shows(case.callspec.params, strength) for case in cases])
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker(pytest.mark.heavy)


def choose(shown: list[set]) -> set[int]:
    """Numbers of sets whose union is that of all, by taking each time the first of those that add most."""
    missing, chosen = set().union(*shown), set()
    while missing:
        best = max(range(len(shown)), key=lambda number: len(shown[number] & missing))
        missing -= shown[best]
        chosen.add(best)
    return chosen


def _shows(arguments: dict[str, object], strength: int) -> set:
    values = sorted((name, repr(value)) for name, value in arguments.items())
    return set(itertools.combinations(values, min(strength, len(values))))
