"""An order: what a job elsewhere is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.job import Job
from harness.places.shared.place import order
from tests.support.tiny import TINY


@pytest.mark.parametrize(("name", "is_forwarded"), [("OMP_THREAD_LIMIT", True), ("LD_PRELOAD", False)])
def test_variables_of_threads_and_kernels_are_there_as_they_are_here(
    monkeypatch: pytest.MonkeyPatch, name: str, is_forwarded: bool
) -> None:
    monkeypatch.setenv(name, "1")
    assert (order(Job("resident", TINY), "key", Path("stem"), ())["environment"].get(name) == "1") is is_forwarded
