"""The verb check-method: the contract of a method on a file, a line for each check."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from harness.cli.exit_codes import CHECK_FAILED


@click.command(name="check-method")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE")
def check_method(file: Path) -> None:
    """Check that a method's file keeps the contract, by tiny runs on the CPU. Exit code 1: a check failed."""
    from harness.evidence.method_contract import outcomes

    if file.suffix != ".py" or file.name.startswith("_"):
        raise ValueError(f"expected a method's file, such as my_method.py, got {file}")
    code = 0
    for name, is_passed, told in outcomes(file):
        code = code if is_passed else CHECK_FAILED
        print(f"{'passed' if is_passed else 'failed'}  {name}: {' '.join(told.split())}", flush=True)
    sys.exit(code)
