"""What is printed commands no terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from harness.base.console import counted, print_table, readable_output

COMMAND = "\x1b]0;owned\x07\x9b2J\u202e"
SHOWN = "\\x1b]0;owned\\x07\\x9b2J\\u202e"


def test_what_would_command_a_terminal_is_shown_as_an_escape(capsys: pytest.CaptureFixture[str]) -> None:
    with readable_output():
        print("a\tb", COMMAND)
        print(COMMAND, file=sys.stderr)
    assert capsys.readouterr() == (f"a\tb {SHOWN}\n", f"{SHOWN}\n")


def test_a_table_shows_markup_and_commands_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with readable_output():
        print_table(["name"], [["[/dev/shm/x]"], [COMMAND]])
    out = capsys.readouterr().out
    assert "[/dev/shm/x]" in out and SHOWN in out


def test_a_name_that_is_not_utf8_is_shown(tmp_path: Path) -> None:
    """As a real stream would refuse it."""
    with open(tmp_path / "shown", "w", encoding="utf-8") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        with readable_output():
            print(os.fsdecode(b"log_\xff.txt"))
    assert (tmp_path / "shown").read_text() == "log_\\udcff.txt\n"


def test_a_noun_is_singular_where_its_number_is_one() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
