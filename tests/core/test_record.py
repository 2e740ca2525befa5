"""Records: whole on disk, raw inside, derived when read."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.job import Budget, Job, Workload
from harness.core.log_lines import interval_lines
from harness.core.record import STATUSES, Gate, Record, new_stem, read_all

JOB = Job("some-method", Workload(), {"window_size": 4}, Budget(seconds=9.5), steps=4, warmup=1)
UNSCALED: dict[str, list] = {"loss_scales": [], "skipped_steps": []}  # of any but fp16
RECORD = Record(JOB, "k", "ok", losses=[3.0, 2.0, 1.5, 1.25], step_seconds=[9.0, 2.0, 4.0, 3.0], started=5.0)


@given(st.lists(st.floats(allow_nan=False), max_size=5), st.text(max_size=20))
def test_a_record_reads_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float], text: str
) -> None:
    path = tmp_path_factory.mktemp("records") / "log_a.json"
    record = dataclasses.replace(RECORD, losses=losses, reason=text)
    record.write(path)
    assert Record.read(path) == record


def test_a_nan_loss_survives_as_plain_json(tmp_path: Path) -> None:
    path = tmp_path / "log_a.json"
    dataclasses.replace(RECORD, losses=[1.0, math.nan, math.inf]).write(path)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [str(loss) for loss in Record.read(path).losses] == ["1.0", "nan", "inf"]


def test_what_depends_on_the_place_alone_is_tried_again() -> None:
    budget, cluster = dataclasses.replace(RECORD, status="oom-host"), {"limit_of": "the cluster"}
    assert budget.is_lasting and not dataclasses.replace(budget, evidence=cluster).is_lasting


def test_the_median_leaves_the_warm_up_out() -> None:
    assert RECORD.median_step_seconds == 3.0


@pytest.mark.parametrize(("resumed", "timed"), [(0, [3, 4, 5, 6]), (2, [5, 6]), (5, [6]), (6, [])])
def test_warm_up_begins_after_the_steps_of_a_checkpoint(resumed: int, timed: list[int]) -> None:
    job = dataclasses.replace(JOB, steps=6, warmup=2)
    record = dataclasses.replace(RECORD, job=job, step_seconds=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert dataclasses.replace(record, schedule={"resumed_steps": resumed}).timed_seconds == timed


def test_throughput_is_batch_over_median_step_once_the_gate_passed() -> None:
    assert RECORD.samples_per_second is None
    assert dataclasses.replace(RECORD, gate=Gate("exact")).samples_per_second == 4 / 3.0


def test_a_file_holds_a_speed_beside_the_verdict_that_allows_it_and_is_not_believed(tmp_path: Path) -> None:
    path, passed = tmp_path / "log_a.json", dataclasses.replace(RECORD, gate=Gate("exact"))
    for record, speed in ((RECORD, None), (passed, 4 / 3.0)):
        record.write(path)
        data = json.loads(path.read_text())
        assert data["gate"].get("samples_per_second") == speed and "samples_per_second" not in data
        path.write_text(json.dumps({**data, "gate": {**data["gate"], "samples_per_second": 1e9}}))
        assert Record.read(path) == record


def test_the_first_step_counts_from_the_start_of_the_process() -> None:
    seconds = {"process": 1.0, "import": 2.0, "build": 3.0, "training": 100.0}
    assert dataclasses.replace(RECORD, phase_seconds=seconds).first_step_seconds == 1.0 + 2.0 + 3.0 + 9.0


def test_a_record_of_when_budgets_had_what_plans_fill_is_read(tmp_path: Path) -> None:
    data = RECORD.to_dict()
    data["job"]["budget"] |= {"rates": None, "page_locks": False}
    (tmp_path / "log_a.json").write_text(json.dumps(data))
    assert Record.read(tmp_path / "log_a.json") == RECORD


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_what_is_no_record_is_named_and_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "log_bad.json").write_text(text)
    RECORD.write(tmp_path / "log_good.json")
    records, complaints = read_all(tmp_path)
    assert [path.name for path in records] == ["log_good.json"]
    assert len(complaints) == 1 and "log_bad.json" in complaints[0]


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"step_seconds": [1.0] * 110}, "expected at most 4 step_seconds, got 110"),
        ({"step_seconds": [1.0, 0.0]}, "expected step_seconds from 1e-09 and finite, got 0.0"),
        ({"step_seconds": [1.0, -2.0]}, "expected step_seconds from 1e-09 and finite, got -2.0"),
        ({"step_seconds": [1e-320]}, "expected step_seconds from 1e-09 and finite, got 1e-320"),
        ({"started": 1e300}, "expected started as seconds from 1970 to the year 9999, got 1e+300"),
        (
            {"gate": Gate("super")},
            "expected a verdict of exact, tolerance, twin, failed, untested, got 'super'",
        ),
        ({"losses": [], "gate": Gate("exact")}, "expected 4 finite losses beside the verdict exact, got 0"),
        (
            {"losses": [1.0, 2.0], "gate": Gate("exact")},
            "expected 4 finite losses beside the verdict exact, got 2",
        ),
        (
            {"losses": [math.nan] * 4, "gate": Gate("twin")},
            "expected 4 finite losses beside the verdict twin, got 0",
        ),
        (
            {"step_seconds": [1.0], "gate": Gate("exact")},
            "expected 4 finite step_seconds beside the verdict exact, got 1",
        ),
        (
            {"losses": [1.0] * 8, "gate": Gate("exact")},
            "expected 4 finite losses beside the verdict exact, got 8",
        ),
        ({"status": "super"}, f"expected a status of {', '.join(STATUSES)}, got 'super'"),
        ({"peaks": {"host_anonymous": -5}}, "expected a peak host_anonymous of at least 0, got -5"),
        ({"job": dataclasses.replace(RECORD.job, device="")}, "expected device cpu, cuda, sim, got ''"),
        ({"schedule": {"num_models": 1000}}, "expected num_models 1, one more than `others`, got 1000"),
    ],
)
def test_what_no_run_can_have_measured_is_no_record(tmp_path: Path, changes: dict, complaint: str) -> None:
    path = tmp_path / "log_a.json"
    dataclasses.replace(RECORD, **changes).write(path)
    assert read_all(tmp_path) == ({}, [f"{path} is not a record: {complaint}"])


def test_an_interval_of_no_steps_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "log_a.json"
    path.write_text(json.dumps({**RECORD.to_dict(), "interval_steps": 0}))
    assert read_all(tmp_path) == (
        {},
        [f"{path} is not a record: expected interval_steps of at least 1, got 0"],
    )


def test_copies_of_a_record_count_once_and_are_named(tmp_path: Path) -> None:
    record = dataclasses.replace(RECORD, started=1e9)
    for name in ("log_a.json", "log_b.json", "log_c.json"):
        record.write(tmp_path / name)
    dataclasses.replace(record, started=1e9 + 1, step_seconds=[0.5, 0.75]).write(tmp_path / "log_again.json")
    records, complaints = read_all(tmp_path)
    assert [path.name for path in records] == ["log_a.json", "log_again.json"]
    assert [line.partition(": ")[2] for line in complaints] == [
        "the same measurement as log_a.json, which counts once"
    ] * 2


@pytest.mark.parametrize(
    "changes", [{"started": 1e9 + 1}, {"started": 0.0}, {"losses": [1.0, 2.0]}, {"step_seconds": [0.5, 0.25]}]
)
def test_a_copy_with_one_number_changed_is_a_copy(tmp_path: Path, changes: dict) -> None:
    record = dataclasses.replace(RECORD, started=1e9, losses=[1.0, 1.5], step_seconds=[0.5, 0.125])
    record.write(tmp_path / "log_a.json")
    dataclasses.replace(record, **changes).write(tmp_path / "log_b.json")
    assert len(read_all(tmp_path)[0]) == 1


def test_a_record_of_a_clock_that_is_ahead_counts_as_the_oldest_and_is_named(tmp_path: Path) -> None:
    now = time.time()
    for name, started in (("log_ahead.json", now + 1e6), ("log_past.json", now - 1e6), ("log_now.json", now)):
        dataclasses.replace(RECORD, started=started, step_seconds=[]).write(tmp_path / name)
    records, complaints = read_all(tmp_path)
    assert [path.name for path in records] == ["log_ahead.json", "log_past.json", "log_now.json"]
    assert complaints == [
        f"{tmp_path}/log_ahead.json: written by a clock that is ahead, so it counts as the oldest"
    ]


def test_names_follow_the_published_pattern_and_are_never_taken_twice(tmp_path: Path) -> None:
    names = [new_stem(tmp_path, JOB).name for _ in range(5)]
    pattern = r"log_some-method_l-16_hs-2048_bs-4_ws-4_\d{4}-\d\d-\d\d\.\d{10}"
    assert len(set(names)) == 5 and all(re.fullmatch(pattern, name) for name in names)


@pytest.mark.parametrize(
    ("wanted", "column", "value"),
    [
        # The fields that the published extraction scripts print, split at [/,_: ], counted from 1.
        ("total parameters", 20, "0.911"),
        ("SamplesPerSecond", 22, "2.0"),
    ],
)
def test_scripts_made_for_the_published_logs_read_ours(wanted: str, column: int, value: str) -> None:
    job = dataclasses.replace(JOB, steps=10)
    measured = {"losses": [5.0] * 10, "grad_norms": [1.0] * 10, "step_seconds": [2.0] * 10, **UNSCALED}
    path = "./results/log_some-method_l-16_hs-2048_bs-4_ws-4_2022-07-02.1656730240.txt"
    line = next(line for line in interval_lines(job, measured, {}) if wanted in line)
    fields = re.split(r"[/,_: ]", f"{path}:{line}")
    assert fields[column - 1] == value


def test_a_small_models_parameters_are_logged_to_the_last_one() -> None:
    """They were 0.000 B, of which the original's scripts drew nothing."""
    load = dataclasses.replace(
        JOB.workload, num_layers=1, hidden_size=32, num_heads=2, vocab_size=97, seq_len=16
    )
    job = dataclasses.replace(JOB, workload=load, steps=10)
    measured = {"losses": [5.0] * 10, "grad_norms": [1.0] * 10, "step_seconds": [2.0] * 10, **UNSCALED}
    line = next(line for line in interval_lines(job, measured, {}) if "total parameters" in line)
    assert round(float(line.split()[-2]) * 1e9) == load.num_params > 0


def test_metric_lines_have_the_published_words() -> None:
    published = (
        " iteration       10/      50 | elapsed time per iteration (ms): 5400.3 | learning rate: 4.687E-07 |"
        " global batch size:     4 | lm loss: 1.090563E+01 | loss scale: 1.0 | grad norm: 36.791 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    job = dataclasses.replace(JOB, steps=50)
    measured = {
        "losses": [10.90563] * 10,
        "grad_norms": [36.791] * 10,
        "step_seconds": [5.4003] * 10,
        **UNSCALED,
    }
    assert interval_lines(job, measured, {})[0] == published


def test_no_loss_is_printed_for_an_interval_of_nans() -> None:
    measured = {"losses": [math.nan] * 10, "grad_norms": [], "step_seconds": [1.0] * 10, **UNSCALED}
    line = interval_lines(dataclasses.replace(JOB, steps=10), measured, {})[0]
    assert "lm loss" not in line and "number of nan iterations:  10" in line
