"""The ports on which what the tests start listens."""

from __future__ import annotations

import functools
import random

import pytest

from tests.support import ports
from tests.support.ports import free_ports, own_ports


def test_forks_of_one_process_draw_ports_of_their_own() -> None:
    state = random.getstate()
    one = free_ports(40)
    random.setstate(state)  # as a second fork finds it
    other = free_ports(40)
    assert len({*one}) == len({*other}) == 40 and one != other


def test_processes_draw_from_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = own_ports()
    monkeypatch.setattr(ports, "_slot", functools.cache(ports._slot.__wrapped__))  # as in another process
    other = own_ports()
    assert len(one) == len(other) and not {*one} & {*other}
    assert {*one, *other} <= {*range(15_000, 30_000)}


def test_fewer_free_ports_than_asked_for_are_an_error() -> None:
    with pytest.raises(OSError, match=r"expected 301 free ports in range\(\d+, \d+\), got \d+"):
        free_ports(301)
