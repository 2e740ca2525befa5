"""The notebook: it is what its source makes, holds no outputs, and shows every figure."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbclient
import nbformat
import pynvml
import pytest

from harness.devices import machine
from papers.figures import case
from papers.report import notebook
from tests.support.fake_gpu import FakeGpu

SOURCE = notebook.FOLDER / "ae.py"


def executed(results: Path) -> list[dict]:
    """The outputs of its code cells, run from top to bottom by a kernel of this Python, in a folder of results."""
    written = nbformat.reads(notebook.notebook_text(SOURCE.read_text()), as_version=4)
    place = next(
        index for index, cell in enumerate(written.cells) if "parameters" in cell.metadata.get("tags", [])
    )
    written.cells.insert(place + 1, nbformat.v4.new_code_cell(f"RESULTS = __import__('pathlib').{results!r}"))
    nbclient.NotebookClient(written, timeout=None, resources={"metadata": {"path": str(results)}}).execute()
    return [output for cell in written.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_is_what_its_source_makes() -> None:
    text = SOURCE.with_suffix(".ipynb").read_text()
    assert text == notebook.notebook_text(SOURCE.read_text()), (
        "python -m papers.report.notebook writes it again"
    )
    nbformat.validate(nbformat.reads(text, as_version=4))


def test_a_source_becomes_cells_with_their_text_and_tags() -> None:
    text = notebook.notebook_text('# %% [markdown]\n# # A\n#\n# b\n\n# %% tags=["t"]\nx = 1\n\ny = 2\n')
    cells = json.loads(text)["cells"]
    assert [cell["id"] for cell in cells] == ["cell-0", "cell-1"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code"]
    assert ["".join(cell["source"]) for cell in cells] == ["# A\n\nb", "x = 1\n\ny = 2"]
    assert cells[1]["metadata"] == {"tags": ["t"]} and cells[1]["outputs"] == []


PROGRESS = """
from harness.core.job import Job, Plan, Workload
from harness.jobs.progress import reporter

with reporter(as_json=False) as report:
    job = Job("resident", Workload(), steps=20)
    report({"event": "start", "job": job, "plan": Plan({}), "role": "reference"})
    for step in range(1, 21):
        report({"event": "step", "step": step, "loss": 1.0, "seconds": 0.1, "samples_per_second": 1.0})
"""


def test_progress_of_a_cells_call_is_lines_and_no_bar_that_is_redrawn(tmp_path: Path) -> None:
    """The call has a terminal: eight times a second its bar was added to the cell's output."""
    (tmp_path / "call.py").write_text(PROGRESS)
    call = f"!'{sys.executable}' '{tmp_path / 'call.py'}'"
    written = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(call)])
    nbclient.NotebookClient(written, timeout=None).execute()
    lines = "".join(output.text for output in written.cells[0].outputs).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["step", f"{step}/20"] for step in range(2, 21, 2)]


def test_each_case_is_foretold_in_a_line(tmp_path: Path, capsys) -> None:
    notebook.show_minutes("demo", None, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"case {number}" for number in case.numbers_of_all()
    ]
    assert all(re.search(r"to measure, about \d+ minutes", line) for line in lines)


def test_without_a_gpu_the_load_is_told(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(machine, "gpu", dict)
    notebook.show_neighbors()
    assert re.fullmatch(r"no GPU here: .*, load average [\d.]+\n", capsys.readouterr().out)


def test_other_processes_on_the_gpu_are_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    FakeGpu(80 * 2**30, 2**30, 2**29).install_nvml(monkeypatch)
    other = SimpleNamespace(pid=7, usedGpuMemory=3 * 2**30)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: [other])
    notebook.show_neighbors()
    lines = capsys.readouterr().out.splitlines()
    assert "79.0 GiB of 79.0 GiB are free" in lines[0] and lines[1].startswith("process 7 has 3.0 GiB")


def test_a_clean_up_keeps_what_was_measured_unless_it_is_to_go(tmp_path: Path) -> None:
    files = {"log_l2l.json", "log_l2l.txt", "figures/case1_demo.png", "report/index.html"}
    for name in (*files, "mine.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    notebook.clean_up(tmp_path)
    assert all((tmp_path / name).exists() for name in files)
    notebook.clean_up(tmp_path, everything=True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
