"""A file of a user's that imports a module by its former name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from harness.base.former_names import PRESENT
from harness.base.imported_file import imported
from harness.core import identity

SOURCE = """
from harness.core import gpt as by_package
from harness.core.gpt import GPT
from harness.core.model import build
from harness.figures.case import Case
"""


def test_a_file_that_imports_former_names_gets_the_present_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "of_another_year.py"
    file.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    module = imported("of_another_year", file)
    assert module.by_package is sys.modules["harness.models.gpt"]
    assert module.GPT is sys.modules["harness.models.gpt"].GPT
    assert module.build is sys.modules["harness.models.model"].build
    assert module.Case is sys.modules["papers.figures.case"].Case


@pytest.mark.parametrize("present", PRESENT.values())
def test_a_former_name_leaves_the_present_modules_spec(present: str) -> None:
    assert importlib.import_module(present).__spec__.name == present  # type: ignore[union-attr]


def test_the_identity_of_a_method_covers_what_it_imports_by_a_former_name(tmp_path: Path) -> None:
    file = tmp_path / "of_another_year.py"
    file.write_text("from harness.core.model import build\n")
    assert "model.py" in {path.name for path in identity.closure(file)}
