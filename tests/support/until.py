"""Waiting for a condition: without a limit of its own, for a busy machine is no failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def until(condition: Callable[[], Value], poll_seconds: float = 0.02) -> Value:
    """Return the condition's first true value. Where none comes, pytest-timeout ends the test and prints who waits."""
    while not (value := condition()):
        time.sleep(poll_seconds)
    return value
