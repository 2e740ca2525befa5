"""Measured seconds decide what plain ./test.sh leaves out, and how tests are dealt to several processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import seconds


def items(**counts: int) -> list[Any]:
    """As many tests of each module of a folder as is said."""
    return [
        SimpleNamespace(nodeid=f"tests/{module}.py::test_{number}")
        for module, count in counts.items()
        for number in range(count)
    ]


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_processes_share_the_seconds_and_each_begins_with_a_long_module(
    num_processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = items(short=300, a=1, b=2, c=10, d=10)
    monkeypatch.setattr(
        seconds,
        "measured",
        lambda: {
            test.nodeid: {"a": 50.0, "b": 20.0, "c": 3.0, "d": 2.0}[test.nodeid[6]]
            for test in tests
            if test.nodeid[6] in "abcd"
        },
    )
    ordered = seconds.order(tests, num_processes)
    assert sorted(map(id, ordered)) == sorted(map(id, tests))
    share = -(-len(tests) // num_processes)
    begins = [ordered[share * number].nodeid[6] for number in range(num_processes)]
    assert begins == ["a", "b", "c"][:num_processes]


def test_a_report_s_tests_have_the_names_that_pytest_gives_them(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    case = '<testcase classname="tests.core.test_job" name="{}" time="{}"/>'
    report.write_text(f"<s>{case.format('test_b[1-a b]', 2.04)}{case.format('test_a', 0.1)}</s>")
    assert seconds.read(report) == {"tests/core/test_job.py::test_b[1-a b]": 2.0}
