"""Records as a DataFrame: a row each, and a speed only where the gate passed."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from harness.base.checkout import ROOT
from harness.core.job import Job
from harness.core.record import Gate
from tests.support import records
from tests.support.tiny import TINY

JOB = Job("l2l", TINY, steps=8, warmup=2)


def test_a_folder_is_a_row_a_record_whose_speed_is_gated(tmp_path: Path) -> None:
    made = [
        records.record(JOB, 0.5, peaks={"host_anonymous": 5}),
        records.record(dataclasses.replace(JOB, method="resident"), 0.25),
        records.record(JOB, 0.1, gate=Gate("failed", "loss", "loss 9 instead of 8")),
        records.record(dataclasses.replace(JOB, method="stronghold", options={"window_size": 2}), status="oom-host"),
    ]
    found = harness.load(str(records.write(tmp_path / "out", *made)))
    assert list(found["method"]) == ["l2l", "resident", "l2l", "stronghold"]
    assert list(found["status"]) == ["ok", "ok", "ok", "oom-host"]
    assert list(found["verdict"])[:3] == ["exact", "exact", "failed"]
    assert list(found["samples_per_second"])[:2] == [4, 8]
    assert all(map(math.isnan, found["samples_per_second"][2:]))
    assert list(found["is_reference"]) == [False, True, False, False]
    assert (found["options"][3], found["host_anonymous_bytes"][0], found["num_layers"][0]) == ("window_size=2", 5, 2)
    assert found.groupby("method")["samples_per_second"].median()["l2l"] == 4


def test_an_empty_folder_has_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    found = harness.load(tmp_path)
    assert len(found[~found.is_reference].groupby("method")["samples_per_second"].median()) == 0


def test_a_file_that_is_no_record_is_warned_of(tmp_path: Path) -> None:
    records.write(tmp_path, records.record(JOB))
    (tmp_path / "log_half.json").write_text("{")
    with pytest.warns(UserWarning, match="log_half.json is not a record"):
        assert len(harness.load(tmp_path)) == 1


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected a folder of records, got .*none"):
        harness.load(tmp_path / "none")


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, harness; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
