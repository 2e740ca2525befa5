"""Cases: published numbers, tables from records, scripts, profiles."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.base.checkout import ROOT
from harness.core import method
from harness.core.job import Job
from harness.core.record import Gate, Record, read_all
from harness.devices import named_machines
from harness.jobs.largest_size import FEWEST_STEPS
from papers.claims.campaign import Campaign
from papers.figures import case, case_files, profile, searches
from papers.figures.points import current_key, repeats_of
from papers.figures.profile import PROBE_LENGTH, CaseProfile
from tests.support import cli, forks, records

MIB = 2**20
METHODS = ("megatron-lm", "l2l", "zero-offload", "zero-infinity", "stronghold")
FACTS = {"cpu": "some CPU", "cores": 2}
DEMO = profile.make_profile("demo", None, METHODS, FACTS)
DEPTHS = {"megatron-lm": 2, "l2l": 7, "zero-offload": 4, "zero-infinity": 5, "stronghold": 8}


def record(job: Job, seconds: float = 1.0, status: str = "ok", **changes) -> Record:
    if status != "ok":
        changes = {"reason": "why", "gate": Gate(), "step_seconds": [], **changes}
    key = f"{job.method}-{job.workload.num_layers}-{len(job.options)}"
    return records.record(
        job, seconds, status=status, **{"key": key, "clock": "sim", "machine": FACTS, **changes}
    )


def together(job: Job, seconds: float) -> Record:
    """Models that took turns of a tenth of a second, each model twice in a round."""
    num_models = job.options["num_models"]
    turns = [
        [turn % num_models, 0, "forward", 0, turn / 10, (turn + 1) / 10] for turn in range(2 * num_models)
    ]
    loads = [
        {"batch_size": job.workload.batch_size >> number % 2, "learning_rate": 0.5**number}
        for number in range(1, num_models)
    ]
    others = [{"workload": load, "losses": [], "grad_norms": [], "tensors": {}} for load in loads]
    key = f"{job.method}-{job.options['double_buffer']}"
    return record(job, seconds, schedule={"num_models": num_models, "turns": turns}, others=others, key=key)


def demo_records(used: CaseProfile = DEMO) -> list[Record]:
    """Every record of the demo: searches that end at DEPTHS, and each job of each case, a second a layer."""
    found_records = []
    for name, depth in DEPTHS.items():
        options = used.job(name, depth).options
        for num_layers, status in ((depth, "ok"), (depth + 1, "oom-host")):
            job = dataclasses.replace(used.probe(name, num_layers), options=options)
            found_records.append(record(job, status=status))
    for number in case.numbers():
        jobs = case.load_case(number).jobs(used, {name: DEPTHS[name] for name in METHODS[:4]})
        jobs = [job for job in jobs if number > 2 or job.method == "stronghold"]
        found_records += [
            (together if job.method == "hydra" else record)(job, job.workload.num_layers) for job in jobs
        ]
    return found_records


def test_a_figure_has_no_runs_by_two_earlier_states_of_a_method_s_code() -> None:
    """Neither is the present one, as on another machine, or after a third change."""
    jobs = [DEMO.job("stronghold", depth, window_size=2) for depth in (2, 3, 4)]
    runs = [record(job, software={"source": source}) for job, source in zip(jobs, "abb", strict=True)]
    assert case.select_runs(4, DEMO, runs) == runs[1:]


def test_published_sizes_are_those_of_figure_6a() -> None:
    assert [(row.method, f"{row.value / 1e9:.3f}") for row in case.published_rows(1) if row.value] == list(
        zip(METHODS, ("1.717", "4.033", "2.522", "2.522", "5.141"), strict=True)
    )


def test_published_speeds_are_the_medians_of_the_logs() -> None:
    """Samples per second as logged, median; steady times leave out its first interval: 0.3 % at most."""
    logged = dict(zip(METHODS, (0.74905, 0.17526, 0.37267, 0.36045, 0.6677), strict=True))
    assert {row.method: row.value for row in case.published_rows(3)} == pytest.approx(logged, rel=3e-3)


def test_published_runs_are_valid_where_their_losses_are_the_references() -> None:
    for number in case.numbers():
        for row in case.published_rows(number):
            assert row.valid == (row.method in ("megatron-lm", "zero-offload")), row
            assert row.valid == (not row.reason)


def test_the_killed_run_is_a_size_that_failed() -> None:
    assert [(row.method, row.num_layers) for row in case.published_rows(1) if row.status != "ok"] == [
        ("l2l", 78)
    ]


def test_published_depths_and_windows_are_in_the_figures_order() -> None:
    assert [row.num_layers for row in case.published_rows(4)] == [16, 24, 32, 40, 48, 56, 64, 78, 92]
    assert [row.window_size for row in case.published_rows(5)] == [2, 4, 6, 8, 10, 12, 14, 15]


def test_a_quarter_of_the_widths_in_a_sixteenth_of_the_memory_is_the_same_experiment() -> None:
    quick = profile.make_profile("quick", None, METHODS, FACTS)
    paper = profile.make_profile("paper", "v100-vm", METHODS, FACTS)
    for name in METHODS[:2]:
        assert quick.largest_planned(name) == pytest.approx(paper.largest_planned(name), rel=0.03)


def test_the_papers_profile_has_the_published_depths_and_memories() -> None:
    paper = profile.make_profile("paper", "v100-vm", METHODS, FACTS)
    assert [paper.depth(published) for published in (16, 32, 48, 78, 92)] == [16, 32, 48, 78, 92]
    assert (
        paper.budget == named_machines.load("v100-vm").budget_on("cuda")
        and paper.workload.at_depth(100).num_params == 5_140_951_040
    )


def test_fit_follows_the_memories_of_the_machine() -> None:
    """A GPU of 80 GiB beside 512 GiB: 16 bytes a parameter are 768 MiB a layer of the published width."""
    facts = {"gpu": "some GPU", "gpu_bytes": 80 * 2**30, "host_bytes": 512 * 2**30}
    fit = profile.make_profile("fit", None, METHODS, facts)
    assert 70 < fit.common < 80 * 1024 // 768 and fit.deepest == int(0.9 * 512 * 2**30 / (16 * 50_358_272))
    assert fit.depth(32) == fit.common and fit.depth(92) == fit.deepest


@pytest.mark.parametrize(
    ("name", "on", "message"),
    [
        ("fast", None, "choose one of demo"),
        ("quick", "h100-pc", "no machine .h100-pc."),
        ("demo", "v100-vm", "its own"),
        ("paper", None, "expected a GPU here"),
    ],
)
def test_a_profile_that_makes_no_sense_is_told(name: str, on: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile.make_profile(name, on, METHODS, FACTS)


def test_a_largest_size_is_the_deepest_that_trained_and_the_one_above_that_failed() -> None:
    rows = case.measured_rows(1, DEMO, demo_records())
    ends = {(row.method, row.num_layers, row.status) for row in rows}
    assert ends == {(n, d, "ok") for n, d in DEPTHS.items()} | {
        (n, d + 1, "oom-host") for n, d in DEPTHS.items()
    }
    assert [row.value for row in rows if row.method == "l2l"] == [
        DEMO.workload.at_depth(depth).num_params for depth in (7, 8)
    ]


def test_each_baseline_stands_beside_stronghold_at_its_own_largest_size() -> None:
    rows = case.measured_rows(2, DEMO, demo_records())
    assert [(row.method, row.num_layers) for row in rows[:4]] == list(DEPTHS.items())[:4]
    assert [(row.num_layers, row.value) for row in rows[4:]] == [(depth, 4 / depth) for depth in (2, 4, 5, 7)]


def test_stronghold_is_not_run_at_a_size_that_the_baseline_did_not_train() -> None:
    records = [
        dataclasses.replace(run, gate=Gate("failed", text="loss differs")) if run.job.method == "l2l" else run
        for run in demo_records()
    ]
    rows = case.measured_rows(2, DEMO, records)
    assert [(row.num_layers, row.valid) for row in rows if row.method == "l2l"] == [(7, False)]
    assert 7 not in {row.num_layers for row in rows if row.method == "stronghold"}


def test_a_table_takes_the_repeats_of_the_newest_code_and_no_other_options() -> None:
    job = DEMO.job("stronghold", 4, window_size=2, resident_layers=0)
    other = dataclasses.replace(job, options={"window_size": 3, "resident_layers": 0})
    old, new = record(job, key="old"), record(job, key="new")
    assert repeats_of(job, [old, new, record(other), new]) == [new, new]


def test_records_of_two_machines_are_refused() -> None:
    records = demo_records()
    records[0] = dataclasses.replace(records[0], machine={"cpu": "another"})
    with pytest.raises(ValueError, match="another; some CPU, 2 cores"):
        case.select_runs(1, DEMO, records)


def test_records_of_another_profile_are_not_taken() -> None:
    other = dataclasses.replace(DEMO, budget=dataclasses.replace(DEMO.budget, device_bytes=13 * MIB))
    assert case.select_runs(1, DEMO, demo_records(other)) == []


def test_a_table_of_two_windows_is_refused(tmp_path: Path) -> None:
    """A window of 3 layers is one of 2 where there are but 2 layers."""
    mixed = dataclasses.replace(DEMO, window=3)
    with pytest.raises(ValueError, match="case 2: expected runs of one window size, got 2, 3"):
        case_files.extract(2, mixed, [*demo_records(mixed)], tmp_path)


@pytest.mark.parametrize("name", ["demo", "paper"])
def test_figures_of_speed_stream_every_layer_by_one_clipping(name: str) -> None:
    """With layers resident STRONGHOLD offloads nothing, and two ways to clip bend a line of times."""
    used = profile.make_profile(name, "v100-vm" if name == "paper" else None, METHODS, FACTS)
    jobs = [
        job
        for number in range(2, 6)
        for job in case.load_case(number).jobs(used, DEPTHS)
        if job.method == "stronghold"
    ]
    for job in jobs:
        plan = method.create(job.method, job.options).plan(job.workload, job.budget.room)
        assert (
            plan.options["placement"] == f"W{job.workload.num_layers}"
            and plan.options["clipping"] == "deferred"
        )
        assert plan.shortfall(job.budget.room) is None
    assert len(jobs) >= 12


def test_a_csv_holds_its_rows(tmp_path: Path) -> None:
    path = case_files.extract(3, DEMO, demo_records(), tmp_path)
    rows, names = case_files.read_csv(path)
    assert names == {"demo"}
    assert rows == [*case.measured_rows(3, DEMO, demo_records()), *case.published_rows(3)]


def test_a_cell_that_a_spreadsheet_would_compute_is_text_and_is_read_back(tmp_path: Path) -> None:
    machine = {**FACTS, "cpu": "=1+1"}
    runs = [dataclasses.replace(run, machine=machine) for run in demo_records()]
    path = case_files.extract(3, DEMO, runs, tmp_path)
    assert '"=1+1' not in path.read_text() and "\"'=1+1" in path.read_text()
    assert {row.machine for row in case_files.read_csv(path)[0] if row.origin == "run"} == {"=1+1, 2 cores"}


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\0", '"'])
def test_a_file_that_is_no_table_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "case3_demo.csv").write_text(text)
    with pytest.raises(ValueError, match="is no table of a case"):
        case_files.draw(3, tmp_path / "case3_demo.csv")


@pytest.mark.parametrize("number", case.numbers())
def test_the_same_records_give_the_same_bytes(number: int, tmp_path: Path) -> None:
    files = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        paths = [case_files.extract(number, DEMO, demo_records(), folder)]
        files.append([path.read_bytes() for path in (*paths, *case_files.draw(number, paths[0]))])
    assert files[0] == files[1] and all(files[0])


HEAD = "profile,keys,metric,method,num_layers,hidden_size,value\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "No columns"),
        (HEAD, "expected rows of samples_per_second, got no row"),
        (HEAD + "demo,a,height,l2l,1,1,1", "expected rows of samples_per_second, got height"),
        (
            HEAD + "demo,a,samples_per_second,l3l,1,1,1",
            "expected known methods and finite numbers from 0, got 'l3l'",
        ),
        (
            HEAD + "demo,a,samples_per_second,l2l,1,1,nan",
            "expected known methods and finite numbers from 0, got nan",
        ),
        (
            HEAD + "demo,a,samples_per_second,l2l,1,1,-3",
            "expected known methods and finite numbers from 0, got -3",
        ),
    ],
)
def test_what_is_no_table_of_the_case_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "case3_demo.csv").write_text(text)
    with pytest.raises(ValueError, match=f"is no table of .*{message}"):
        case_files.draw(3, tmp_path / "case3_demo.csv")


def test_a_pipe_of_a_tables_name_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "case3_demo.csv")
    with pytest.raises(ValueError, match="expected a regular file"):
        case_files.draw(3, tmp_path / "case3_demo.csv")


def test_a_line_that_was_edited_is_not_valid_and_says_so(tmp_path: Path) -> None:
    path = case_files.extract(3, DEMO, demo_records(), tmp_path)
    (row, *others), _ = case_files.read_csv(path)
    assert row.valid and not any(other_row.reason == case_files.EDITED for other_row in (row, *others))
    path.write_text(path.read_text().replace(str(row.value), "999.0", 1))
    (edited, *same), _ = case_files.read_csv(path)
    assert (edited.value, edited.valid, edited.reason) == (999.0, False, case_files.EDITED) and same == others
    assert case_files.draw(3, path)


def test_a_csv_of_two_machines_is_not_drawn(tmp_path: Path) -> None:
    path = case_files.extract(3, DEMO, demo_records(), tmp_path)
    path.write_text(path.read_text().replace("some CPU", "another CPU", 1))
    with pytest.raises(
        ValueError,
        match="expected rows of one profile and machine, got another CPU, 2 cores; some CPU, 2 cores",
    ):
        case_files.draw(3, path)


def test_a_plan_leaves_out_what_there_is_no_time_for_and_keeps_what_most_claims_name(tmp_path: Path) -> None:
    campaign = Campaign([3, 4], DEMO, tmp_path)
    every = campaign.planned()
    budget = sum(point.seconds for point in every) / 2
    taken = [run for run in campaign.planned(budget) if run.is_taken]
    assert 0 < len(taken) < len(every) and sum(point.seconds for point in taken) <= budget
    assert max(point.num_claims for point in every) == max(point.num_claims for point in taken)


def project(folder: Path) -> Path:
    """The scripts of the cases behind a door that needs no set-up."""
    shutil.copytree(ROOT / "cases", folder / "cases")
    door = folder / "run.sh"
    door.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m harness "$@"\n')
    door.chmod(0o755)
    return folder / "cases"


@pytest.mark.parametrize("number", case.numbers())
def test_the_scripts_of_a_case_are_those_of_the_first_with_its_number(number: int) -> None:
    for ending in ("extract.sh", "draw.sh", "draw.py"):
        first, script = (ROOT / "cases" / f"case{case_number}_{ending}" for case_number in (1, number))
        assert script.read_text().replace(str(number), "1") == first.read_text()
        assert script.stat().st_mode == first.stat().st_mode


def test_the_scripts_write_a_table_of_what_is_recorded_and_draw_it(tmp_path: Path) -> None:
    scripts, results = project(tmp_path / "project"), tmp_path / "results"
    results.mkdir()
    for index, run in enumerate(demo_records()):
        run.write(results / f"log_{index}.json")
    options = ["--profile", "demo", "--results", str(results), "--out", str(tmp_path / "out")]
    done = subprocess.run([scripts / "case1_extract.sh", *options], capture_output=True, text=True)
    table = tmp_path / "out" / "case1_demo.csv"
    assert done.returncode == 0 and done.stdout == table.read_text()
    subprocess.run([scripts / "case1_draw.sh", *options], check=True, capture_output=True)
    for ending in ("pdf", "png"):
        assert table.with_suffix(f".{ending}").stat().st_size > 1000


def test_a_run_without_its_verdict_is_still_to_be_attended_to(tmp_path: Path) -> None:
    """Killed between the end of a run and its judgement: the record is there, and the point is not done."""
    missing = []
    for gate in (Gate(), Gate("exact"), Gate("untested", "no-reference")):
        job = Campaign([4], DEMO, tmp_path).planned()[0].job  # with all the options that the plan settles
        run = record(job, key=current_key(job), gate=gate)
        run.write(tmp_path / "log_1.json")
        points = Campaign([4], DEMO, tmp_path).planned()
        missing.append(next(point.missing for point in points if point.job == job))
    assert missing == [1, 0, 0]


@pytest.mark.heavy
def test_a_case_that_was_killed_goes_on_and_measures_nothing_twice(
    tmp_path: Path, compiled_sim: None, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call ends at the third run, as one does that is killed."""
    arguments = ["case", "4", "--profile", "demo", "--results", tmp_path]

    def launch(*run: Any, **turn: Any) -> Path:
        if len(results(tmp_path)) == 2:
            raise SystemExit(-signal.SIGKILL)
        return forks.launch(*run, **turn)

    with monkeypatch.context() as patch:
        patch.setattr("harness.jobs.sweep.launch", launch)
        assert cli.run(*arguments).returncode == -signal.SIGKILL
    before = results(tmp_path)
    assert cli.run(*arguments).returncode == 0
    after = results(tmp_path)
    figure = (tmp_path / "figures" / "case4_demo.pdf").read_bytes()
    assert before.keys() < after.keys() and len(set(after.values())) == len(after)
    rows = case_files.read_csv(tmp_path / "figures" / "case4_demo.csv")[0]
    assert [row.num_layers for row in rows if row.origin == "run" and row.valid] == [2, 3, 4, 6]
    monkeypatch.setattr("harness.jobs.sweep.launch", None)
    assert cli.run(*arguments).returncode == 0
    assert results(tmp_path) == after and (tmp_path / "figures" / "case4_demo.pdf").read_bytes() == figure


