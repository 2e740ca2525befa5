"""A number with its noun: singular for one alone."""

from __future__ import annotations

from harness.base.counted import counted


def test_a_noun_is_singular_where_its_number_is_one() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
