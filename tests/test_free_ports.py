"""The ports on which what the tests start listens."""

from __future__ import annotations

import random

import pytest

from tests.support.ports import free_ports, own_ports


def test_forks_of_one_process_draw_ports_of_their_own() -> None:
    state = random.getstate()
    one = free_ports(40)
    random.setstate(state)  # as a second fork finds it
    other = free_ports(40)
    assert len({*one}) == len({*other}) == 40 and one != other


def test_workers_of_one_call_draw_from_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    seen: list[int] = []
    for worker in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
        seen += own_ports()
    assert sorted(seen) == list(range(15_000, 30_000))
