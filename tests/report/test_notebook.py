"""The notebook: it is what its source makes, holds no outputs, and shows every figure."""

from __future__ import annotations

import json
from pathlib import Path

import nbclient
import nbformat

from harness.report import notebook

SOURCE = notebook.FOLDER / "ae.py"


def executed(results: Path) -> list[dict]:
    """The outputs of its code cells, run from top to bottom by a kernel of this Python, on other results."""
    made = nbformat.reads(notebook.notebook_text(SOURCE.read_text()), as_version=4)
    place = next(index for index, cell in enumerate(made.cells) if "parameters" in cell.metadata.get("tags", []))
    made.cells.insert(place + 1, nbformat.v4.new_code_cell(f"RESULTS = Path({str(results)!r})"))
    nbclient.NotebookClient(made, timeout=600, resources={"metadata": {"path": str(notebook.FOLDER)}}).execute()
    return [output for cell in made.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_is_what_its_source_makes() -> None:
    text = SOURCE.with_suffix(".ipynb").read_text()
    assert text == notebook.notebook_text(SOURCE.read_text()), "python -m harness.report.notebook writes it again"
    nbformat.validate(nbformat.reads(text, as_version=4))


def test_a_source_becomes_cells_with_their_text_and_tags() -> None:
    text = notebook.notebook_text('# %% [markdown]\n# # A\n#\n# b\n\n# %% tags=["t"]\nx = 1\n\ny = 2\n')
    cells = json.loads(text)["cells"]
    assert [cell["id"] for cell in cells] == ["cell-0", "cell-1"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code"]
    assert ["".join(cell["source"]) for cell in cells] == ["# A\n\nb", "x = 1\n\ny = 2"]
    assert cells[1]["metadata"] == {"tags": ["t"]} and cells[1]["outputs"] == []
