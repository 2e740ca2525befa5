"""What a run's processes execute is noted, however it is loaded: by importlib, as a text, in a fork, by a program."""

from __future__ import annotations

import os
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest

from harness.base import executed_code
from harness.base.imported_file import import_file
from tests.support import forks

# For each case: the code of a function in own.py, and what the notes must then have (None: nothing but own.py).
CASES = {
    "nothing else": ("pass", None),
    "a class of data": ("import dataclasses; dataclasses.make_dataclass('A', ['x'])", None),
    "a module of the standard library": ("import colorsys, sndhdr", None),
    "another file": ("load('part')", "part.py"),
    "a file in an archive": ("sys.path.insert(0, HERE + '/archive.zip'); load('inside')", "archive.zip"),
    "a compiled file without a source": ("load('compiled')", "compiled.pyc"),
    "a file in a folder called site-packages": (
        "sys.path.insert(0, HERE + '/site-packages'); load('loose')",
        "site-packages/loose.py",
    ),
    "a file by runpy": ("import runpy; runpy.run_path(HERE + '/part.py')", "part.py"),
    "a text": ("exec('x = 1')", "a text in own.py line 4"),
    "a text in the name of a known file": (
        "exec(compile('x = 1', __file__, 'exec'), {})",
        "a text in own.py line 4",
    ),
    "a text by a thread": (
        "t = threading.Thread(target=exec, args=('x = 1', {})); t.start(); t.join()",
        "a text in an unknown place",
    ),
    "a file in a fork": (
        "p = context('fork').Process(target=load, args=('part',)); p.start(); p.join()",
        "part.py",
    ),
    "a program": ("subprocess.run(['true'])", "the program true, started in own.py line 4"),
    "a program by the shell": ("os.system('true')", "the program true, started in own.py line 4"),
    "a library that a package compiles and cannot load": ("load_by_torch('absent')", None),
    "another Python": (
        "p = context('spawn').Process(target=print); p.start(); p.join()",
        "another Python, started in own.py line 4",
    ),
}
OWN = """import importlib, os, subprocess, sys, threading
from multiprocessing import get_context as context
def act():
    {act}
HERE = os.path.dirname(__file__)
def load(name):
    sys.path.insert(0, HERE)
    importlib.import_module(name)
def load_by_torch(name):
    from torch.utils import cpp_extension
    try:
        cpp_extension._import_module_from_library(name, HERE, is_python_module=True)
    except ImportError:
        pass
"""


def noted(folder: Path) -> dict[str, list[str]]:
    """Return the notes of each case, without the folder's name, of one process that runs all cases."""
    texts = {}
    for number, (name, (act, _)) in enumerate(CASES.items()):
        case = folder / str(number)
        (case / "site-packages").mkdir(parents=True)
        for file in ("part.py", "site-packages/loose.py", "source.py"):
            (case / file).write_text("A = 1\n")
        py_compile.compile(str(case / "source.py"), str(case / "compiled.pyc"))
        with zipfile.ZipFile(case / "archive.zip", "w") as archive:
            archive.writestr("inside.py", "A = 1\n")
        (case / "own.py").write_text(OWN.format(act=act))
        os.environ[executed_code.NOTES_VARIABLE] = str(case / "notes")
        executed_code.watch()
        sys.path.insert(0, str(case))
        __import__("own").act()
        sys.path[:] = [entry for entry in sys.path if not entry.startswith(str(folder))]
        for module in ("own", "part", "inside", "compiled", "loose", "multiprocessing.popen_spawn_posix"):
            sys.modules.pop(module, None)
        texts[name] = [note.text.replace(f"{case}/", "") for note in executed_code.read_notes(case / "notes")]
    return texts


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return forks.call(noted, tmp_path_factory.mktemp("noted").resolve())


@pytest.mark.parametrize("name", CASES)
def test_what_is_executed_is_noted(name: str, notes: dict[str, list[str]]) -> None:
    expected = CASES[name][1]
    assert [text for text in notes[name] if not text.startswith(str(Path(pytest.__file__).parents[1]))] == [
        "own.py",
        *([expected] if expected else []),
    ]


def test_only_folders_of_pythons_layout_have_installed_packages() -> None:
    assert executed_code.site_folder("/usr/lib/python3/dist-packages/yaml/__init__.py").endswith(
        "dist-packages"
    )
    assert not executed_code.site_folder("/home/me/site-packages/decay.py")


def test_bytecode_that_is_older_than_its_source_is_not_taken_for_it(tmp_path: Path) -> None:
    """Python compares sizes and whole seconds: an edit within a second, of the same size, would not count."""
    source = tmp_path / "edited_twice.py"
    source.write_text("A = 1\n")
    py_compile.compile(str(source), doraise=True)
    (bytecode,) = (tmp_path / "__pycache__").iterdir()
    second = int(source.stat().st_mtime)
    os.utime(source, ns=(0, second * 10**9 + 1))
    py_compile.compile(str(source), doraise=True)
    source.write_text("A = 2\n")
    os.utime(source, ns=(0, second * 10**9 + 3))
    os.utime(bytecode, ns=(0, second * 10**9 + 2))
    sys.path.insert(0, str(tmp_path))
    try:
        assert import_file("edited_twice", source).A == 2
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["edited_twice"]
