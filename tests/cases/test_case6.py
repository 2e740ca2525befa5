"""Model selection: what is run, how speeds add up, and that what is simulated says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cases import case6
from harness.core import method
from harness.core.job import Job, Room
from harness.devices import room
from papers.figures import case, case_files, profile
from papers.figures.point import FigureRow
from papers.report import tables
from tests.papers.figures.test_case import DEMO, FACTS, METHODS, demo_records, record

SELECTION = case6.ModelSelection()
PROFILES = [
    DEMO,
    profile.make_profile("quick", None, METHODS, FACTS),
    profile.make_profile("paper", "v100-vm", METHODS, FACTS),
    profile.make_profile("fit", "v100-vm", METHODS, FACTS),
]


def plan_of(job: Job):
    return method.create(job.method, job.options).plan(job.workload, room_of(job))


def room_of(job: Job) -> Room:
    return room.room_within(job.budget, job.device)


@pytest.mark.parametrize("used", PROFILES, ids=lambda used: used.name)
def test_no_model_fits_the_device_and_all_fit_the_host(used: profile.CaseProfile) -> None:
    jobs = SELECTION.jobs(used, {})
    assert "resident" not in {job.method for job in jobs}
    assert all(plan_of(job).shortfall(room_of(job)) is None for job in jobs)
    both = next(job for job in jobs if job.method == "hydra")
    assert method.create("resident", {}).plan(both.workload, room_of(both)).shortfall(room_of(both))
    assert (
        both.options["num_models"] == (4 if used.kind == "demo" else 12)
        and both.options["num_batch_sizes"] == 2
    )


@pytest.mark.parametrize("used", PROFILES, ids=lambda used: used.name)
def test_the_ablation_takes_the_second_slot_and_nothing_else(used: profile.CaseProfile) -> None:
    both, one = (job for job in SELECTION.jobs(used, {}) if job.method == "hydra")
    assert one == dataclasses.replace(both, options={**both.options, "double_buffer": False})


def test_half_a_batch_takes_the_same_samples_in_twice_the_steps() -> None:
    for name in ("zero-infinity", "stronghold"):
        whole, half = (job for job in SELECTION.jobs(DEMO, {}) if job.method == name)
        assert (whole.workload.batch_size, half.workload.batch_size) == (4, 2)
        assert (half.steps, half.warmup) == (2 * whole.steps, 2 * whole.warmup)


def speed(name: str, rows: list[FigureRow], series: str = "") -> FigureRow:
    (row,) = (
        row for row in rows if (row.metric, row.method, row.series) == ("samples_per_second", name, series)
    )
    return row


def test_one_after_another_is_all_samples_over_all_seconds() -> None:
    """A sample takes 1 / 4 s in the whole batch and 1.5 / 2 s in half of it; the same number of samples in each."""
    seconds = {4: 1.0, 2: 1.5}
    records = [
        record(job, seconds[job.workload.batch_size], key=f"{job.method}{job.workload.batch_size}")
        for job in SELECTION.jobs(DEMO, {})
        if job.method != "hydra"
    ]
    row = speed("zero-infinity", SELECTION.table(records, DEMO))
    assert row.value == pytest.approx(2 / (1 / 4 + 1.5 / 2)) and row.valid and len(row.keys) == 2


def test_by_turns_all_models_take_their_samples_in_a_round() -> None:
    rows = case.figure_rows(6, DEMO, demo_records())
    for series in ("", "one slot"):  # four models, four samples each, three seconds
        assert speed("hydra", rows, series).value == pytest.approx(16 / 3)


def test_a_method_that_does_not_train_at_one_batch_size_has_no_speed_at_all() -> None:
    jobs = [job for job in SELECTION.jobs(DEMO, {}) if job.method == "stronghold"]
    records = [record(jobs[0], 1.0, key="whole"), record(jobs[1], 1.0, status="oom-device", key="half")]
    row = speed("stronghold", SELECTION.table(records, DEMO))
    assert (row.value, row.status, row.valid) == (None, "oom-device", False)


def test_resident_training_is_a_size_that_failed_by_its_plan() -> None:
    row = speed("resident", case.figure_rows(6, DEMO, demo_records()))
    assert row.status == "does-not-fit" and row.reason.startswith("needs 12.4 MiB of device memory")


def test_the_chart_has_the_turns_of_the_last_round() -> None:
    """Eight turns of a tenth of a second; a round of 0.4 s is the last four."""
    (job,) = [job for job in SELECTION.jobs(DEMO, {}) if job.options.get("double_buffer")]
    (run,) = [run for run in demo_records() if run.job == job]
    rows = case6._turn_rows(dataclasses.replace(run, step_seconds=[0.4, 0.4]))
    assert [row.x for row in rows] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert [row.group for row in rows][1:] == [
        "lr 5.0e-01, batch 2",
        "lr 2.5e-01, batch 4",
        "lr 1.2e-01, batch 2",
    ]


def test_a_speed_up_is_no_more_than_there_are_devices_or_models() -> None:
    rows = SELECTION.simulated(case.figure_rows(6, DEMO, demo_records()))
    speed_ups = {(row.series, row.x): row.value for row in rows if row.metric == "speed_up"}
    assert speed_ups["4 models", 8.0] == pytest.approx(4) and speed_ups["4 models", 2.0] == pytest.approx(2)
    assert 990 <= speed_ups["4,000 models", 1000.0] <= 1000.001
    assert {row.clock for row in rows} == {"virtual"} and {row.origin for row in rows} == {"simulated"}


def test_what_was_simulated_says_so_in_the_figure() -> None:
    titles = [
        axes.get_title(loc="left")
        for axes in SELECTION.figure(case.figure_rows(6, DEMO, demo_records()), "demo").axes
    ]
    assert [title.partition(",")[0].partition(":")[0] for title in titles] == [
        "measured",
        "simulated (virtual clock)",
        "measured",
        "simulated (virtual clock)",
    ]


def test_longest_remaining_first_is_within_two_percent_of_the_optimum_in_the_figure() -> None:
    rows = [row for row in case6._ratio_rows() if (row.metric, row.series) == ("mean_ratio", "lrtf")]
    assert len(rows) == 4 and all(1 <= (row.value or 0) <= 1.02 for row in rows)


def test_other_cases_do_not_see_what_several_models_or_half_a_batch_measured() -> None:
    runs = [run for run in demo_records() if run.job in SELECTION.jobs(DEMO, {})]
    assert len(case.select_runs(6, DEMO, runs)) == len(runs) == 6
    seen = case.select_runs(1, DEMO, runs)
    assert {(run.job.method, run.job.workload.batch_size) for run in seen} == {
        ("zero-infinity", 4),
        ("stronghold", 4),
    }
    assert all(case.has_job(DEMO, run.job) for run in runs)


def test_nothing_is_simulated_where_nothing_was_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no record of profile demo here"):
        case_files.extract(6, DEMO, [], tmp_path)


def test_the_table_of_the_report_holds_speeds_alone() -> None:
    table = tables.row_table("", case.figure_rows(6, DEMO, demo_records()), [])
    assert [cell.text + cell.more for cell in table["method"]] == [
        "resident",
        "zero-infinity",
        "stronghold",
        "hydra",
        "hydraone slot",
    ]
