"""What is printed commands no terminal."""

from __future__ import annotations

import sys

import pytest

from harness.base.console import print_table, readable_output

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
