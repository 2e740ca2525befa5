"""The functions that the notebook calls, and the program that generates the notebook.

`python -m papers.report.notebook` writes notebooks/*.ipynb, without outputs, from notebooks/*.py, which are in
jupytext's percent format.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.base import scratch
from harness.base.checkout import ROOT
from harness.base.console import counted
from harness.core.job import gib
from harness.devices import machine
from papers.claims import verify
from papers.claims.campaign import Campaign, CaseCall, campaign_text, run_case
from papers.figures import case, case_files
from papers.report import tables

FOLDER = ROOT / "notebooks"
DRAWN = ("figures", "report", "traces", "probes")  # folders beside the records that clean_up() can remove


def show_case(number: int, profile: str | None, machine: str | None, results: Path) -> None:
    """Run those jobs of a case that have no record. Then show the case's figure, and the table of its numbers beside
    the published ones."""
    from IPython.display import Image, display

    out = results / "figures"
    out.mkdir(parents=True, exist_ok=True)
    run_case(CaseCall(str(number), results, profile, machine, out=out))
    stem = case_files.stem(number, case.profile_of(profile, machine).name, out)
    rows, _ = case_files.read_csv(Path(f"{stem}.csv"))
    display(tables.cell_texts(tables.row_table("", rows, [])).style.hide(axis="index"))
    display(Image(f"{stem}.png"))


def show_neighbors() -> None:
    """Print the other processes on the GPU and the GPU's free memory; without a GPU, print the load average."""
    gpu = machine.gpu()
    if not gpu:
        print(
            f"no GPU here: runs are on the CPU or on sim, load average {machine.surroundings('cpu')['load_average']}"
        )
        return
    others = machine.surroundings("cuda").get("foreign_processes", [])
    print(f"{gpu['gpu']}: {gib(machine.gpu_free_bytes() or 0)} of {gib(gpu['gpu_bytes'])} are free")
    for other in others:
        print(
            f"process {other['pid']} has {gib(other['device_bytes'] or 0)}: times measured beside it are its, too"
        )


def show_minutes(profile: str | None, machine: str | None, results: Path) -> None:
    """Print a line for each case, with a rough estimate of the time that its missing runs take."""
    case_profile = case.profile_of(profile, machine)
    for number in case.numbers_of_all():
        runs = Campaign([number], case_profile, results).planned()
        print(f"case {number}: {campaign_text(runs, case_profile)}")


def clean_up(results: Path, everything: bool = False) -> None:
    """Remove the files that killed runs left behind. `everything`: True: also remove all records and figures in
    `results`."""
    scratch.remove_stale_folders()
    paths = [*results.glob("log_*"), *(results / name for name in DRAWN)] if everything else []
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kept = counted(len(list(results.glob("log_*.json"))), "record")
    print(
        f"{kept} in {results}" + ("" if everything else "; clean_up(RESULTS, everything=True) removes them")
    )


def show_claims(results: Path, against: str | None = None, machine: str | None = None) -> None:
    """Show the papers' claims, judged by the records or, with against="published", by the published numbers of the
    original."""
    verify.print_findings(verify.findings(results, against, machine), as_json=False)


def notebook_text(source: str) -> str:
    """Return the notebook as JSON. The ids of its cells are their numbers, so that the same source gives the same
    bytes."""
    import jupytext

    notebook = jupytext.reads(source, "py:percent")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return jupytext.writes(notebook, fmt="ipynb")


if __name__ == "__main__":
    for path in FOLDER.glob("*.py"):
        path.with_suffix(".ipynb").write_text(notebook_text(path.read_text()))
