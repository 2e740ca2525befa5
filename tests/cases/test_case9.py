"""Throughput by tokens of a step: every method at every batch, by hand, and a batch that does not fit."""

from __future__ import annotations

from cases import case9
from harness.core import method
from papers.figures import case, profile
from tests.papers.figures.test_case import DEMO, FACTS, METHODS, record

SPEED = case9.SpeedByTokens()


def test_every_method_is_run_at_every_batch_with_every_layer_of_stronghold_streamed() -> None:
    for used, sizes in (
        (DEMO, (1, 4, 16)),
        (profile.make_profile("quick", None, METHODS, FACTS), (1, 2, 4, 8, 16, 32)),
    ):
        jobs = SPEED.jobs(used, {})
        assert [(job.method, job.workload.batch_size) for job in jobs] == [
            (name, size) for name in SPEED.methods for size in sizes
        ]
        assert all(case.has_job(used, job) for job in jobs)
        for job in (job for job in jobs if job.method == "stronghold"):
            plan = method.create(job.method, job.options).plan(job.workload, job.budget.room)
            assert plan.options["placement"] == f"W{job.workload.num_layers}"


def test_a_speed_is_tokens_over_seconds_and_a_batch_that_does_not_fit_is_a_cross() -> None:
    """Steps of half a second, of 64 tokens a sample."""
    jobs = [job for job in SPEED.jobs(DEMO, {}) if job.method == "resident"]
    ends = ("ok", "ok", "oom-device")
    runs = [record(job, 0.5, end, key=f"{job}") for job, end in zip(jobs, ends, strict=True)]
    rows = SPEED.table(runs, DEMO)
    assert [(row.x, row.value, row.status) for row in rows] == [
        (64, 128, "ok"),
        (256, 512, "ok"),
        (1024, None, "oom-device"),
    ]
    panel = SPEED.figure(rows, "demo").axes[0]
    assert panel.get_title(loc="left") == "Resident"
    assert [line.get_xdata()[0] for line in panel.lines if line.get_marker() == "x"] == [1024]
