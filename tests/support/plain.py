"""What plain ./test.sh leaves out: heavy tests, and tests that take long unless they show a main fact."""

from __future__ import annotations

import pytest

from tests.support import seconds

LONG = 0.3  # seconds
# What plain ./test.sh shows. Each test that shows one of these facts has the mark `shows` with it.
FACTS = (
    "every method trains and passes the gate, or fails it by design",
    "the gate sees a dozen planted faults in each dtype",
    "a run that ends out of memory or otherwise has a record that names its end",
    "records survive a kill",
    "bad input is one line and exit code 2",
    "a case draws its figure",
    "a model by its config.json trains exactly",
    "a model of the user's own trains exactly",
)


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that plain ./test.sh leaves out."""
    measured = seconds.measured()
    shown: set[str] = set()  # grids that show a main fact by their first case
    removed = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        is_first_of_grid = item.get_closest_marker("cover") is not None and function not in shown
        is_needed = is_first_of_grid or item.get_closest_marker("cover") is None
        if item.get_closest_marker("heavy"):
            removed.append(item)
        elif item.get_closest_marker("shows") and is_needed:
            shown.add(function)
        elif measured.get(item.nodeid, 0.0) > LONG:
            removed.append(item)
    return removed
