"""What plain ./test.sh takes of a grid of cases: few, but every value, and where asked every pair of values."""

from __future__ import annotations

import itertools

from tests.support.covering import choose


def test_every_pair_is_shown_by_a_third_of_the_cases() -> None:
    """Nine is the least for three values thrice: two arguments have nine pairs alone."""
    cases = list(itertools.product("abc", "123", "xyz"))
    shown = [set(itertools.combinations(case, 2)) for case in cases]
    chosen = choose(shown)
    assert set().union(*(shown[number] for number in chosen)) == set().union(*shown)
    assert 9 <= len(chosen) <= 12


def test_every_value_is_shown_by_as_many_cases_as_the_longest_list_has() -> None:
    cases = list(itertools.product("abcd", "12"))
    assert len(choose([set(case) for case in cases])) == 4
