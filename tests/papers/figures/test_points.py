"""Records as a DataFrame: a row each, and a speed only where the gate passed."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import harness
from harness.base.checkout import ROOT
from harness.core.job import Budget, Job, Workload
from harness.core.record import Gate
from tests.support import records
from tests.support.tiny import TINY

JOB = Job("l2l", TINY, steps=8, warmup=2)


def test_a_folder_is_a_row_a_record_whose_speed_is_gated(tmp_path: Path) -> None:
    runs = [
        records.record(JOB, 0.5, peaks={"host_anonymous": 5}),
        records.record(dataclasses.replace(JOB, method="resident"), 0.25),
        records.record(JOB, 0.1, gate=Gate("failed", "loss", "loss 9 instead of 8")),
        records.record(
            dataclasses.replace(JOB, method="stronghold", options={"window_size": 2}), status="oom-host"
        ),
    ]
    frame = harness.load(str(records.write(tmp_path / "out", *runs)))
    assert list(frame["method"]) == ["l2l", "resident", "l2l", "stronghold"]
    assert list(frame["status"]) == ["ok", "ok", "ok", "oom-host"]
    assert list(frame["verdict"])[:3] == ["exact", "exact", "failed"]
    assert list(frame["samples_per_second"])[:2] == [4, 8]
    assert all(map(math.isnan, frame["samples_per_second"][2:]))
    assert list(frame["is_reference"]) == [False, True, False, False]
    assert (frame["options"][3], frame["host_anonymous_bytes"][0], frame["num_layers"][0]) == (
        "window_size=2",
        5,
        2,
    )
    assert frame.groupby("method")["samples_per_second"].median()["l2l"] == 4


def test_a_row_tells_where_when_and_by_what_code_a_record_was_made(tmp_path: Path) -> None:
    job = dataclasses.replace(JOB, budget=Budget(device_bytes=2**20, link_bytes_per_second=1e9))
    machine = {"cpu": "EPYC", "cores": 2, "load_average": 1.5, "on": "docker"}
    run = records.record(job, machine=machine, software={"source": "abc", "commit": "def+"}, started=1.7e9)
    (row,) = harness.load(records.write(tmp_path, run, records.record(JOB))).iloc[1:].to_dict("records")
    assert (row["machine"], row["place"], row["load_average"]) == ("EPYC, 2 cores", "docker", 1.5)
    assert (row["source"], row["commit"], row["key"]) == ("abc", "def+", "key")
    assert row["started"] == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert (row["budget_device_bytes"], row["budget_link_bytes_per_second"]) == (2**20, 1e9)
    assert math.isnan(row["budget_host_bytes"])


def test_a_load_that_is_no_number_is_missing(tmp_path: Path) -> None:
    frame = harness.load(records.write(tmp_path, records.record(JOB, machine={"load_average": ["high"]})))
    assert math.isnan(frame["load_average"][0])


def test_steps_are_told_whatever_the_gate_says_but_no_speed(tmp_path: Path) -> None:
    seconds = [4.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    run = records.record(JOB, step_seconds=seconds, phase_seconds={"build": 0.5})
    frame = harness.load(
        records.write(tmp_path, run, dataclasses.replace(run, key="other", gate=Gate("failed")))
    )
    assert list(frame["step_seconds"]) == [seconds, seconds] and list(frame["first_step_seconds"]) == [
        4.5,
        4.5,
    ]
    assert frame["median_step_seconds"][0] == 1.0 and math.isnan(frame["median_step_seconds"][1])


def test_the_documentation_names_every_column(tmp_path: Path) -> None:
    frame = harness.load(records.write(tmp_path, records.record(JOB, peaks={"host_anonymous": 5})))
    lines = (ROOT / "docs/figures-and-claims.md").read_text().partition("| columns |")[2].splitlines()
    named = [
        name for line in lines for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    ]
    fields_of_workload = {field.name for field in dataclasses.fields(Workload)}
    peaks_of_other_records = {"host_shared_bytes", "device_allocated_bytes"}
    assert set(frame) == (set(named) | fields_of_workload) - peaks_of_other_records


def test_an_empty_folder_has_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    frame = harness.load(tmp_path)
    assert len(frame[~frame.is_reference].groupby("method")["samples_per_second"].median()) == 0


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
