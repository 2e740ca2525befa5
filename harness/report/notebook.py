"""What the notebook calls, and how it is made: `python -m harness.report.notebook` writes notebooks/*.ipynb of
notebooks/*.py (jupytext's percent format), without outputs."""

from __future__ import annotations

from pathlib import Path

from harness.core.method import ROOT
from harness.evidence import collect, verify
from harness.figures import case
from harness.report import tables

FOLDER = ROOT / "notebooks"


def show_case(number: int, profile: str, machine: str | None, results: Path) -> None:
    """Run what has no record yet for one figure, then show its table, with the published numbers, and the figure."""
    from IPython.display import Image, display

    out = results / "figures"
    collect.main(str(number), profile, machine, None, None, results, out, None, as_json=False)
    stem = case.stem(number, case.profile_of(profile, machine).name, out)
    display(tables.texts(tables.row_table("", case.read_csv(Path(f"{stem}.csv"))[0], [])).style.hide(axis="index"))
    display(Image(f"{stem}.png"))


def show_claims(results: Path, against: str | None = None, machine: str | None = None) -> None:
    """Judge the papers' claims by what is recorded, or by what the original published (against="published")."""
    verify.show(verify.findings(results, against, machine), as_json=False)


def notebook_text(source: str) -> str:
    """The notebook as JSON; cell ids are numbers, so that the same source gives the same bytes."""
    import jupytext

    made = jupytext.reads(source, "py:percent")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"
    return jupytext.writes(made, fmt="ipynb")


if __name__ == "__main__":
    for path in FOLDER.glob("*.py"):
        path.with_suffix(".ipynb").write_text(notebook_text(path.read_text()))
