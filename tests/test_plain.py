"""Plain ./test.sh shows each main fact, and leaves out what takes long and shows none."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from harness.base.checkout import ROOT
from tests.support import plain, seconds


def test_each_main_fact_is_shown_by_a_test() -> None:
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    shown = [
        fact
        for text in texts
        for fact in re.findall(r'^@pytest\.mark\.shows\("([^"]+)"\)', text, re.MULTILINE)
    ]
    assert {*shown} == {*plain.FACTS}


def test_what_takes_long_is_left_out_unless_it_shows_a_main_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def item(name: str, *marks: str) -> Any:
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: mark if mark in marks else None)

    slow = {"slow", "fact", "grid[1]", "grid[2]"}
    monkeypatch.setattr(seconds, "measured", lambda: dict.fromkeys(slow, 2 * plain.LONG))
    grid = [item(f"grid[{number}]", "shows", "cover") for number in (1, 2, 3)]
    items = [item("quick"), item("slow"), item("server", "heavy"), item("fact", "shows"), *grid]
    assert [left.nodeid for left in plain.left_out(items)] == ["slow", "server", "grid[2]"]
