"""Several test processes begin with the long files, and together run each test once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.base.checkout import ROOT
from tests.support.longest_first import LONGEST, order


def test_the_long_files_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / f"{name}.py").exists()] == []


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_each_process_has_as_many_tests_and_a_long_file_first(num_processes: int) -> None:
    names = [*(f"core/test_{number}" for number in range(30)), *LONGEST]
    items = [SimpleNamespace(path=Path(f"/tests/{name}.py")) for name in names for _ in range(5)]
    ordered = order(items, num_processes)  # type: ignore[arg-type]
    assert sorted(map(id, ordered)) == sorted(map(id, items))
    begins = [ordered[len(items) // num_processes * number].path for number in range(num_processes)]
    long = [Path(f"/tests/{name}.py") for name in LONGEST]
    assert begins == [long[0], long[3], long[4]][:num_processes]
