"""Two runs side by side: the ratio and its interval by hand, who has no throughput, and what differs between them."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.core.job import Budget, Job, Workload
from harness.core.record import Gate, Record
from papers.claims import compare
from papers.claims.compare import FASTER, NOT_COMPARED, NOT_DISTINGUISHABLE, SLOWER
from papers.figures.point import ratio, row_of
from tests.cli.test_main import run
from tests.support import records
from tests.support.cli import jobs_of
from tests.support.records import write

SMALL = Workload(num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)


def record(method: str = "l2l", seconds: float = 1.0, workload: Workload = SMALL, **other: Any) -> Record:
    options = other.pop("options", {})
    job = Job(method, workload, options, steps=6, warmup=1)
    return records.record(job, seconds, **{"key": f"{method}{options}", **other})


def repeats(method: str, *seconds: float) -> list[Record]:
    return [record(method, duration, started=float(number)) for number, duration in enumerate(seconds)]


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ((1.0, 1.0), (1.2, 1.2), FASTER),
        ((1.2, 1.2), (1.0, 1.0), SLOWER),
        ((1.0, 1.0), (1.04, 1.04), NOT_DISTINGUISHABLE),
        ((0.99, 1.0, 1.01), (1.19, 1.2, 1.21), FASTER),
        ((0.99, 1.0, 1.01), (1.02, 1.03, 1.04), FASTER),
        ((0.9, 1.0, 1.1), (1.0, 1.1, 1.2), NOT_DISTINGUISHABLE),
    ],
)
def test_the_verdict_is_of_the_interval_or_else_of_a_margin(a: tuple, b: tuple, verdict: str) -> None:
    assert compare.compare_repeats(repeats("l2l", *a), repeats("resident", *b)).verdict == verdict


def test_the_ratio_is_of_medians_and_its_interval_welchs() -> None:
    """Relative errors of 1 % and 2 % of three runs each: 1 %, 2 % over sqrt(3); 2.94 degrees of freedom."""
    interval = compare.compare_repeats(
        repeats("l2l", 1 / 0.99, 1.0, 1 / 1.01), repeats("resident", 1 / 0.49, 2.0, 1 / 0.51)
    ).ratio
    error = math.sqrt((0.01**2 + 0.02**2) / 3)
    freedom = (0.01**2 + 0.02**2) ** 2 / ((0.01**4 + 0.02**4) / 2)
    assert freedom == pytest.approx(2.94, abs=0.005)
    assert interval is not None and interval.value == pytest.approx(2.0)
    assert math.log(interval.high / 2) / error == pytest.approx(3.220, abs=0.005)  # t(0.975, 2.94)
    assert interval.low * interval.high == pytest.approx(4.0)


def test_the_interval_holds_the_truth_in_95_of_100_cases() -> None:
    """Three and five runs that scatter by 3 % and 6 %, 600 times, around a true ratio of 1.5."""
    draw = np.random.default_rng(1)
    held = 0
    for _ in range(600):
        sides = [
            row_of(
                "samples_per_second",
                [record(seconds=2 / speed) for speed in draw.normal(mean, spread * mean, size)],
            )
            for mean, spread, size in ((1.5, 0.03, 3), (1.0, 0.06, 5))
        ]
        interval = ratio(*sides)
        held += interval.low <= 1.5 <= interval.high
    assert 0.92 < held / 600 < 0.98


def test_the_margin_of_one_run_is_of_the_scatter_of_its_steps() -> None:
    """The middle half of 0.9, 0.95, 1, 1.05, 1.1 lies from 0.95 to 1.05: ln(1.05 / 0.95) / 1.349 is 7.4 %, twice
    sqrt(2) of it 21 %, as a factor 1.233."""
    steps = [0.9, 0.95, 1.0, 1.05, 1.1]
    loud = (
        record(step_seconds=[9.0, *steps]),
        record("resident", step_seconds=[9.0, *(1.2 * step_seconds for step_seconds in steps)]),
    )
    comparison = compare.compare_repeats(*([one] * 2 for one in loud))
    assert comparison.ratio is not None and comparison.ratio.high / comparison.ratio.value == pytest.approx(
        1.233, abs=5e-4
    )
    assert (
        comparison.verdict == NOT_DISTINGUISHABLE
        and "margin of 23%: 2 and 2 runs with steps that scatter by 7.4% and" in comparison.why
    )


BUSY = {"cpu": "EPYC", "cores": 2, "load_average": 20.0}


@pytest.mark.parametrize(
    ("changes", "num_runs", "why"),
    [
        ({}, 1, "A: 1 process"),
        ({"machine": BUSY}, 2, "A: load 20"),
        ({"step_seconds": [1.0, 1.0, 1.0, 1.0]}, 1, "A: 3 steps, 1 process"),
    ],
)
def test_times_that_figures_hatch_or_of_one_process_are_not_distinguishable(
    changes: dict[str, Any], num_runs: int, why: str
) -> None:
    comparison = compare.compare_repeats([record(**changes)] * num_runs, repeats("resident", 9.0, 9.0))
    assert (comparison.verdict, comparison.ratio and comparison.ratio.value) == (NOT_DISTINGUISHABLE, 9.0)
    assert comparison.why.startswith(f"doubtful: {why}; ")


def test_one_timed_step_tells_nothing_of_its_noise() -> None:
    comparison = compare.compare_repeats([record(step_seconds=[9.0, 1.0])], [record("resident")])
    assert comparison.verdict == NOT_COMPARED and comparison.why.startswith("A timed one step")


def test_two_runs_each_have_no_interval_and_say_so() -> None:
    comparison = compare.compare_repeats(repeats("l2l", 1.0, 1.0), repeats("resident", 2.0, 2.0))
    assert comparison.why == (
        "margin of 5%: 2 and 2 runs with steps that scatter by 0.0% and 0.0%, an interval needs 3 each"
    )


def test_where_it_cannot_tell_the_first_words_say_so_then_the_numbers_then_calls_that_repeat(
    tmp_path: Path,
) -> None:
    write(tmp_path, record(seconds=1.0), record("resident", 1.02))
    lines = run("compare", "l2l", "resident", "--results", tmp_path).stdout.splitlines()
    assert lines[2] == "cannot tell which is faster"
    assert lines[3].startswith(
        "  A's samples/s are 1.02 (0.971 to 1.07) times B's (doubtful: A: 1 process; B: 1 process"
    )
    for line, name in zip(lines[4:6], ("l2l", "resident"), strict=True):
        assert line.startswith(f"  to narrow it, measure again: ./run.sh -m {name} ")
        arguments = shlex.split(line.partition("./run.sh ")[2])
        assert arguments[-3:] == ["--rerun", "--results", str(tmp_path)]
        (job,) = jobs_of(shlex.join(["./run.sh", *arguments]))
        assert (job.method, job.workload) == (name, SMALL)


def test_without_a_passing_gate_there_is_no_throughput_and_no_ratio() -> None:
    failed = record(gate=Gate("failed", "loss", "loss 3 instead of 2"))
    comparison = compare.compare_repeats([failed], [record("resident", 2.0)])
    assert (comparison.verdict, comparison.ratio, comparison.why) == (
        NOT_COMPARED,
        None,
        "A has no throughput: loss 3 instead of 2",
    )
    assert compare.compared_side([failed]).samples_per_second is None
    ended = record("resident", status="oom-device", reason="full", step_seconds=[], gate=Gate())
    assert (
        "B has no throughput: ended as oom-device: full" in compare.compare_repeats([record()], [ended]).why
    )


def test_a_simulated_clock_is_not_compared_with_a_real_one() -> None:
    comparison = compare.compare_repeats([record(clock="sim")], [record("resident", clock="cuda")])
    assert comparison.verdict == NOT_COMPARED and "sim" in comparison.why and "cuda" in comparison.why
    assert (
        compare.compare_repeats([record(clock="sim")], [record("resident", clock="sim")]).verdict
        == NOT_DISTINGUISHABLE
    )


def test_all_that_differs_is_named_and_nothing_else() -> None:
    a = record(
        machine={"cpu": "EPYC", "cores": 2},
        software={"commit": "a", "torch": "2"},
        options={"window_size": 2},
    )
    b = record(
        "resident", machine={"cpu": "EPYC", "cores": 4}, software={"commit": "b", "torch": "2"}, started=9.0
    )
    assert compare.field_differences(a, b) == {
        "job.method": ("l2l", "resident"),
        "job.options.window_size": (2, None),
        "machine.cores": (2, 4),
        "software.commit": ("a", "b"),
    }


# ---- What is set side by side


def side_by_side(tmp_path: Path, a: list[Record], b: list[Record]) -> tuple[list, list[str]]:
    return compare.pair_points(
        *(
            compare.select_points(str(write(tmp_path / name, *one)), tmp_path)
            for name, one in (("a", a), ("b", b))
        )
    )


def test_folders_are_paired_by_workload_method_and_options(tmp_path: Path) -> None:
    both = [*repeats("l2l", 1.0, 1.1), record("resident")]
    pairs, complaints = side_by_side(tmp_path, both, [record("resident", 2.0), record("l2l", 3.0)])
    named = [(a[-1].job.method, len(a), b[-1].job.method) for a, b in pairs]
    assert sorted(named) == [("l2l", 2, "l2l"), ("resident", 1, "resident")]
    assert complaints == []


def test_only_the_newest_state_of_a_point_speaks_for_it(tmp_path: Path) -> None:
    old, new = record(seconds=9.0, key="old source", started=1.0), record(seconds=1.0, started=2.0)
    (pair,), _ = side_by_side(tmp_path, [new, old], [record("resident")])
    assert [one.key for one in pair[0]] == [new.key]


def on(device: str, device_mib: int, seconds: float, method: str = "l2l", **other: Any) -> Record:
    budget = Budget(device_bytes=device_mib * 2**20)
    run_record = record(method, seconds, key=f"{method} {device} {device_mib}", clock=device, **other)
    return dataclasses.replace(
        run_record, job=dataclasses.replace(run_record.job, device=device, budget=budget)
    )


def test_runs_are_paired_by_device_and_budget_before_any_newest_one_is_taken(tmp_path: Path) -> None:
    a = [on("sim", 16, 1.0, started=1.0), on("cpu", 32, 3.0, started=2.0)]
    b = [on("cpu", 32, 6.0, "resident", started=3.0), on("sim", 16, 4.0, "resident", started=4.0)]
    pairs, _ = side_by_side(tmp_path, a, b)
    comparisons = [compare.compare_repeats(*pair) for pair in pairs]
    assert [(one.a[-1].job.device, one.ratio and one.ratio.value) for one in comparisons] == [
        ("sim", 4.0),
        ("cpu", 2.0),
    ]
    assert compare.compared_side(comparisons[0].a).budget.device_bytes == 16 * 2**20


def test_where_no_budget_is_common_the_newest_are_taken_and_the_difference_is_named(tmp_path: Path) -> None:
    a = [on("sim", 16, 1.0, started=1.0), on("sim", 32, 3.0, started=2.0)]
    ((a_repeats, b_repeats),), _ = side_by_side(tmp_path, a, [on("sim", 64, 6.0, "resident")])
    assert compare.field_differences(a_repeats[-1], b_repeats[-1])["job.budget.device_bytes"] == (
        32 * 2**20,
        64 * 2**20,
    )


def test_a_run_that_was_cut_short_is_no_repeat_of_a_whole_one(tmp_path: Path) -> None:
    cut = record(status="interrupted", reason="interrupted", step_seconds=[], started=9.0)
    ((a_repeats, _),), _ = side_by_side(tmp_path, [record(), cut], [record("resident")])
    assert [one.status for one in a_repeats] == ["ok"]


def test_different_workloads_are_not_compared_and_the_fields_are_named(tmp_path: Path) -> None:
    deeper = dataclasses.replace(SMALL, num_layers=4, batch_size=1)
    pairs, complaints = side_by_side(tmp_path, [record()], [record(workload=deeper)])
    assert pairs == []
    assert complaints == ["different workloads: num_layers 2 | 4, batch_size 2 | 1; run both alike"]


def test_several_windows_are_to_choose_from(tmp_path: Path) -> None:
    windows = [record("stronghold", options={"window_size": size}, key=str(size)) for size in (1, 2)]
    pairs, complaints = side_by_side(tmp_path, windows, [record()])
    assert pairs == [] and "try stronghold:window_size=1 or stronghold:window_size=2" in complaints[0]
    results = str(write(tmp_path / "all", *windows, record()))
    (chosen,) = compare.select_points("stronghold:window_size=2,num_layers=2", Path(results))["repeats"]
    assert chosen == [windows[1]]


def windows_of(*gates_and_ends: dict[str, Any]) -> list[Record]:
    return [
        record("stronghold", options={"window_size": size}, started=float(size), **end)
        for size, end in enumerate(gates_and_ends, start=1)
    ]


CRASHED = {"status": "crash", "reason": "boom", "step_seconds": [], "gate": Gate()}
FAILED = {"gate": Gate("failed", "loss", "it learns nothing")}


def test_what_has_no_throughput_is_not_to_choose_from(tmp_path: Path) -> None:
    _, (complaint,) = side_by_side(tmp_path, windows_of({}, {}, FAILED, CRASHED), [record()])
    assert complaint.endswith("try stronghold:window_size=1 or stronghold:window_size=2")


def test_the_only_one_that_has_a_throughput_needs_no_choice(tmp_path: Path) -> None:
    ((a_repeats, _),), complaints = side_by_side(tmp_path, windows_of(FAILED, {}, CRASHED), [record()])
    assert complaints == [] and a_repeats[-1].job.options == {"window_size": 2}


def test_where_none_has_a_throughput_the_end_of_the_last_one_is_told(tmp_path: Path) -> None:
    (pair,), _ = side_by_side(tmp_path, windows_of(FAILED, CRASHED), [record()])
    assert compare.compare_repeats(*pair).why == "A has no throughput: ended as crash: boom"


def test_compare_says_it_in_lines_or_json_and_ends_in_0(tmp_path: Path) -> None:
    results = write(
        tmp_path / "results", *repeats("l2l", 0.99, 1.0, 1.01), *repeats("resident", 1.98, 2.0, 2.02)
    )
    done = run("compare", "l2l", "resident", "--results", str(results))
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "A: l2l, 2 layers x 32, on cpu: 3 runs, 2 samples/s (1.95 to 2.05); gate exact"
    )
    assert lines[2].startswith("A is faster: 2 (1.9") and "95 % interval, 3 and 3 runs" in lines[2]
    assert lines[3] == "  differs: job.method: l2l | resident"
    path = results / "log_3.json"
    (one,) = map(json.loads, run("compare", str(results), str(path), "--json").stdout.splitlines())
    assert (one["verdict"], one["b"]["num_runs"]) == (NOT_DISTINGUISHABLE, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("l2l big", 1, "not compared: different workloads: num_layers 2 | 8"),
        ("l2l failed", 1, "not compared: B has no throughput: it learns nothing"),
        ("l2l nothing", 2, "expected a file, a folder or a method recorded in"),
        ("l2l:window_size=9 big", 2, "no record of 'l2l:window_size=9'"),
        ("l2l:window big", 2, "METHOD:name=value"),
        ("l2l", 2, "expected two arguments, A and B, got 1"),
        ("l2l /dev", 2, "no record of a run in /dev"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, arguments: str, code: int, message: str) -> None:
    write(
        tmp_path,
        record(),
        record("big", workload=SMALL.at_depth(8)),
        record("failed", gate=Gate("failed", "loss", "it learns nothing")),
    )
    done = run("compare", *arguments.split(), "--results", str(tmp_path))
    assert done.returncode == code and message in (done.stderr if code == 2 else done.stdout)
    assert len(done.stderr.splitlines()) == (1 if code == 2 else 0)
