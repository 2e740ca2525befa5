"""Pipelines: what is run and foretold, what morphs leave in the figure, and a trace of machines by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import case7
from harness.core import method
from harness.figures import profile
from harness.simulation.machine_trace import Change, samples, synthetic, through
from tests.figures.test_case import DEMO, FACTS, METHODS, record


@pytest.mark.parametrize(("used", "num_jobs"), [(DEMO, 2), (profile.make("quick", None, METHODS, FACTS), 3)])
def test_every_stages_and_micro_batches_that_fit_are_run(used: profile.Profile, num_jobs: int) -> None:
    """Of two ranks on a CPU, of one on a GPU."""
    jobs = case7.jobs(used, {})
    assert len(jobs) == len({str(job.options) for job in jobs}) == num_jobs
    for job in jobs:
        assert method.create(job.method, job.options).plan(job.workload, job.budget).shortfall(job.budget) is None
        assert any(each.is_of(job) for each in case7.profiles(used))


def test_the_first_configuration_sets_the_rate_and_the_second_is_foretold() -> None:
    """Two replicas of one stage take 2 s: as many FLOPs as two stages, which have a bubble."""
    records = [record(job, 2.0) for job in case7.jobs(DEMO, {})]
    rows = case7.table(records, DEMO)
    foretold = {row.group: row.value for row in rows if row.metric == "foretold_seconds"}
    assert foretold["1 x 1"] == pytest.approx(2.0) and 2.0 < (foretold["2 x 1"] or 0.0) < 4.0
    claimed = {row.series: row.value for row in rows if row.origin == "simulated" and row.metric == case7.METRIC}
    assert claimed["varuna"] and 1.15 < (claimed["1f1b"] or 0.0) / claimed["varuna"] < 1.35


def test_the_losses_of_a_morphed_job_are_read_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "morphed").mkdir()
    steps = [{"step": step, "loss": 5.0 - step, "num_workers": 4 - step} for step in (1, 2)]
    (tmp_path / "morphed" / "steps.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    found = {(row.metric, row.x): row.value for row in case7._losses(tmp_path)}
    assert found == {("loss", 1.0): 4.0, ("workers", 1.0): 3.0, ("loss", 2.0): 3.0, ("workers", 2.0): 2.0}


def test_a_trace_by_hand() -> None:
    """10 samples/s on each machine; one of two leaves after 150 s, and is back after 200. Who morphs pauses 5 s twice;
    who restarts has a checkpoint every 100 s, pauses 20 s, and goes on with one."""
    trace, speed = [Change(0, 2), Change(150, 1), Change(200, 2)], lambda number: 10.0 * number
    morphed, restarted = (
        through(trace, 300, speed, checkpoint_seconds=100, pause_seconds=pause, tells=tells)
        for pause, tells in ((5, True), (20, False))
    )
    assert samples(morphed) == pytest.approx(150 * 20 + 45 * 10 + 95 * 20)
    assert samples(restarted) == pytest.approx(100 * 20 + 130 * 10)


def test_a_drawn_trace_stays_within_its_machines() -> None:
    trace = synthetic(60, 12, 24, seed=7)
    assert trace == synthetic(60, 12, 24, seed=7) != synthetic(60, 12, 24, seed=8)
    assert all(0 <= change.num_machines <= 12 for change in trace) and trace == sorted(trace)
    there = [change.num_machines for change in trace]
    assert 6 < sum(there) / len(there) < 12


def test_the_figure_has_its_four_panels() -> None:
    records = [record(job, 2.0) for job in case7.jobs(DEMO, {})]
    rows = case7.table(records, DEMO)
    made = case7.figure([*rows, *case7.simulated(rows)], "demo")
    titles = [axes.get_title(loc="left") for axes in made.axes if axes.get_title(loc="left")]
    assert len(titles) == 4 and sum("simulated" in title for title in titles) == 2
