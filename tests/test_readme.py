"""README.md says what is there: the tree, the exit codes, the defaults."""

from __future__ import annotations

import re

from harness import method
from harness.method import ROOT

README = (ROOT / "README.md").read_text()
TREE = README.split("## The tree")[1].split("## ")[0]


def test_every_module_has_its_line_in_the_tree_and_every_line_its_module() -> None:
    there = {path.name for folder in ("harness", "methods", "cases", "bench") for path in (ROOT / folder).glob("*.py")}
    there = {name for name in there if not name.startswith("__") and not name.endswith("_draw.py")}
    assert set(re.findall(r"\w+\.py", TREE)) == there


def test_every_folder_and_script_of_the_tree_exists() -> None:
    for name in re.findall(r"^    ([\w.]+(?:/|\.sh|\.toml|\.txt))", TREE, flags=re.MULTILINE):
        assert (ROOT / name).exists(), name


def test_every_method_has_its_row() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)` \|", README, flags=re.MULTILINE))
    assert rows == set(method.names())


def test_every_method_lists_its_options() -> None:
    for name in method.names():
        row = re.search(rf"^\| `{name}` .*$", README, flags=re.MULTILINE)
        assert row and set(re.findall(r"`(\w+)`", row[0].split("|")[-2])) == set(method.option_names(method.load(name)))
