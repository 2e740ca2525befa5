"""README.md says what is there: the tree, the methods; and stays short."""

from __future__ import annotations

import ast
import re

import click

from harness import cli, method
from harness.method import ROOT

README = (ROOT / "README.md").read_text()
TREE = README.split("## The tree")[1].split("## ")[0]


def test_every_path_of_the_tree_exists() -> None:
    folder = ROOT
    for indent, names in re.findall(r"^    (  )?((?:[\w.]+/?(?:, )?)+)", TREE, flags=re.MULTILINE):
        folder = folder if indent else ROOT / names
        for name in names.split(", "):
            assert ((folder / name) if indent else (ROOT / name)).exists(), name


def test_every_file_begins_with_what_it_is() -> None:
    for folder in ("harness", "methods", "cases", "bench", "tests", "examples"):
        for path in (ROOT / folder).glob("*.py"):
            text = path.read_text()
            assert not text or ast.get_docstring(ast.parse(text)), path


def test_every_link_has_its_heading() -> None:
    headings = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", README)) <= anchors


def test_every_method_has_its_row() -> None:
    rows = set(re.findall(r"^\| `([\w-]+)` \|", README, flags=re.MULTILINE))
    assert rows == set(method.names())


def test_help_names_the_options_of_every_method() -> None:
    with click.Context(cli.door, info_name="./run.sh") as context:
        text = " ".join(cli.door.get_help(context).split())
    for name in method.names():
        options = method.option_names(method.load(name))
        assert not options or f"(options: {', '.join(options)})" in text, name


def test_it_is_read_in_one_sitting_on_any_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 305 and max(map(len, lines)) <= 120
