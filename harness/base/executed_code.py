"""Notes which code the processes of a run execute, so that the run's identity can be checked against what ran.

Every process of a run appends to one file, which the environment names: the worker, each rank, their forks, and the
processes that the fork server starts for them. Noted are the files that are executed or loaded, each with its time of
modification, and what no file stands for: code that is executed as a text, and programs that are started. A Python
audit hook sees all of these, however the code is loaded. This file imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

NOTES_VARIABLE = "HARNESS_EXECUTED_CODE"  # the environment variable that names the file of notes
# Pattern of the folders into which packages are installed. Another folder of that name is a folder like any other.
SITE_PACKAGES = re.compile(r".*/lib(?:32|64)?/python3(?:\.\d+t?)?/(?:site|dist)-packages(?=/)")
STANDARD_FOLDERS = tuple(
    {
        f"{folder}{os.sep}"
        for name in ("stdlib", "platstdlib")
        for folder in (sysconfig.get_path(name), os.path.realpath(sysconfig.get_path(name)))
    }
)
HARNESS_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Modules of the standard library that execute texts which they make from a class or an annotation.
TEXT_MAKING_MODULES = (
    "dataclasses.py",
    "collections/__init__.py",
    "typing.py",
    "inspect.py",
    "enum.py",
    "annotationlib.py",
)
# The audit events of starting a program. The number is the index, among the event's arguments, of the argument with
# the program and its arguments.
START_EVENTS = {"subprocess.Popen": 1, "os.exec": 1, "os.posix_spawn": 1, "os.system": 0, "pty.spawn": 0}
# Modules by which a process starts another Python without an event.
SPAWNING_MODULES = ("multiprocessing/popen_spawn_posix.py", "multiprocessing/popen_forkserver.py")
MOST_PROGRAM_CHARACTERS = 120  # characters of a program's call in a note


class Executed(NamedTuple):
    """What was executed: a file, or a description for people if no file stands for it."""

    text: str
    # the file's time of modification when it was executed; None: `text` is a description
    modified_ns: int | None


def site_folder(file: str) -> str:
    """Return the folder of installed packages in which a file lies; empty if it lies in none."""
    match = SITE_PACKAGES.match(file)
    return match.group() if match else ""


def is_standard(file: str) -> bool:
    """True if the file belongs to Python's standard library."""
    return file.startswith("<frozen ") or (file.startswith(STANDARD_FOLDERS) and not site_folder(file))


def watch() -> None:
    """From now on, note what this process and its forks execute, if the environment names a file of notes."""
    path = os.environ.get(NOTES_VARIABLE)
    if path and _watching.get("path") != path:
        if not _watching:
            sys.addaudithook(_note_event)
        _watching["path"] = path
        _noted_texts.clear()


def read_notes(path: Path) -> list[Executed]:
    """Return the notes of all processes of a run; none if no process wrote any."""
    try:
        lines = path.read_text(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    return [Executed(*json.loads(line)) for line in lines]


_watching: dict[str, str] = {}  # `path`: the file of notes
_noted_texts: set[str] = set()  # texts of this process's notes


def _note_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec":
        _note_code(arguments[0], sys._getframe().f_back)
    elif event == "import":
        if arguments[1]:  # a compiled module
            _note_file(arguments[1], sys._getframe().f_back)
    elif event in START_EVENTS:
        _note_program(arguments[START_EVENTS[event]], sys._getframe().f_back)


def _note_code(code: CodeType, frame: FrameType | None) -> None:
    caller = frame.f_code.co_filename if frame else "<frozen runpy>"
    caller_locals = frame.f_locals if frame else {}
    if caller.startswith("<frozen importlib"):
        _note_file(_origin(caller_locals) or code.co_filename, frame)
    elif caller == "<frozen runpy>" or caller.endswith("/runpy.py"):
        _note_file(str(caller_locals.get("fname") or code.co_filename), frame)
    elif not (is_standard(caller) and caller.endswith(TEXT_MAKING_MODULES)):
        line_of_code = _acting_line(frame)
        if not _is_versioned(line_of_code):
            _note(f"a text in {line_of_code}")


def _origin(caller_locals: Mapping[str, Any]) -> str | None:
    """Return the file from which importlib executes a module. The code names another file if the module is a compiled
    file without a source. `values`: the local variables of importlib's function."""
    with contextlib.suppress(AttributeError, LookupError, TypeError):
        origin = caller_locals["args"][1]["__spec__"].origin
        return "<frozen module>" if origin == "frozen" else origin
    return None


def _note_file(file: str, frame: FrameType | None) -> None:
    """Note that a file was loaded or executed. If `file` is a path within an archive, note the archive. Files of the
    standard library are not noted, nor are files that an installed package compiled, or wrote into the run's temporary
    folder, before it loaded them. `frame`: the frame that loads the file."""
    path = file if is_standard(file) else os.path.realpath(file)
    is_library = path.endswith(".so")
    if is_standard(path):
        if path.endswith(SPAWNING_MODULES) and not _is_versioned(line_of_code := _acting_line(frame)):
            _note(f"another Python, started in {line_of_code}")
        return
    while not os.path.lexists(path) and os.path.dirname(path) != path:  # a path within an archive
        path = os.path.dirname(path)
    is_generated = is_library or path.startswith(os.path.dirname(_watching["path"]) + os.sep)
    if is_generated and not site_folder(path) and _is_versioned(_acting_line(frame)):
        return
    if os.path.isfile(path):
        _note(path, os.stat(path).st_mtime_ns)
    else:
        _note(f"{file}, which is no file")


def _note_program(program: Any, frame: FrameType | None) -> None:
    """Note that a program was started, unless code of a known version starts it, or it is a module of the harness."""
    arguments = [program] if isinstance(program, str | bytes | os.PathLike) else list(program)
    texts = [os.fsdecode(argument) for argument in arguments]
    module_names = texts[texts.index("-m") + 1 :][:1] if "-m" in texts else []
    if module_names and module_names[0].startswith("harness."):  # forks of the fork server note by themselves
        return
    line_of_code = _acting_line(frame, skips_harness=bool(module_names))
    if not _is_versioned(line_of_code):
        _note(f"the program {' '.join(texts)[:MOST_PROGRAM_CHARACTERS]}, started in {line_of_code}")


def _acting_line(frame: FrameType | None, skips_harness: bool = False) -> str:
    """Return the file and line of the innermost code that acts on its own behalf: not the standard library's, nor
    torch.multiprocessing's, which only pass calls on."""
    while frame:
        file = frame.f_code.co_filename
        passes_on = is_standard(file) or "/torch/multiprocessing/" in file
        if not passes_on and not (skips_harness and file.startswith(HARNESS_FOLDER)):
            return f"{file} line {frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def _is_versioned(line_of_code: str) -> bool:
    """True if a version tells the code at `line_of_code`: an installed package's code, or the harness's own."""
    return line_of_code.startswith(HARNESS_FOLDER) or bool(site_folder(line_of_code))


def _note(text: str, modified_ns: int | None = None) -> None:
    if text in _noted_texts:
        return
    _noted_texts.add(text)
    line = json.dumps([text, modified_ns]) + "\n"
    descriptor = os.open(_watching["path"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # whole, because the file is opened for appending
        os.write(descriptor, line.encode(errors="surrogateescape"))
    finally:
        os.close(descriptor)
