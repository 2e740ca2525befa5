"""A calibration by the measuring code itself, in this process, of few bytes and in little time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from methods.streaming.placement import calibrate
from tests.support import forks


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("REPEATED_SECONDS", 0.01),
        ("COPY_BYTES", {"cpu": 2**20}),
        ("BLOCK_BYTES", 2**20),
        ("FILE_BYTES", 2 * 2**20),
        ("get_context", lambda kind: forks.PROCESSES),  # forks of a process that has imported torch
    ):
        monkeypatch.setattr(calibrate, name, value)


def ask(module: str, arguments: Any) -> Any:
    """In place of harness.base.child_process.ask(), for cli/doctor.py."""
    assert module == calibrate.__name__
    return json.loads(forks.answer(module, json.dumps(arguments)).splitlines()[-1])
