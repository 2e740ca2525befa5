"""What tests of methods share: engines that are imported once."""

from __future__ import annotations

import functools

import pytest

from harness.base import fork_server


@pytest.fixture
def with_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and agents of ranks are forked from a process that has imported the engines."""
    imports = (*fork_server.IMPORTS, "tests.support.preloaded_engines")
    monkeypatch.setattr(fork_server, "start", functools.partial(fork_server.start, imports=imports))
