"""Thins a grid of cases: of a test marked cover(n), ./test.sh --all runs a few cases that show every pair of values of
different arguments together; plain ./test.sh runs fewer: those that show every n values, and the first case if n is 0.

Source: Cohen et al. 1997, the AETG system (pairwise covering arrays, by a greedy choice).
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

PAIRS = 2


def thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that show no new pair of values, and mark as heavy those that a covering of cover(n) does
    without."""
    grids: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cover"):
            grids[item.nodeid.partition("[")[0]].append(item)
    removed: set[pytest.Item] = set()
    for cases in grids.values():
        strength = cases[0].get_closest_marker("cover").args[0]
        of_pairs, of_plain = covering(cases, max(PAIRS, strength)), covering(cases, strength)
        removed.update(case for case in cases if case not in of_pairs | of_plain)
        for case in of_pairs - of_plain:
            case.add_marker(pytest.mark.heavy)
    config.hook.pytest_deselected(items=list(removed))
    items[:] = [item for item in items if item not in removed]


def covering(cases: list[pytest.Item], strength: int) -> set[pytest.Item]:
    """Return cases that together show what all of them show."""
    return {cases[number] for number in choose([_shows(case.callspec.params, strength) for case in cases])}


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
