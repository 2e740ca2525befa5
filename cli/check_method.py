"""The verb `check-method`: checks whether a method's file keeps the contract of methods, and prints one line for each
check."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cli.exit_codes import CHECK_FAILED


@click.command(name="check-method")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE")
def check_method(file: Path) -> None:
    """Check that a method's file keeps the contract of methods, by tiny runs on the CPU. Exit code 1: a check
    failed."""
    from cli.method_contract import outcomes

    if file.suffix != ".py" or file.name.startswith("_"):
        raise ValueError(f"expected a method's file, such as my_method.py, got {file}")
    failures: set[str] = set()
    for name, is_passed, message in outcomes(file):
        message_text = " ".join(message.split())
        if not is_passed:
            # leave out the name of the log, which differs between runs that fail alike
            failure = message_text.partition("; its log has the traceback")[0]
            message_text = "as told above" if failure in failures else message_text
            failures.add(failure)
        print(f"{'passed' if is_passed else 'failed'}  {name}: {message_text}", flush=True)
    sys.exit(CHECK_FAILED if failures else 0)
