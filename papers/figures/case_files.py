"""Writes a case's rows to a CSV file, and draws the case's figure from that file."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.console import readable
from harness.base.foreign_file import checked, read_text
from harness.base.whole_file import write_whole
from harness.core import method
from harness.core.record import Record
from papers.figures import case, plot
from papers.figures.point import FigureRow
from papers.figures.profile import CaseProfile

if TYPE_CHECKING:
    from pandas import DataFrame

# Matches the start of a text that a spreadsheet would evaluate as a formula. A number such as -1.5 does not match.
FORMULA = re.compile(r"^(?=[=+\-@\t\r])(?![-+]?[\d.]+(?:e[-+]?\d+)?$)")
ANY_RUNS = "folder"  # stands in file names in place of a profile's name
EDITED = "its line of the table is not as it was extracted"
COLUMNS = [field.name for field in dataclasses.fields(FigureRow) if field.name != "values"]


def stem(number: int, name: str, out: Path) -> Path:
    return out / f"case{number}_{name}"


def extract(
    number: int, case_profile: CaseProfile, records: Sequence[Record], out: Path, results: Path | None = None
) -> Path:
    """Write the CSV of a case: our rows, then the published rows. Return its path. Raises ValueError if we have no
    row."""
    return write_rows(
        number, case_profile.name, case.figure_rows(number, case_profile, records, results), out
    )


def write_rows(number: int, name: str, rows: Sequence[FigureRow], out: Path) -> Path:
    """Write a CSV of these rows, with the published rows after them, and return its path. `name`: the profile's name,
    or the word that replaces it in the file's name."""
    import pandas

    all_rows = [*rows, *case.published_rows(number)]
    frame = pandas.DataFrame([vars(row) for row in all_rows], columns=COLUMNS, dtype=object)
    frame["keys"] = frame["keys"].map(" ".join)
    frame["steps"] = frame["steps"].map(lambda steps: " ".join(map(str, steps)))
    frame.insert(0, "case", number)
    frame.insert(1, "profile", name)
    out.mkdir(parents=True, exist_ok=True)
    path = Path(f"{stem(number, name, out)}.csv")
    cells = pandas.read_csv(io.StringIO(_csv_text(frame)), dtype=str, keep_default_na=False)
    cells["check"] = [_line_hash(line) for line in cells.to_dict("records")]
    write_whole(path, cells.to_csv(index=False, lineterminator="\n"))
    return path


def _line_hash(line: Mapping[str, str]) -> str:
    """Return a hash of a line's cells. By this hash, read_csv() finds lines that were changed after they were
    written."""
    cells = [f"{name}={text}" for name, text in line.items() if name != "check"]
    return hashlib.sha256("\n".join(cells).encode(errors="replace")).hexdigest()[:12]


def write_table(frame: DataFrame, path: Path) -> None:
    write_whole(path, _csv_text(frame))


def _csv_text(frame: DataFrame) -> str:
    """Return the table as CSV. Each text that a spreadsheet would evaluate as a formula gets an apostrophe before
    it, and characters that would control a terminal become escapes."""
    safe = frame.map(lambda cell: FORMULA.sub("'", readable(cell)) if isinstance(cell, str) else cell)
    return safe.to_csv(index=False, lineterminator="\n")


def draw(number: int, path: Path) -> list[Path]:
    """Draw a case's figure from its CSV, into files beside the CSV; return their paths. Raises ValueError if the CSV is
    missing, is no table of this case, or has rows of several profiles or machines."""
    rows, names = read_csv(path)
    its_case, metrics = case.load_case(number), {row.metric for row in rows}
    if not rows or not (its_case.mixes_metrics or metrics == {its_case.metric}):
        kinds = ", ".join(sorted(metrics)) or "no row"
        raise ValueError(
            f"{path} is no table of case {number}: expected rows of {its_case.metric}, got {kinds:.80}"
        )
    machines = {row.machine for row in rows if row.origin == "run"}
    if len(names) > 1 or len(machines) > 1:
        values = "; ".join(sorted(names if len(names) > 1 else machines))
        raise ValueError(
            f"{path}: expected rows of one profile and machine, got {values}: draw each from its own table"
        )
    return plot.save(its_case.figure(rows, f"profile {names.pop()}"), path.with_suffix(""))


def read_csv(path: Path) -> tuple[list[FigureRow], set[str]]:
    """Return the rows of a CSV, and the names of the profiles in it. A row is marked as not valid if its line was
    changed after it was written. Raises ValueError if the file is no table of a case."""
    import pandas

    try:
        frame = pandas.read_csv(io.StringIO(read_text(path)), dtype=str, keep_default_na=False)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; try ./run.sh case N --extract") from error
    except ValueError as error:  # pandas raises it if the file holds no table
        raise ValueError(f"{path} is no table of a case: {' '.join(str(error).split())}") from error
    is_edited = [line.get("check") != _line_hash(line) for line in frame.to_dict("records")]
    if missing := {"profile", "keys"} - set(frame):
        raise ValueError(f"{path} is no table of a case: expected a column {', '.join(sorted(missing))}")
    frame = frame.replace(r"^'(?=[=+\-@\t\r])", "", regex=True)
    for name in {"keys", "steps"} & set(frame):
        frame[name] = frame[name].str.split()
    lines = [
        {name: line[name] for name in COLUMNS if line.get(name, "")} for line in frame.to_dict("records")
    ]
    try:
        rows = _checked_rows(lines)
    except ValueError as error:
        raise ValueError(f"{path} is no table of a case: {error}") from error
    rows = [
        dataclasses.replace(row, valid=False, reason=EDITED) if edited else row
        for row, edited in zip(rows, is_edited, strict=True)
    ]
    return rows, set(frame["profile"])


def _checked_rows(lines: Sequence[dict[str, Any]]) -> list[FigureRow]:
    """Return the rows that these lines of a table hold, each as cells by name. Raises ValueError for a wrong type, an
    unknown method, and a number that is not finite or below 0."""
    needed = {"window_size": None, "value": None}  # fields without a default value
    rows = checked(list[FigureRow], [needed | line for line in lines])
    wrong: list[Any] = [row.method for row in rows if row.method not in method.names()]
    for row in rows:
        numbers = [value for value in (*vars(row).values(), *row.steps) if isinstance(value, float)]
        wrong += [number for number in numbers if not math.isfinite(number)]
    for row in rows:
        wrong += [number for number in (row.value, *row.steps) if number is not None and number < 0]
    if wrong:
        raise ValueError(f"expected known methods and finite numbers from 0, got {wrong[0]!r:.80}")
    return rows
