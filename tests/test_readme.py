"""README.md says what is there: the tree, the methods, commands that the door takes; and stays short."""

from __future__ import annotations

import ast
import contextlib
import re
import shlex

import click
import pytest

from harness.cli import main
from harness.cli.job_options import make_jobs
from harness.core import method
from harness.core.method import ROOT
from harness.jobs.sweep import resolve

README = (ROOT / "README.md").read_text()
TREE = README.split("## The tree")[1].split("## ")[0]
IN_BLOCKS = [re.split(r"  +", line.strip())[0] for line in README.splitlines() if line.startswith("    ./run.sh")]
IN_TEXT = re.findall(r"`(\./run\.sh [^`]+)`", " ".join(README.split()))
PLACEHOLDERS = {"DIR": str(ROOT), "LOGS...": str(ROOT / "README.md")}
COMMANDS = dict.fromkeys(IN_BLOCKS + IN_TEXT)


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
    with click.Context(main.door, info_name="./run.sh") as context:
        text = " ".join(main.door.get_help(context).split())
    for name in method.names():
        options = method.option_names(method.load(name))
        assert not options or f"(options: {', '.join(options)})" in text, name


@pytest.mark.parametrize("line", COMMANDS)
def test_the_door_takes_every_command(line: str) -> None:
    """Up to where it would begin to train."""
    command: click.Command = main.door
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)[1:] if word != "..."]
    while isinstance(command, click.Group):
        words = ["run", *words] if command is main.door and words[0].startswith("-") else words
        name, found, words = command.resolve_command(click.Context(command), words)
        assert found, name
        command = found
    if "--help" in words:
        return
    told = command.make_context(line, words).params
    if "method_names" in told:
        for job in make_jobs({**told, "num_layers": [min(told["num_layers"][-1], 32)]}, ()):
            with contextlib.suppress(method.Unavailable):
                resolve(job)


def test_it_is_read_in_one_sitting_on_any_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 305 and max(map(len, lines)) <= 120
