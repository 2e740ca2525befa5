"""Runs jobs without the gate's probe, and writes their verdicts as a table in Markdown. bench/ranks.py and
bench/families.py share this code."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.base.whole_file import write_whole
from harness.devices import machine
from harness.gate.probe import NONE
from harness.jobs.progress import reporter
from harness.jobs.sweep import Sweep


def arguments(about: str) -> argparse.Namespace:
    """Return the command line's `results`, a folder of records or None, and `out`, the table's file or None."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--results", type=Path, help="folder of the runs' records; default: a temporary one")
    parser.add_argument("--out", type=Path, help="file of the table, in Markdown")
    return parser.parse_args()


@contextlib.contextmanager
def sweeping(results: Path | None) -> Iterator[Sweep]:
    """Yield a Sweep into this folder, or into a temporary one."""
    with tempfile.TemporaryDirectory() as folder, reporter(as_json=False) as report:
        into = results or Path(folder)
        into.mkdir(parents=True, exist_ok=True)
        yield Sweep(into, report=report, probe=NONE)


def write(out: Path | None, title: str, command: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write the table, with the command that made it and this machine's CPU, unless `out` is None."""
    if out:
        about = f"By `{command}` on {machine.facts()['cpu']}, {machine.facts()['cores']} cores."
        lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
        write_whole(out, "\n".join([f"# {title}", "", about, "", *lines, ""]))
