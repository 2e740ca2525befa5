"""The verb `completion`, and the answers that a shell asks for at each Tab; click makes both."""

from __future__ import annotations

import os

import click
from click.shell_completion import BashComplete, ShellComplete, ZshComplete

NAME, VARIABLE = "run.sh", "_RUN_SH_COMPLETE"  # a shell looks up the completion of ./run.sh under run.sh


class _Zsh(ZshComplete):
    """click's script for zsh, changed to run the command as it was typed, because click's own needs the command's name
    on PATH."""

    source_template = ZshComplete.source_template.replace(
        "    (( ! $+commands[%(prog_name)s] )) && return 1\n", ""
    ).replace("zsh_complete %(prog_name)s", "zsh_complete ${words[1]}")


SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": _Zsh}


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes verbs, options and names: eval "$(./run.sh completion bash)"."""
    print(SHELLS[shell](context.find_root().command, {}, NAME, VARIABLE).source())


def is_asked_for() -> bool:
    """True if a shell made this call to complete a word at a Tab."""
    return VARIABLE in os.environ


def answer(door: click.Command) -> None:
    """Print the words that complete the word at the Tab."""
    shell = os.environ[VARIABLE].removesuffix("_complete")
    if shell in SHELLS:
        print(SHELLS[shell](door, {}, NAME, VARIABLE).complete())
