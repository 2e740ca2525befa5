"""The verb `releases`: it runs the chosen cells, continues, and writes the map."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from harness.core.record import Record
from tests.support import records, releases
from tests.support.cli import run

WORDS = ("releases", "--setting", "stage-2", "--setting", "stage-2-offload-4", "--release")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, read_once: None) -> list[str]:
    """The names of the methods that were launched, in place of training by them; nothing is installed."""
    names: list[str] = []

    def launch(job, *rest, **turn) -> Path:
        names.append(job.method)
        path = records.launch(job, *rest, **turn)
        if job.options.get("offload") == "optimizer" and job.options["release"] is not None:
            dataclasses.replace(Record.read(path), status="crash", reason="it breaks").write(path)
        return path

    monkeypatch.setattr("harness.jobs.sweep.launch", launch)
    monkeypatch.setattr("harness.jobs.sweep.prepare", lambda *arguments: None)
    return names


def call(folder: Path, *more: object) -> tuple[int, str]:
    done = run(*WORDS, *more, "--results", folder / "runs", "--out", folder / "releases.md")
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def test_a_second_call_runs_only_what_is_missing(tmp_path: Path, launched: list[str]) -> None:
    code, output = call(tmp_path, "0.18.9")
    assert code == 3 and output.startswith("2 cells, 2 to run, about ")
    assert launched == ["deepspeed", "resident", "deepspeed"]
    code, output = call(tmp_path, "0.18.9", "--release", "0.18.4")
    assert code == 3 and output.startswith("4 cells, 2 to run, about ")
    assert launched[3:] == ["deepspeed", "deepspeed"]
    code, output = call(tmp_path, "0.18.9")
    assert code == 3 and output.startswith("2 cells, 0 to run\n") and len(launched) == 5
    call(tmp_path, "0.18.9", "--rerun")
    assert len(launched) > 5


def test_the_map_is_a_page_a_table_and_a_figure(tmp_path: Path, launched: list[str]) -> None:
    call(tmp_path, "0.18.9")
    page = (tmp_path / "releases.md").read_text()
    assert "| setting | verdict | releases | public report |" in page
    assert (
        "| `stage-2` | passes | 0.18.9 | " in page
        and "| `stage-2-offload-4` | crash: it breaks | 0.18.9 | " in page
    )
    files = sorted(path.name for path in (tmp_path / "runs" / "figures").iterdir())
    assert files == ["case10_demo.csv", "case10_demo.pdf", "case10_demo.png"]
    done = run("case", "10", "--profile", "demo", "--draw", "--results", tmp_path / "runs")
    assert done.returncode == 0, done.stderr


def test_programs_read_the_map_as_json(tmp_path: Path, launched: list[str]) -> None:
    _, output = call(tmp_path, "0.18.9", "--json")
    lines = [json.loads(line) for line in output.splitlines()]
    assert lines[0]["event"] == "plan" and lines[0]["to_run"] == 2
    assert [(line["setting"], line["verdict"]) for line in lines if "setting" in line] == [
        ("stage-2", "passes"),
        ("stage-2-offload-4", "crash"),
    ]


def test_what_the_index_could_not_give_is_tried_again(tmp_path: Path, launched: list[str]) -> None:
    call(tmp_path, "0.18.9")
    for path in (tmp_path / "runs").glob("log_deepspeed*.json"):
        if (record := Record.read(path)).status == "crash":
            why = "deepspeed 0.18.9 cannot be installed: the package index cannot be reached"
            dataclasses.replace(record, status="unavailable", reason=why).write(path)
    assert call(tmp_path, "0.18.9")[1].startswith("2 cells, 1 to run")


def test_a_script_is_printed_and_nothing_runs(launched: list[str]) -> None:
    done = run("releases", "--script", "stage-2-offload-4@0.18.9")
    assert (
        done.returncode == 0
        and done.stdout.startswith('"""DeepSpeed 0.18.9, stage-2-offload-4: ')
        and not launched
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--setting stage-9", "expected a setting of stage-0"),
        ("--only deepspeed --since 9.9", "expected at least one cell, got none"),
        ("--script stage-9@0.18.9", "--script: expected a setting of stage-0"),
        (
            "--setting stage-2 --release new",
            "release: expected a version of deepspeed such as 0.18.9, got 'new'",
        ),
        ("--setting zenflow --release 0.17.4", "expected at least one cell, got none"),
        ("--script stage-2@new", "release: expected a version of deepspeed such as 0.18.9, got 'new'"),
        (
            "--script stage-2@0.18.9 --only deepspeed",
            "--script: expected no other option beside it, got --only",
        ),
    ],
)
def test_a_wrong_call_is_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    files = () if arguments.startswith("--script") else ("--results", tmp_path, "--out", tmp_path / "out.md")
    done = run("releases", *arguments.split(), *files)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_another_file_is_not_replaced_by_the_map(tmp_path: Path) -> None:
    (tmp_path / "out.md").write_text("mine\n")
    done = run("releases", "--setting", "stage-2", "--results", tmp_path, "--out", tmp_path / "out.md")
    assert done.returncode == 2 and "expected a new file" in done.stderr


@pytest.mark.heavy
def test_the_installed_release_trains_in_a_setting(tmp_path: Path) -> None:
    done = run(
        "releases",
        "--setting",
        "stage-2-offload-4",
        "--release",
        installed(),
        "--results",
        tmp_path / "runs",
        "--out",
        tmp_path / "out.md",
    )
    assert done.returncode == 0, done.stderr
    assert f"| `stage-2-offload-4` | passes | {installed()} | " in (tmp_path / "out.md").read_text()


@pytest.mark.heavy
def test_a_release_that_dropped_gradients_is_found(tmp_path: Path) -> None:
    releases.need("deepspeed", "0.18.4")
    done = run(
        "releases",
        "--setting",
        "stage-2-offload-4",
        "--release",
        "0.18.4",
        "--results",
        tmp_path / "runs",
        "--out",
        tmp_path / "out.md",
    )
    assert done.returncode == 5, done.stderr
    line = next(line for line in (tmp_path / "out.md").read_text().splitlines() if " | 0.18.4 | " in line)
    assert "fails: gradient norm 0.8472 instead of 1.709 at step 1" in line and "DeepSpeed 7967" in line


def installed() -> str:
    from cases._releases import ENGINES

    return str(ENGINES["deepspeed"].installed)
