"""Tables for the console, as wide as the terminal, or 200 columns wide if output goes to a file or a pipe."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

WIDTH = 200  # columns of a table if there is no terminal; longer cells fold, nothing is cut off
# Characters that command a terminal: control characters except tab and line end, and marks that change the direction of
# writing. Also surrogates: they stand for bytes of a file name that are not UTF-8, and no stream can write them.
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def readable(text: str) -> str:
    """Return the text with an escape in place of each character that would command a terminal."""
    return COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _Readable:
    """A text stream that writes readable() text."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(readable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def readable_output() -> Iterator[None]:
    """Pass all output in this context through readable(), because logs, records and file names may hold anything."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # a closed stream's number must not go to another file
        pass
    os.close(handle)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Readable(stream or open(os.devnull, "w")) for stream in streams)  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def terminal() -> Any:
    """Return standard output for a library that draws by control characters; pass the library readable() text only."""
    return getattr(sys.stdout, "stream", sys.stdout)


def is_notebook() -> bool:
    """True in a notebook's kernel and in processes that its cells start. `!./run.sh` has a terminal in a cell, but the
    cell's output keeps every state of a progress bar."""
    return "JPY_PARENT_PID" in os.environ


def print_table(
    columns: Sequence[str], rows: Iterable[Iterable[object]], title: str | None = None, *, numbers: Iterable[str] = (),
    widths: Mapping[str, int] | None = None, has_lines: bool = False,
) -> None:  # fmt: skip
    """Print rows under their columns.

    `numbers`: columns aligned to the right. `widths`: largest number of characters of a column. `has_lines`: draw lines
    between the rows, and fold the first column, too, if it is too long.
    """
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", show_lines=has_lines, box=HEAVY_HEAD if has_lines else SIMPLE_HEAD,
        pad_edge=has_lines, padding=(0, 1) if has_lines else (0, 1, 0, 0),
    )  # fmt: skip
    for place, name in enumerate(columns):
        table.add_column(
            name, justify="right" if name in numbers else "left", overflow="fold",
            max_width=(widths or {}).get(name), no_wrap=not (place or has_lines),
        )  # fmt: skip
    for row in rows:
        table.add_row(*(readable(str(cell)) for cell in row))
    Console(file=terminal(), width=None if sys.stdout.isatty() else WIDTH, markup=False).print(table)
