"""Imports the file of a method or a case, and guards calls of the file's functions. A mistake in such a file becomes an
error of one line and does not end this process."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import posix
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import GeneratorType
from typing import Any, NoReturn

from harness.base.former_names import find_former_names


def imported(name: str, file: Path) -> Any:
    """Import the module `name`, which lies in `file`, and return it. Raises ValueError, one line that names the file,
    if the import fails."""
    drop_stale_bytecode(file)
    find_former_names()
    try:
        with staying():
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{file} does not load: {_text(error)}") from error


def drop_stale_bytecode(file: Path) -> None:
    """Remove the cached bytecode of a source file if it is not newer than the source. Python would take it for the
    source's if both have the same size and were written within a second: it compares whole seconds."""
    bytecode = Path(importlib.util.cache_from_source(str(file)))
    with contextlib.suppress(OSError):  # there is none, or the folder is read-only
        if file.suffix == ".py" and bytecode.stat().st_mtime_ns <= file.stat().st_mtime_ns:
            bytecode.unlink()


def guard(
    cls: type,
    passed: tuple[type[Exception], ...],
    returned: Mapping[str, type] | None = None,
    but: Sequence[str] = (),
) -> None:
    """Replace each public function and property of a class by a Called, except the names in `but`. `passed`: types of
    exceptions that go through unchanged. `returned`: the type that a function must return, by the function's name."""
    file = Path(sys.modules[cls.__module__].__file__ or "")
    for name, function in list(vars(cls).items()):
        is_called = callable(function) or hasattr(function, "__get__")
        if is_called and not name.startswith("_") and name not in but:
            setattr(cls, name, Called(function, name, file, passed, (returned or {}).get(name)))


class Called:
    """A descriptor that replaces a function or property of a class. It calls the function or property, turns an error
    into one line by errors_of() and, unless `returned` is None, checks that the result has the type `returned`."""

    def __init__(
        self, function: Any, name: str, file: Path, passed: tuple[type[Exception], ...], returned: type | None
    ) -> None:
        self.function, self.returned = function, returned
        self.errors = functools.partial(errors_of, file, f"{name}()", passed)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bound = self.function
        with self.errors():
            if hasattr(bound, "__get__"):
                bound = bound.__get__(instance, owner)
        if not callable(bound):
            return bound

        @functools.wraps(bound)
        def call(*arguments: Any, **options: Any) -> Any:
            with self.errors():
                answer = bound(*arguments, **options)
                if self.returned and not isinstance(answer, self.returned):
                    raise TypeError(
                        f"expected a {self.returned.__name__} as the result, got {type(answer).__name__}"
                    )
            return self._yielded(answer) if isinstance(answer, GeneratorType) else answer

        return call

    def _yielded(self, values: Iterator[Any]) -> Iterator[Any]:
        with self.errors():
            yield from values


@contextlib.contextmanager
def errors_of(file: Path, name: str, passed: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn any exception or exit within this context into a ValueError with one line, which names the file, the
    function `name` and the failing line. ValueErrors, Ctrl-C and exceptions of the types `passed` go through
    unchanged."""
    try:
        with staying():
            yield
    except BaseException as error:
        if isinstance(error, (ValueError, KeyboardInterrupt, *passed)):
            raise
        is_exit = isinstance(error, SystemExit)
        what, advice = ("ended the process", "; try raise ValueError") if is_exit else ("fails", "")
        line = line_in(file.parent, error)
        raise ValueError(f"{file}'s {name} {what}: {_text(error)}{line}{advice}") from error


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


def line_in(folder: Path | None, error: BaseException) -> str:
    """Return, as text, the innermost line of the error's traceback that lies in a file directly in `folder`; empty if
    there is no such line."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if Path(frame.filename).parent == folder]
    if not frames:
        return ""
    text = " ".join((frames[-1].line or "").split())
    return f", {Path(frames[-1].filename).name} line {frames[-1].lineno}: {text}"


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Within this context, make os._exit() and posix._exit() raise SystemExit, because these functions would end this
    process at once, without a message. A signal still ends this process; the caller's shell reports the signal."""
    end, guarded_pid = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != guarded_pid:  # a forked child may exit at once
            end(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = posix._exit = refuse
    try:
        yield
    finally:
        os._exit = posix._exit = end
