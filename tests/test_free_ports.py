"""The ports on which the tests' own ranks meet."""

from __future__ import annotations

import random

from tests.support.ranks import free_ports


def test_forks_of_one_process_draw_ports_of_their_own() -> None:
    state = random.getstate()
    one = free_ports(40)
    random.setstate(state)  # as a second fork finds it
    other = free_ports(40)
    assert len({*one}) == len({*other}) == 40 and one != other
