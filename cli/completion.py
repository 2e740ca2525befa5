"""The verb `completion`, and the answers that a shell asks for at each Tab. click makes the script and the answers."""

from __future__ import annotations

import os

import click
from click.shell_completion import BashComplete, ShellComplete, ZshComplete

# a shell looks for the completion of ./run.sh under the name run.sh
NAME, VARIABLE = "run.sh", "_RUN_SH_COMPLETE"


class _Zsh(ZshComplete):
    """click's script for zsh, changed to run the command as the user typed it. click's own script runs the command by
    its name, which would have to be on PATH."""

    source_template = ZshComplete.source_template.replace(
        "    (( ! $+commands[%(prog_name)s] )) && return 1\n", ""
    ).replace("zsh_complete %(prog_name)s", "zsh_complete ${words[1]}")


SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": _Zsh}


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script by which a shell completes verbs, options and names: eval "$(./run.sh completion bash)"."""
    print(SHELLS[shell](context.find_root().command, {}, NAME, VARIABLE).source())


def is_asked_for() -> bool:
    """True if a shell made this call to complete a word, because the user pressed Tab."""
    return VARIABLE in os.environ


def print_completions(door: click.Command) -> None:
    """Print the possible completions of the word that the user has begun. `door`: the command whose verbs and options
    are proposed."""
    shell = os.environ[VARIABLE].removesuffix("_complete")
    if shell in SHELLS:
        print(SHELLS[shell](door, {}, NAME, VARIABLE).complete())
