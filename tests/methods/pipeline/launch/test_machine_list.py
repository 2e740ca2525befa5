"""The list of machines, which a user or a script of theirs edits while a job runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from methods.pipeline.launch.machines import agent_command, read_machine_list


def test_an_address_that_ssh_would_take_for_an_option_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machines.txt"
    path.write_text("10.0.0.1\n-oProxyCommand=touch /tmp/x\n")
    with pytest.raises(
        ValueError,
        match=r"machines.txt: expected the address of a machine, which begins with no -, got '-oProxyCommand",
    ):
        read_machine_list(path)


def test_ssh_takes_the_address_for_an_address() -> None:
    arguments = agent_command("10.0.0.1")
    assert arguments[arguments.index("10.0.0.1") - 1] == "--"
