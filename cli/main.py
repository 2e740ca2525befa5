"""The entry point: finds the verb, and turns every error of the user into one line and an exit code.

The verbs are defined in job_verbs.py (run, sweep, plan, search, case, setup, demo), result_verbs.py (fairness, import,
verify, compare, report, bundle, add, notebook), advise.py, doctor.py (doctor, rates), method_contract.py
(check-method), completion.py, releases.py and places/shared/docker_image.py (image). Methods may bring further verbs
(Method.verbs).
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import sys
from pathlib import Path

import click

from cli import completion, job_verbs, options, result_verbs
from cli.advise import advise
from cli.doctor import doctor, rates
from cli.exit_codes import CRASH, INTERRUPTED, MEMORY, UNAVAILABLE, USAGE
from cli.job_options import WithMethods
from cli.job_verbs import EXAMPLES
from cli.method_contract import check_method
from cli.releases import releases
from harness.base.console import readable_output
from harness.core import method
from harness.jobs.sweep import FolderLost
from places.shared.docker_image import image

FIRST_CALLS = """\
What people do first:
  ./run.sh demo --quick                              see it work: two methods, three figures, a report, in a minute
  ./run.sh -m stronghold -l 4 -h 256 -b 2 --seq 256  train by one method, and judge the run
  ./run.sh sweep -m all -l 2,4 -h 256 -b 2                      compare methods and sizes in one table
  ./run.sh advise                                    which method suits this machine, and what fits
  ./run.sh case 3 --profile demo                     make a figure of the paper
./run.sh --help lists all verbs and methods; ./run.sh VERB --help the options."""


GROUPS = {  # verbs by purpose, in the order in which --help lists them; verbs that methods bring come last
    "Before a run": ("advise", "plan", "doctor", "rates", "setup"),
    "Train": ("run", "sweep", "search", "releases", "demo"),
    "Results": ("compare", "report", "fairness", "bundle", "add"),
    "The papers' figures and claims": ("case", "verify", "import", "notebook"),
    "Around it": ("check-method", "image", "completion"),
}
OF_METHODS = "Brought by methods"


class Door(WithMethods, click.Group):
    """Click's group of all verbs. A call that begins with an option is a `run`, because published calls name no
    verb."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        number = 0  # of words before the first that names no folder of methods
        while number < len(args) and args[number].partition("=")[0] == "--methods":
            number += 1 if "=" in args[number] else 2
        if 0 < number < len(args) and self.get_command(context, args[number]):
            args = [args[number], *args[:number], *args[number + 1 :]]
        if args and args[0].startswith("-") and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(context, args)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return self.commands.get(name) or self._of_methods().get(name)

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(self.all_verbs())

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs into the help, grouped by purpose."""
        verbs, grouped = self.all_verbs(), set().union(*GROUPS.values())
        groups = {**GROUPS, OF_METHODS: tuple(sorted(verbs.keys() - grouped))}
        width = formatter.width - 6 - max(map(len, verbs))
        for title, names in groups.items():
            with formatter.section(title):
                formatter.write_dl([(name, verbs[name].get_short_help_str(width)) for name in names])

    def all_verbs(self) -> dict[str, click.Command]:
        return {**self._of_methods(), **self.commands}

    def _of_methods(self) -> dict[str, click.Command]:
        modules = {cls.verbs for cls in method.loadable(()).values() if cls.verbs}
        return {
            verb.name: verb for module in sorted(modules) for verb in importlib.import_module(module).VERBS
        }


@click.group(
    cls=Door,
    epilog=EXAMPLES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["--help"], "show_default": True},
)
@options.methods
@click.pass_context
def door(context: click.Context, methods_folder: tuple[Path, ...]) -> None:
    """Train models larger than the device by several methods, and measure all in the same way.

    The gate compares each run with the reference: a run that trained otherwise has no throughput.
    """
    if context.invoked_subcommand is None:
        click.echo(FIRST_CALLS)


for verb in (
    *job_verbs.VERBS,
    *result_verbs.VERBS,
    advise,
    check_method,
    completion.completion,
    doctor,
    image,
    rates,
    releases,
):
    door.add_command(verb)


def main() -> None:
    """Run the call, and exit with its code. The code is the verb's own, 2 for wrong usage, or 130 if Ctrl-C, SIGTERM or
    a closed pipe interrupted the call."""
    if completion.is_asked_for():
        completion.print_completions(door)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        # signals that the caller ignores stay ignored, as under nohup
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    with readable_output():
        _invoke_verb()


def _invoke_verb() -> None:
    try:
        # click's own main() is not used here, because it exits with 1 if a pipe is closed
        with door.make_context("./run.sh", sys.argv[1:]) as context:
            door.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _exit_with_line(
            "interrupted: finished runs are kept, and the same call starts the others again", INTERRUPTED
        )
    except BrokenPipeError:  # the program that reads the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(INTERRUPTED)
    except click.NoSuchOption as error:
        _exit_with_line(f"error: {_no_option_text(error)}", USAGE)
    except click.ClickException as error:
        _exit_with_line(f"error: {_usage_text(error.format_message())}", USAGE)
    except OSError as error:
        _exit_with_system_error(error)
    except FolderLost as error:
        _exit_with_line(f"error: {error}", CRASH)
    except ValueError as error:
        _exit_with_line(f"error: {error}", USAGE)
    except method.Unavailable as error:
        _exit_with_line(f"error: {error}", UNAVAILABLE)


def _no_option_text(error: click.NoSuchOption) -> str:
    verbs_with_option = []
    for name, verb in door.all_verbs().items():
        verbs_with_option += [name for param in verb.params if error.option_name in param.opts]
    if not verbs_with_option:
        return f"{error.format_message().rstrip('.')}; see --help"
    has = "has" if len(verbs_with_option) == 1 else "have"
    return f"{error.message.rstrip('.')}; {', '.join(verbs_with_option)} {has} it"


def _usage_text(message: str) -> str:
    hint = "-h is the hidden size, help is --help" if "'-h'" in message else "see --help"
    extra = re.search(r"extra arguments? \((\S+?)[ )]", message)
    if extra and extra[1] in door.all_verbs():
        message = f"expected the verb as the first word, got {extra[1]} after others"
        hint = f"try ./run.sh {extra[1]}, then the other words"
    return f"{message.rstrip('.')}; {hint}"


def _exit_with_system_error(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        _exit_with_line(
            "error: too many open files: raise the limit, ulimit -n 256, and repeat the call", USAGE
        )
    file = f" {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" in{file}" if file else ""
        _exit_with_line(f"error: the disk is full{where}: free some space and repeat the call", MEMORY)
    _exit_with_line(
        f"error: cannot use{file or ' a file'}: {error.strerror or error}; try another one", USAGE
    )


def _exit_with_line(line: str, code: int) -> None:
    print(line.replace("\n", "\\n"), file=sys.stderr)  # keeps one line: an argument may contain line ends
    sys.exit(code)
