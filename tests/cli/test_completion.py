"""What a shell is told at a Tab, and in bash what then stands there."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from cli import main
from cli.completion import SHELLS, VARIABLE
from harness.base.checkout import ROOT
from tests.support.cli import run


def offered(line: str) -> set[str]:
    """The words that may stand at the end of these."""
    count = len(line.split(" ")) - 1
    ended = run(**{"COMP_WORDS": line, "COMP_CWORD": str(count), VARIABLE: "bash_complete"})
    assert ended.returncode == 0
    return {line.removeprefix("plain,") for line in ended.stdout.splitlines()}


@pytest.mark.parametrize(
    ("line", "among"),
    [
        ("./run.sh ad", "advise"),
        ("./run.sh -m str", "stronghold"),
        ("./run.sh sweep -m l2l,res", "l2l,resident"),
        ("./run.sh plan --machine rtx40", "rtx4090"),
        ("./run.sh advise --model gpt2-", "gpt2-xl"),
        ("./run.sh search la", "largest"),
        ("./run.sh run --dev", "--device-memory"),
        ("./run.sh completion z", "zsh"),
    ],
)
def test_what_may_follow_is_offered(line: str, among: str) -> None:
    completions = offered(line)
    assert among in completions and all(text.startswith(line.split(" ")[-1]) for text in completions)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_asks_the_program_that_was_typed(shell: str) -> None:
    script = run("completion", shell).stdout
    assert f"{VARIABLE}={shell}_complete $" in script and "run.sh" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completes_the_door_by_its_path() -> None:
    """The function that bash calls at a Tab, called as bash does, on a call of ./run.sh."""
    script = run("completion", "bash").stdout
    tab = "complete -p run.sh; COMP_WORDS=(./run.sh comp); COMP_CWORD=1; _runsh_completion ./run.sh"
    called = f"{script}{tab}; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", called], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "compare completion" and "-F _runsh_completion" in done.stdout


def test_every_verb_has_its_place_in_the_help() -> None:
    grouped = [name for names in main.GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(main.door.commands)
    text = run("--help").stdout
    for title, names in main.GROUPS.items():
        block = text.split(f"{title}:\n")[1].split("\n\n")[0]
        assert [line.split()[0] for line in block.splitlines() if line[2] != " "] == list(names)
    assert "  varuna " in text.split(f"{main.OF_METHODS}:\n")[1]
