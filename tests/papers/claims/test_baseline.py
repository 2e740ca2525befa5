"""Two commits side by side: do they train the same, which is faster, and the exit code that a CI reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from harness.core.record import Gate, Record
from papers.claims.baseline import (
    OTHERWISE,
    SAME_BITS,
    SAME_WITHIN_ROUNDING,
    UNKNOWN_TRAINING,
    compare_trainings,
)
from tests.cli.test_main import run
from tests.papers.report.test_add import TENSORS, trained
from tests.support import records

OLD = trained("l2l", 1e9, software={"source": "s", "commit": "aaaaaaaaaaaa"})


def later(**changes: Any) -> Record:
    new_record = trained("l2l", 1e9 + 60, software={"source": "t", "commit": "bbbbbbbbbbbb"}, key="new")
    return dataclasses.replace(new_record, **changes)


def twice(record: Record) -> tuple[Record, Record]:
    """The record, and a repeat of it in another process."""
    return record, dataclasses.replace(record, started=record.started + 1)


NEAR = [1.0 + 1e-9] * OLD.job.steps
CASES: dict[str, tuple[Record, str, int]] = {
    "is the same": (later(), SAME_BITS, 0),
    "is faster": (later(step_seconds=[0.5] * OLD.job.steps), SAME_BITS, 0),
    "is slower": (later(step_seconds=[2.0] * OLD.job.steps), SAME_BITS, 8),
    "rounds otherwise": (later(losses=NEAR, bit_exact=True), SAME_WITHIN_ROUNDING, 0),
    "has another loss": (later(losses=[2.0] * OLD.job.steps), OTHERWISE, 5),
    "has other data": (later(data_sha256="b"), OTHERWISE, 5),
    "lacks a tensor": (later(tensors={**TENSORS, "v": TENSORS["w"]}), OTHERWISE, 5),
    "fails the gate": (later(gate=Gate("failed", "loss", "loss 3")), OTHERWISE, 5),
    "crashed": (later(status="crash", step_seconds=[], losses=[], gate=Gate()), OTHERWISE, 5),
}


@pytest.mark.parametrize("text", CASES)
def test_a_commit_that(text: str, tmp_path: Path) -> None:
    new, training, code = CASES[text]
    assert compare_trainings(new, OLD)[0] == training
    results = records.write(tmp_path / "results", *twice(OLD), *twice(new))
    done = run("compare", "bbbbbbb", "--baseline", "aaaaaaaaaaaa", "--results", results)
    assert done.returncode == code, done.stdout + done.stderr


def test_a_slower_run_of_one_process_is_no_slower_commit(tmp_path: Path) -> None:
    results = records.write(tmp_path / "results", OLD, CASES["is slower"][0])
    done = run("compare", "bbbbbbb", "--baseline", "aaaaaaaaaaaa", "--results", results)
    assert done.returncode == 0
    assert (
        "cannot tell which is faster: 0.5 (" in done.stdout
        and "doubtful: new: 1 process; the baseline: 1 process" in done.stdout
    )


def test_folders_are_compared_as_commits_are(tmp_path: Path) -> None:
    new = records.write(tmp_path / "new", *twice(CASES["is slower"][0]))
    old = records.write(tmp_path / "old", *twice(OLD))
    done = run("compare", "--baseline", old, "--results", new, "--json")
    comparison = json.loads(done.stdout)
    assert (done.returncode, comparison["training"], comparison["verdict"], comparison["ratio"]) == (
        8,
        SAME_BITS,
        "slower",
        0.5,
    )


def test_a_point_of_the_baseline_that_is_missing_is_told(tmp_path: Path) -> None:
    old = records.write(tmp_path / "old", OLD, trained("resident", 1e9))
    done = run("compare", "--baseline", old, "--results", records.write(tmp_path / "new", later()))
    assert done.returncode == 1 and "not compared: resident, 2 layers x" in done.stdout


def test_other_steps_are_not_compared() -> None:
    new = later(job=dataclasses.replace(OLD.job, steps=OLD.job.steps + 1))
    assert compare_trainings(new, OLD)[0] == UNKNOWN_TRAINING


def test_a_baseline_that_shows_no_training_is_no_measure() -> None:
    assert compare_trainings(later(), dataclasses.replace(OLD, tensors={}))[0] == UNKNOWN_TRAINING


def test_a_method_whose_options_changed_is_held_against_its_only_run(tmp_path: Path) -> None:
    new = later(job=dataclasses.replace(OLD.job, options={"resident_layers": 1}))
    results = records.write(tmp_path / "results", OLD, new)
    assert run("compare", "bbbbbbb", "--baseline", "aaaaaaa", "--results", results).returncode == 0


def test_a_commit_that_was_not_recorded_or_with_changes_is_named(tmp_path: Path) -> None:
    results = records.write(tmp_path / "results", OLD)
    for commit in ("ccccccc", "aaaaaaa+"):
        done = run("compare", "--baseline", commit, "--results", results)
        assert done.returncode == 2 and "(aaaaaaaaaaaa)" in done.stderr


def test_the_words_are_counted(tmp_path: Path) -> None:
    for arguments in (("l2l",), ("l2l", "resident", "--baseline", "aaaaaaa")):
        assert (
            run("compare", *arguments, "--results", records.write(tmp_path / "results", OLD)).returncode == 2
        )
