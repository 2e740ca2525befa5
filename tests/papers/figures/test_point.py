"""Points of figures: medians, intervals, and whether they may be believed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from papers.figures.point import interval, row_of
from tests.support import records


def record(*step_seconds: float, **changes: Any) -> Record:
    job = Job("resident", Workload(batch_size=4), steps=len(step_seconds) or 1, warmup=0)
    return records.record(job, step_seconds=list(step_seconds), **changes)


def test_a_row_is_the_median_over_processes_of_their_median_steps() -> None:
    row = row_of("step_seconds", [record(1.0, 2.0, 9.0), record(4.0, 4.0, 4.0), record(1.0, 1.0, 1.0)])
    assert (row.value, row.num_runs, row.valid) == (2.0, 3, True)
    assert row_of("samples_per_second", [record(2.0)]).value == 2.0


def test_a_row_has_each_timed_step_in_its_unit_and_the_highest_load() -> None:
    """Samples per second of a batch of 4, and seconds; a size has no steps."""
    loads = [{"cpu": "some CPU", "cores": 2, "load_average": load} for load in (0.5, 3.0)]
    runs = [record(1.0, 2.0, machine=loads[0]), record(4.0, machine=loads[1])]
    row = row_of("samples_per_second", runs)
    assert (row.steps, row.num_steps, row.load, row.num_cores) == ((4.0, 2.0, 1.0), 3, 3.0, 2)
    assert row.doubts == ("3 steps", "load 3")
    assert row_of("step_seconds", runs).steps == (1.0, 2.0, 4.0)
    size = row_of("params", runs)
    assert (size.steps, size.num_steps, size.doubts) == ((), None, ())


def test_a_row_has_the_placement_and_the_clipping_of_its_run() -> None:
    placed = record(1.0)
    placed = dataclasses.replace(placed, job=dataclasses.replace(placed.job, options={"placement": "R1W3"}))
    assert (row_of("step_seconds", [placed]).placement, row_of("step_seconds", [placed]).clipping) == (
        "R1W3",
        "",
    )


def test_three_values_have_the_interval_of_students_t() -> None:
    """Mean 2, standard error 1/sqrt(3), t(0.975, 2) = 4.30265 (tables)."""
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5), rel=1e-5)


def test_two_values_have_none() -> None:
    assert interval([1.0, 2.0]) == (None, None)


def test_one_repeat_without_a_passing_gate_makes_the_row_invalid_and_says_why() -> None:
    failed = record(1.0, gate=Gate("failed", "loss", "loss differs"))
    row = row_of("step_seconds", [record(1.0), failed])
    assert (row.valid, row.reason, row.status) == (False, "loss differs", "ok")


def test_one_repeat_without_any_verdict_leaves_the_row_unjudged_and_an_end_needs_none() -> None:
    assert not row_of("step_seconds", [record(1.0), record(1.0, gate=Gate())]).is_judged
    assert row_of("step_seconds", [record(1.0, gate=Gate("untested", "no-reference"))]).is_judged
    assert row_of("step_seconds", [record(gate=Gate(), status="oom-device")]).is_judged


def test_a_run_that_ended_otherwise_leaves_no_value() -> None:
    row = row_of("step_seconds", [record(status="oom-device", reason="why")])
    assert (row.value, row.valid, row.status, row.reason) == (None, False, "oom-device", "why")


def test_a_largest_size_is_in_parameters() -> None:
    deep = dataclasses.replace(record(1.0), job=Job("resident", Workload(num_layers=100)))
    assert row_of("params", [deep]).value == 5_140_951_040
