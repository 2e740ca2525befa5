"""A method's identity follows what its file imports, and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import py_compile
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from harness.base.checkout import ROOT
from harness.base.executed_code import Executed
from harness.core import identity


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the sources to edit."""
    copy = tmp_path_factory.mktemp("sources")
    for folder in ("harness", "places", "methods", "papers", "cli"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "ROOT", copy)
        patch.setattr(
            identity, "SHARED_FILES", tuple(copy / path.relative_to(ROOT) for path in identity.SHARED_FILES)
        )
        yield copy


def changes(tree: Path, method: str, file: str) -> bool:
    """Whether a method's hash is another one after an edit of the file."""
    path = tree / file
    before = identity.source_hash(tree / "methods" / method)
    text = path.read_text()
    path.write_text(text + ("\n// edited\n" if path.suffix == ".cpp" else "\nEDITED = True\n"))
    after = identity.source_hash(tree / "methods" / method)
    path.write_text(text)
    return after != before


@pytest.mark.parametrize(
    "file", ["methods/sharding/dispatch.py", "methods/engines/megatron.py", "methods/hydra.py"]
)
def test_an_edit_of_another_methods_library_leaves_stronghold_fresh(tree: Path, file: str) -> None:
    assert not changes(tree, "stronghold.py", file)


@pytest.mark.parametrize(
    "file", ["methods/streaming/slot.py", "methods/stronghold.py", "harness/models/gpt.py"]
)
def test_an_edit_of_what_stronghold_imports_makes_it_stale(tree: Path, file: str) -> None:
    assert changes(tree, "stronghold.py", file)


def test_an_edit_of_the_dispatcher_makes_hydra_stale(tree: Path) -> None:
    assert changes(tree, "hydra.py", "methods/sharding/dispatch.py")


def test_the_kernels_cpp_belongs_to_who_calls_it(tree: Path) -> None:
    (kernel,) = (path.relative_to(tree) for path in (tree / "methods").rglob("adamw_kernel.cpp"))
    assert changes(tree, "stronghold.py", str(kernel))
    assert not changes(tree, "resident.py", str(kernel))


@pytest.mark.parametrize("line", ["from ._part import A", "from . import _part", "from .below.part import A"])
def test_a_file_that_is_imported_by_a_relative_name_belongs_to_the_method(tmp_path: Path, line: str) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "own.py").write_text(line)
    for part in ("_part.py", "below/part.py"):
        (tmp_path / part).write_text("A = 1")
    before = identity.source_hash(tmp_path / "own.py")
    for part in ("_part.py", "below/part.py"):
        (tmp_path / part).write_text("A = 2")
    assert identity.source_hash(tmp_path / "own.py") != before


def test_a_name_of_the_package_above_is_that_of_the_folder_above(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "own.py").write_text("from .below.part import A")
    (tmp_path / "below/part.py").write_text("from .._part import A")
    (tmp_path / "_part.py").write_text("A = 1")
    assert (tmp_path / "_part.py").resolve() in identity.closure(tmp_path / "own.py")


def test_the_batches_of_all_belong_to_every_method(tree: Path) -> None:
    assert changes(tree, "resident.py", "harness/core/data.py")


@pytest.mark.parametrize("file", ["papers/report/page.py", "cli/main.py", "harness/gate/verdict.py"])
def test_what_only_reads_records_makes_none_stale(tree: Path, file: str) -> None:
    assert not changes(tree, "stronghold.py", file)


def test_an_import_for_types_alone_does_not_count(tree: Path) -> None:
    path = tree / "methods" / "mine.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from methods.streaming import slot\n"
    )
    assert not changes(tree, "mine.py", "methods/streaming/slot.py")


@pytest.mark.parametrize("head", ["if TYPE_CHECKING:\n    pass\nelse:", "if not TYPE_CHECKING:"])
def test_an_import_beside_one_for_types_counts(tmp_path: Path, head: str) -> None:
    (tmp_path / "mine.py").write_text(f"from typing import TYPE_CHECKING\n{head}\n    from ._part import A\n")
    (tmp_path / "_part.py").write_text("A = 1")
    assert (tmp_path / "_part.py").resolve() in identity.closure(tmp_path / "mine.py")


def test_a_compiled_module_beside_the_method_belongs_to_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from . import _fast\n")
    fast = tmp_path / f"_fast{EXTENSION_SUFFIXES[0]}"
    fast.write_bytes(b"\x7fELF")
    assert fast.resolve() in identity.closure(tmp_path / "mine.py")
    assert not identity.CodeIdentity.of(tmp_path / "mine.py").lacks([Executed(str(fast), 0)])


