"""Writes text for people: prints tables, escapes characters that would control the terminal, and words counts."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# width of a table in characters if output goes to a file or a pipe; longer cells are folded
TABLE_CHARACTERS = 200
# Pattern of characters that must not reach a terminal or a page. Control characters (except tab and line end) and marks
# that change the direction of writing control the terminal; line separators break a line in two. Surrogates stand for
# bytes of a file name that are not UTF-8, and no stream can write surrogates.
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def readable(text: str) -> str:
    """Return the text with each character of CONTROL_CHARACTERS replaced by its escape, as Python writes it."""
    return CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _Readable:
    """A text stream that passes all text through readable() and writes it to another stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(readable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def readable_output() -> Iterator[None]:
    """Within this context, pass all text for standard output and standard error through readable(). The text may come
    from logs, records and file names, which may hold any character."""
    while (
        descriptor := os.open(os.devnull, os.O_RDWR)
    ) <= 2:  # so no other file gets a closed stream's number
        pass
    os.close(descriptor)
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Readable(stream or open(os.devnull, "w")) for stream in streams)  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def terminal() -> Any:
    """Return standard output itself, for a library that draws with control characters. Text given to the library must
    be readable() already."""
    return getattr(sys.stdout, "stream", sys.stdout)


def is_notebook() -> bool:
    """True in a notebook's kernel, and in processes that the notebook's cells start. There a progress bar must not be
    drawn: a cell with `!./run.sh` has a terminal, but its output would keep every state of the bar."""
    return "JPY_PARENT_PID" in os.environ


def print_table(
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    title: str | None = None,
    *,
    numbers: Iterable[str] = (),
    widths: Mapping[str, int] | None = None,
    has_lines: bool = False,
) -> None:
    """Print a table of rows under the names of its columns. The table is as wide as the terminal; without a terminal it
    is TABLE_CHARACTERS characters wide.

    `numbers`: names of the columns that are aligned to the right. `widths`: the most characters of a line in a column,
    by the column's name. `has_lines`: True draws lines between the rows, and also folds cells of the first column that
    are too long.
    """
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        show_lines=has_lines,
        box=HEAVY_HEAD if has_lines else SIMPLE_HEAD,
        pad_edge=has_lines,
        padding=(0, 1) if has_lines else (0, 1, 0, 0),
    )
    for index, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if name in numbers else "left",
            overflow="fold",
            max_width=(widths or {}).get(name),
            no_wrap=not (index or has_lines),
        )
    for row in rows:
        table.add_row(*(readable(str(cell)) for cell in row))
    width = None if sys.stdout.isatty() else TABLE_CHARACTERS
    Console(file=terminal(), width=width, markup=False).print(table)


def counted(number: int, noun: str) -> str:
    """Return a text such as `1 step` or `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
