"""Pipelines: what is run and foretold, what morphs leave in the figure, and a trace of machines by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cases import case7
from harness.core import method
from harness.simulation.machine_trace import ElasticJob, MachineChange, draw_trace, total_samples
from methods.pipeline.config.profile import Profile, Section, SectionCost
from papers.figures import profile
from papers.figures.point import FigureRow
from tests.papers.figures.test_case import DEMO, FACTS, METHODS, record

PIPELINES = case7.Pipelines()


@pytest.mark.parametrize(
    ("used", "num_jobs"), [(DEMO, 2), (profile.make_profile("quick", None, METHODS, FACTS), 3)]
)
def test_every_stages_and_micro_batches_that_fit_are_run(used: profile.CaseProfile, num_jobs: int) -> None:
    """Of two ranks on a CPU, of one on a GPU."""
    jobs = PIPELINES.jobs(used, {})
    assert len(jobs) == len({str(job.options) for job in jobs}) == num_jobs
    for job in jobs:
        room = PIPELINES.profiles(used)[0].room  # without a GPU's context and reserve
        assert method.create(job.method, job.options).plan(job.workload, room).shortfall(room) is None
        assert any(profile_of_case.is_of(job) for profile_of_case in PIPELINES.profiles(used))


def left_by_measuring(results: Path) -> list[FigureRow]:
    """Of a profile by hand, one section of 1 s a pass, and of jobs whose record says what a launcher's does."""
    folder = results / "case7_demo"
    cost = SectionCost(1, 1.0, 1.0, 1.0, 0.0, 0, 0, 0)
    Profile(False, None, [Section(1, 0.5, [cost])] * 2, [], []).write(folder / "profile")
    for name in ("undisturbed", "morphed"):
        (folder / name / "job").mkdir(parents=True)
        steps = [
            {"step": step, "loss": 5.0 - step, "num_workers": 4 - step, "round": step, "time": 3.0 * step}
            for step in (1, 2)
        ]
        (folder / name / "job" / "steps.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n")
    rows = PIPELINES.table([record(job, 2.0) for job in PIPELINES.jobs(DEMO, {})], DEMO)
    return [*rows, *PIPELINES.beside(rows, DEMO, results)]


def test_steps_are_foretold_by_the_profile_beside_the_measured_ones(tmp_path: Path) -> None:
    """By hand: two of four samples on each of two replicas of one stage, with two sections; then the updates of both.
    Over two stages: four samples, 2 s each on the upper one, which begins after 1 s and ends 1 s before the lower one's
    last backward pass; then one update."""
    rows = left_by_measuring(tmp_path)
    foretold = {row.group: (row.x, row.value) for row in rows if row.metric == "foretold_seconds"}
    assert foretold["1 stage, micro-batches of 1"] == (2.0, 2 * 4.0 + 1.0)
    claimed = {
        row.series: row.value for row in rows if row.origin == "simulated" and row.metric == PIPELINES.metric
    }
    assert claimed["varuna"] and 1.15 < (claimed["1f1b"] or 0.0) / claimed["varuna"] < 1.35


def test_losses_and_pauses_are_those_of_the_jobs(tmp_path: Path) -> None:
    values = {
        (row.metric, row.x): row.value for row in left_by_measuring(tmp_path) if row.series == "morphed"
    }
    assert values == {
        ("loss", 1.0): 4.0,
        ("workers", 1.0): 3.0,
        ("loss", 2.0): 3.0,
        ("workers", 2.0): 2.0,
        ("pause_seconds", 2.0): 3.0,
    }


def test_the_trace_takes_the_pause_that_was_measured(tmp_path: Path) -> None:
    """The longer each change holds a job up, the fewer samples."""
    speeds = {}
    for rows in ([], left_by_measuring(tmp_path)):
        mean = {row.series: row.value for row in PIPELINES.simulated(rows) if row.metric == "mean_speed"}
        speeds[len(rows) > 0] = mean
    assert (
        speeds[True]["morphs"] > speeds[False]["morphs"]
        and speeds[True]["restarts"] == speeds[False]["restarts"]
    )


def test_a_trace_by_hand() -> None:
    """10 samples/s on each machine; one of two leaves after 150 s, and is back after 200. Who morphs pauses 5 s twice;
    who restarts has a checkpoint every 100 s, pauses 20 s, and goes on with one."""
    trace, speed = (
        [MachineChange(0, 2), MachineChange(150, 1), MachineChange(200, 2)],
        lambda number: 10.0 * number,
    )
    morphed, restarted = (
        ElasticJob(speed, checkpoint_seconds=100, pause_seconds=pause, is_told=is_told).spans(trace, 300)
        for pause, is_told in ((5, True), (20, False))
    )
    assert total_samples(morphed) == pytest.approx(150 * 20 + 45 * 10 + 95 * 20)
    assert total_samples(restarted) == pytest.approx(100 * 20 + 130 * 10)


def test_a_drawn_trace_stays_within_its_machines() -> None:
    trace = draw_trace(60, 12, 24, seed=7)
    assert trace == draw_trace(60, 12, 24, seed=7) != draw_trace(60, 12, 24, seed=8)
    assert all(0 <= change.num_machines <= 12 for change in trace) and trace == sorted(trace)
    counts = [change.num_machines for change in trace]
    assert 6 < sum(counts) / len(counts) < 12


def test_the_figure_has_its_four_panels(tmp_path: Path) -> None:
    rows = left_by_measuring(tmp_path)
    figure = PIPELINES.figure([*rows, *PIPELINES.simulated(rows)], "demo")
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]
    assert len(titles) == 4 and sum("simulated" in title for title in titles) == 2


def test_the_names_of_foretold_steps_say_what_they_are_within_their_panel(tmp_path: Path) -> None:
    """They were "1 x 1"."""
    rows = left_by_measuring(tmp_path)
    figure = PIPELINES.figure([*rows, *PIPELINES.simulated(rows)], "demo")
    figure.draw_without_rendering()
    (panel,) = [axes for axes in figure.axes if "foretold" in axes.get_title(loc="left")]
    assert [text.get_text() for text in panel.texts] == [
        "1 stage, micro-batches of 1",
        "2 stages, micro-batches of 1",
    ]
    frame = panel.get_window_extent()
    assert all(
        text.get_window_extent().x0 >= frame.x0 and text.get_window_extent().x1 <= frame.x1
        for text in panel.texts
    )


def test_the_trace_of_machines_lies_below_all_speeds(tmp_path: Path) -> None:
    rows = left_by_measuring(tmp_path)
    figure = PIPELINES.figure([*rows, *PIPELINES.simulated(rows)], "demo")
    (speed,) = [
        axes for axes in figure.axes if axes.get_title(loc="left") == "simulated: synthetic trace of machines"
    ]
    (machines,) = [axes for axes in figure.axes if axes.get_ylabel() == "Machines"]
    most, zero = machines.transData.transform((0, 12)), speed.transData.transform((0, 0))
    assert most[1] < zero[1] and min(speed.get_yticks()) == 0