def test_a_library_beside_an_outside_method_counts(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "_mine.py").write_text("RATE = 1\n")
    (folder / "mine.py").write_text("from methods import _mine\n")
    before = identity.source_hash(folder / "mine.py")
    (folder / "_mine.py").write_text("RATE = 2\n")
    assert identity.source_hash(folder / "mine.py") != before


@pytest.mark.parametrize("file", ["aside.py", "aside/__init__.py", "aside/part.py", "aside/_fast.so"])
def test_a_package_on_pythons_path_counts_by_its_files(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, path = tmp_path / "path", tmp_path / "path" / file
    path.parent.mkdir(parents=True)
    (folder / "aside").mkdir(exist_ok=True)
    path.write_text("RATE = 1\n")
    (tmp_path / "mine.py").write_text("def train():\n    from aside import RATE\n")
    monkeypatch.syspath_prepend(folder)
    before = identity.source_hash(tmp_path / "mine.py")
    assert identity.source_hash(tmp_path / "mine.py") == before
    path.write_text("RATE = 2\n")
    assert identity.source_hash(tmp_path / "mine.py") != before


def zipped(path: Path, text: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("aside.py", text)


def compiled(path: Path, text: str) -> None:
    path.with_suffix(".txt").write_text(text)
    py_compile.compile(str(path.with_suffix(".txt")), str(path), doraise=True)


@pytest.mark.parametrize(
    ("write", "file", "entry"),
    [
        (zipped, "aside.zip", "aside.zip"),
        (compiled, "aside.pyc", ""),
        (Path.write_text, "site-packages/aside.py", "site-packages"),
    ],
)
def test_code_in_an_archive_a_compiled_file_or_a_folder_called_site_packages_counts(
    tmp_path: Path, write: Callable[[Path, str], None], file: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("import aside\n")
    (path := tmp_path / "path" / file).parent.mkdir(parents=True)
    hashes = []
    for text in ("RATE = 1\n", "RATE = 22\n"):
        write(path, text)
        monkeypatch.syspath_prepend(tmp_path / "path" / entry)  # also forgets what importlib has listed
        hashes.append(identity.CodeIdentity.of(tmp_path / "mine.py"))
    first, second = hashes
    assert first.source != second.source
    assert second.lacks([Executed(str(path), 0)]) == []


def test_a_compiled_file_beside_the_method_belongs_to_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from . import _part\n")
    compiled(tmp_path / "_part.pyc", "A = 1\n")
    assert (tmp_path / "_part.pyc").resolve() in identity.closure(tmp_path / "mine.py")


@pytest.mark.parametrize("name", ["sitecustomize", "usercustomize"])
def test_what_python_imports_by_itself_counts(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("A = 1\n")
    before = identity.source_hash(tmp_path / "mine.py")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / f"{name}.py").write_text("import torch\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert identity.source_hash(tmp_path / "mine.py") != before


METHOD = '''"""A method."""
class Method:
    """Trains."""
    def train(self):
        """Train."""
        return 1  # a comment
'''


@pytest.mark.parametrize(
    ("old", "new", "is_changed"),
    [
        ('"""A method."""', "", False),
        ('"""Trains."""', '"""Trains well."""', False),
        ('"""Train."""', '"""x"""', False),
        ("  # a comment", "", False),
        ("return 1", "return 2", True),
        ("return 1", 'return """Train."""', True),
    ],
)
def test_docstrings_and_comments_do_not_count_and_all_else_does(
    tmp_path: Path, old: str, new: str, is_changed: bool
) -> None:
    (tmp_path / "mine.py").write_text(METHOD)
    before = identity.source_hash(tmp_path / "mine.py")
    (tmp_path / "mine.py").write_text(METHOD.replace(old, new))
    assert (identity.source_hash(tmp_path / "mine.py") != before) == is_changed


def test_a_docstring_that_the_code_reads_counts(tmp_path: Path) -> None:
    hashes = []
    for rate in (1, 2):
        (tmp_path / "mine.py").write_text(f'"""{rate}"""\nRATE = float(__doc__)\n')
        hashes.append(identity.source_hash(tmp_path / "mine.py"))
    assert hashes[0] != hashes[1]


def edited(path: Path, text: str) -> int:
    """Write the file anew; return its time of modification, which is another one each time."""
    path.write_text(text)
    os.utime(path, ns=(0, next(CLOCK)))
    return path.stat().st_mtime_ns


CLOCK = itertools.count(10**18, 10**9)


@pytest.mark.parametrize(
    ("while_it_ran", "afterwards", "changed"),
    [
        (None, None, []),
        (None, "A = 1  # told\n", []),  # was executed as it was, and is the same but for a comment
        ("A = 1  # told\n", None, []),
        ("A = 2\n", "A = 1\n", ["own.py"]),  # is again as it was, but another one was executed
    ],
)
def test_a_file_that_was_executed_in_another_state_is_told(
    tmp_path: Path, while_it_ran: str | None, afterwards: str | None, changed: list[str]
) -> None:
    file = tmp_path.resolve() / "own.py"
    executed_ns = edited(file, "A = 1\n")
    before = identity.CodeIdentity.of(file)
    executed_ns = edited(file, while_it_ran) if while_it_ran else executed_ns
    if afterwards:
        edited(file, afterwards)
    assert before.changed_files([Executed(str(file), executed_ns)], identity.CodeIdentity.of(file)) == changed


def test_a_file_of_another_name_is_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "path" / "aside").mkdir(parents=True)
    (tmp_path / "path" / "aside" / "part.py").write_text("RATE = 1\n")
    (tmp_path / "mine.py").write_text("import aside\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    before = identity.source_hash(tmp_path / "mine.py")
    (tmp_path / "path" / "aside" / "part.py").rename(tmp_path / "path" / "aside" / "other.py")
    assert identity.source_hash(tmp_path / "mine.py") != before


@pytest.mark.parametrize(
    "line", ["import beyond", "import json, beyond.part as b", "    from beyond.part import RATE"]
)
def test_a_package_that_one_on_pythons_path_imports_counts(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, text in (("aside.py", f"try:\n    pass\n{line}\n"), ("beyond/part.py", "RATE = 1\n")):
        (tmp_path / "path" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "path" / file).write_text(text)
    (tmp_path / "mine.py").write_text("import aside\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    before = identity.source_hash(tmp_path / "mine.py")
    (tmp_path / "path" / "beyond" / "part.py").write_text("RATE = 2\n")
    assert identity.source_hash(tmp_path / "mine.py") != before


LOADS = (
    "import _part",
    'importlib.import_module("_part")',
    'importlib.import_module("methods._part")',
    '__import__("methods._part", fromlist=["A"])',
    'runpy.run_path(Path(__file__).with_name("_part.py"))',
)
READS = ('json.loads(Path(__file__).with_name("settings.json").read_text())', 'open(HERE / "../rates.csv")')


@pytest.mark.parametrize("line", LOADS)
def test_a_file_beside_that_is_loaded_by_a_constant_name_belongs_to_the_method(
    tmp_path: Path, line: str
) -> None:
    (tmp_path / "own.py").write_text(f"def train():\n    {line}\n")
    (tmp_path / "_part.py").write_text("A = 1")
    assert (tmp_path / "_part.py").resolve() in identity.closure(tmp_path / "own.py")


@pytest.mark.parametrize(("line", "name"), zip(READS, ("settings.json", "../rates.csv"), strict=True))
def test_a_file_of_settings_that_is_read_by_a_constant_name_belongs_to_the_method(
    tmp_path: Path, line: str, name: str
) -> None:
    file = tmp_path / "methods" / "own.py"
    file.parent.mkdir()
    file.write_text(f"def train():\n    {line}\n")
    (file.parent / name).write_text("1")
    assert (file.parent / name).resolve() in identity.closure(file)


def test_the_packages_above_a_module_belong_to_the_method(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "own.py").write_text("from .below.part import A")
    for part in ("__init__.py", "part.py"):
        (tmp_path / "below" / part).write_text("A = 1")
    assert (tmp_path / "below/__init__.py").resolve() in identity.closure(tmp_path / "own.py")


def test_a_long_text_that_ends_like_a_files_name_is_none(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(repr(300 * "a" + ".cpp"))
    assert (tmp_path / "own.py").resolve() in identity.closure(tmp_path / "own.py")


def test_of_the_executed_files_those_are_told_that_the_hash_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (
        "own/_part.py",
        "own/decay.py",
        "own/kernel.so",
        "path/aside/part.py",
        "other/one.py",
        "other/one.so",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    (tmp_path / "own" / "own.py").write_text("from methods import _part\nimport numpy, aside\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    executed = [*map(str, tmp_path.rglob("*.*")), str(identity.ROOT / "harness/core/job.py")]
    executed += [str(module.__file__) for module in (json, pytest)]
    notes = [*(Executed(file, 0) for file in executed), Executed("a text in own.py line 7", None)]
    lacking = identity.CodeIdentity.of(tmp_path / "own" / "own.py").lacks(notes)
    assert lacking == [
        f"{tmp_path}/other/one.py",
        f"{tmp_path}/other/one.so",
        "a text in own.py line 7",
        "decay.py",
        "kernel.so",
    ]


def test_an_installed_package_counts_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import yaml\n")
    before = identity.source_hash(tmp_path / "mine.py")
    version = identity._distribution_version
    monkeypatch.setattr(
        identity, "_distribution_version", lambda name: "0.0.1" if name == "yaml" else version(name)
    )
    assert identity.source_hash(tmp_path / "mine.py") != before
