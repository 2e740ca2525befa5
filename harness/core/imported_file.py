"""Imports the file of a method or a case, whatever it does: a mistake in one is a line, and never the end of a call."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn


def imported(name: str, file: Path) -> Any:
    """The module of this name, which is in this file. Raises ValueError, one line, where it does not load."""
    try:
        with staying():
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{file} does not load: {' '.join(f'{type(error).__name__}: {error}'.split())}") from error


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Make os._exit() an error, as sys.exit() is one: it would end this process at once, without a word and with any
    exit code. A signal ends it still, which the caller's shell tells."""
    end, here = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != here:  # a fork ends as it likes
            end(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end
