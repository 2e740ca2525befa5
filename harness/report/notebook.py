"""What the notebook calls, and how it is made: of notebooks/*.py, plain text in the percent format.

`python -m harness.report.notebook` writes notebooks/*.ipynb again, without outputs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from harness.core.console import print_table
from harness.core.method import ROOT
from harness.evidence import collect, verify
from harness.figures import case
from harness.report import tables

FOLDER = ROOT / "notebooks"
# # %%, # %% [markdown] or # %% tags=["parameters"], on a line of its own
MARK = re.compile(r"^# %%(?: \[(markdown)\])?(?: tags=(\[.*\]))?$", re.MULTILINE)


def show_case(number: int, profile: str, machine: str | None, results: Path) -> None:
    """Run what is missing for one figure, then show its table, with the published numbers, and the figure."""
    from IPython.display import Image, display

    out = results / "figures"
    collect.main(str(number), profile, machine, None, None, results, out, None, as_json=False)
    stem = case.stem(number, case.profile_of(profile, machine), out)
    table = tables.row_table("", case.read_csv(Path(f"{stem}.csv"))[0], [])
    texts = [{name: cell.text for name, cell in zip(table.columns, row, strict=True)} for row in table.rows]
    columns = [name for name in texts[0] if name != "records"]
    print_table(columns, [[row[name] for name in columns] for row in texts], has_lines=True)
    display(Image(f"{stem}.png"))


def show_claims(results: Path, against: str | None = None, machine: str | None = None) -> None:
    """Judge the papers' claims by what is recorded, or by what the original published (against="published")."""
    verify.show(verify.findings(results, against, machine), as_json=False)


def made_of(text: str) -> str:
    """The notebook, as JSON of nbformat 4.5, of a source in the percent format."""
    marks = list(MARK.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    cells = [
        _cell(number, mark, text[mark.end() : end]) for number, (mark, end) in enumerate(zip(marks, ends, strict=True))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _cell(number: int, mark: re.Match[str], text: str) -> dict[str, Any]:
    text = text.strip("\n")
    metadata = {"tags": json.loads(mark[2])} if mark[2] else {}
    if mark[1]:
        lines = re.sub(r"^# ?", "", text, flags=re.MULTILINE).splitlines(keepends=True)
        return {"cell_type": "markdown", "id": f"cell-{number}", "metadata": metadata, "source": lines}
    kept = {"execution_count": None, "outputs": [], "source": text.splitlines(keepends=True)}
    return {"cell_type": "code", "id": f"cell-{number}", "metadata": metadata, **kept}


def main() -> None:
    for source in sorted(FOLDER.glob("*.py")):
        source.with_suffix(".ipynb").write_text(made_of(source.read_text()))


if __name__ == "__main__":
    main()