def results(folder: Path) -> dict[Path, str]:
    return {path: run.key for path, run in read_all(folder)[0].items() if run.is_result}


def test_probes_have_the_steps_that_a_search_needs() -> None:
    assert PROBE_LENGTH["steps"] >= FEWEST_STEPS


@pytest.mark.parametrize(
    ("outcomes", "is_searched"),
    [
        ({7: "ok", 8: "oom-host"}, True),
        ({7: "ok"}, False),  # nothing failed yet
        ({7: "ok", 9: "oom-host"}, False),  # 8 is open
        ({9: "oom-host"}, False),  # nothing trained yet
        ({1: "oom-host"}, True),  # nothing trains
        ({7: "ok", 8: "timeout"}, False),  # a timeout is no failure by size
    ],
)
def test_a_search_is_finished_where_both_sides_of_the_edge_are_on_record(
    outcomes: dict[int, str], is_searched: bool
) -> None:
    records = [record(DEMO.probe("l2l", depth), status=status) for depth, status in outcomes.items()]
    assert searches.is_searched("l2l", records) == is_searched
    assert {row.is_final for row in case.measured_rows(1, DEMO, records)} == {is_searched}


def test_a_search_ends_where_one_more_layer_would_take_more_than_the_machine_has() -> None:
    small, large = ({**FACTS, "host_bytes": size} for size in (2**20, 2**40))
    ended = [
        searches.is_searched("l2l", [record(DEMO.probe("l2l", 7), machine=facts)]) for facts in (small, large)
    ]
    assert ended == [True, False]


def test_a_csv_keeps_that_a_search_is_not_finished(tmp_path: Path) -> None:
    path = case_files.extract(1, DEMO, [record(DEMO.probe("l2l", 7))], tmp_path)
    assert [row.is_final for row in case_files.read_csv(path)[0] if row.origin == "run"] == [False]


def test_a_csv_keeps_that_a_run_was_not_judged_yet(tmp_path: Path) -> None:
    path = case_files.extract(1, DEMO, [record(DEMO.probe("l2l", 7), gate=Gate())], tmp_path)
    assert [row.is_judged for row in case_files.read_csv(path)[0] if row.origin == "run"] == [False]
