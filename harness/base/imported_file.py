"""Imports the file of a method or a case, and guards calls of the file's functions. A mistake in such a file becomes an
error of one line and does not end this process.

Such a file may import modules of this project by their former names, and gets the modules by their present names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import posix
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import GeneratorType, ModuleType
from typing import Any, NoReturn

# The present name of each module or package that the pages once told users to import.
PRESENT_NAMES = {
    "harness.core.gpt": "harness.models.gpt",
    "harness.core.model": "harness.models.model",
    "harness.figures": "papers.figures",
}


def import_file(name: str, file: Path) -> Any:
    """Import the module `name`, which lies in `file`, and return it. Raises ValueError, one line that names the file,
    if the import fails."""
    drop_stale_bytecode(file)
    find_former_names()
    try:
        with refusing_exit():
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{file} does not load: {_error_text(error)}") from error


def drop_stale_bytecode(file: Path) -> None:
    """Remove the cached bytecode of a source file if it is not newer than the source. Python would take it for the
    source's if both have the same size and were written within a second: it compares whole seconds."""
    bytecode = Path(importlib.util.cache_from_source(str(file)))
    with contextlib.suppress(OSError):  # there is none, or the folder is read-only
        if file.suffix == ".py" and bytecode.stat().st_mtime_ns <= file.stat().st_mtime_ns:
            bytecode.unlink()


def guard(
    cls: type,
    passed_errors: tuple[type[Exception], ...],
    result_types: Mapping[str, type] | None = None,
    unguarded: Sequence[str] = (),
) -> None:
    """Replace each public function and property of a class by a GuardedFunction, except the names in `unguarded`.
    `passed_errors`: types of exceptions that go through unchanged. `result_types`: the type that a function must
    return, by the function's name."""
    file = Path(sys.modules[cls.__module__].__file__ or "")
    for name, function in list(vars(cls).items()):
        is_called = callable(function) or hasattr(function, "__get__")
        if is_called and not name.startswith("_") and name not in unguarded:
            setattr(
                cls,
                name,
                GuardedFunction(function, name, file, passed_errors, (result_types or {}).get(name)),
            )


class GuardedFunction:
    """A descriptor that replaces a function or property of a class. It calls the function or property, turns an error
    into one line by errors_in_one_line() and, unless `result_type` is None, checks that the result has this type."""

    def __init__(
        self,
        function: Any,
        name: str,
        file: Path,
        passed_errors: tuple[type[Exception], ...],
        result_type: type | None,
    ) -> None:
        self.function, self.result_type = function, result_type
        self.errors = functools.partial(errors_in_one_line, file, f"{name}()", passed_errors)

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
                if self.result_type and not isinstance(answer, self.result_type):
                    raise TypeError(
                        f"expected a {self.result_type.__name__} as the result, got {type(answer).__name__}"
                    )
            return self._iterate_within_errors(answer) if isinstance(answer, GeneratorType) else answer

        return call

    def _iterate_within_errors(self, values: Iterator[Any]) -> Iterator[Any]:
        with self.errors():
            yield from values


@contextlib.contextmanager
def errors_in_one_line(
    file: Path, name: str, passed_errors: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn any exception or exit within this context into a ValueError with one line, which names the file, the
    function `name` and the failing line. ValueErrors, Ctrl-C and exceptions of the types `passed_errors` go through
    unchanged."""
    try:
        with refusing_exit():
            yield
    except BaseException as error:
        if isinstance(error, (ValueError, KeyboardInterrupt, *passed_errors)):
            raise
        failure, advice = "fails", ""
        if isinstance(error, SystemExit):
            failure, advice = "ended the process", "; try raise ValueError"
        line = failing_line(file.parent, error)
        raise ValueError(f"{file}'s {name} {failure}: {_error_text(error)}{line}{advice}") from error


def _error_text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


def failing_line(folder: Path | None, error: BaseException) -> str:
    """Return, as text, the innermost line of the error's traceback that lies in a file directly in `folder`; empty if
    there is no such line."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if Path(frame.filename).parent == folder]
    if not frames:
        return ""
    text = " ".join((frames[-1].line or "").split())
    return f", {Path(frames[-1].filename).name} line {frames[-1].lineno}: {text}"


@contextlib.contextmanager
def refusing_exit() -> Iterator[None]:
    """Within this context, make os._exit() and posix._exit() raise SystemExit, because these functions would end this
    process at once, without a message. A signal still ends this process; the caller's shell reports the signal."""
    exit_now, guarded_pid = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != guarded_pid:  # a forked child may exit at once
            exit_now(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = posix._exit = refuse
    try:
        yield
    finally:
        os._exit = posix._exit = exit_now


def present_name(name: str) -> str:
    """Return a module's present name; `name` itself if it is no former name."""
    for former, present in PRESENT_NAMES.items():
        if name == former or name.startswith(f"{former}."):
            return present + name[len(former) :]
    return name


class FormerNames(MetaPathFinder, Loader):
    """Finds a module by its former name. It comes first: Python's own finder would make a second module of the file."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if present_name(name) != name else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(present_name(spec.name))
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import has replaced it by the former name's


def find_former_names() -> None:
    """Let imports find modules by their former names in this process."""
    if not any(isinstance(finder, FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, FormerNames())
