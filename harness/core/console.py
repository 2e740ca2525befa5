"""Tables for the console: as wide as the terminal, 200 columns where output goes to a file or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

WIDTH = 200  # columns without a terminal; cells fold, nothing is cut off


def print_table(
    columns: Sequence[str], rows: Iterable[Iterable[object]], title: str | None = None, *, numbers: Iterable[str] = (),
    widths: Mapping[str, int] | None = None, has_lines: bool = False,
) -> None:  # fmt: skip
    """Print rows under their columns, the first column unfolded unless lines part the rows. `numbers`: columns aligned
    to the right. `widths`: the most characters of a column."""
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
        table.add_row(*map(str, row))
    Console(width=None if sys.stdout.isatty() else WIDTH, markup=False).print(table)
