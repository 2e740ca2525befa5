"""Figures of whatever a folder holds: what they show, and what they refuse to mix."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.job import Job, Workload
from harness.core.record import Gate, Record
from papers.claims.campaign import CaseCall, run_case
from papers.figures import case, case_files
from tests.support import logs, records

SMALL = Workload(hidden_size=256, batch_size=2)
FAILED = Gate("failed", "loss", "another loss")


def run(name: str, depth: int, window: int | None = None, **changes: Any) -> Record:
    """A run by hand; a layer takes a second a step."""
    workload = replace(SMALL, num_layers=depth, **changes.pop("workload", {}))
    job = Job(name, workload, {"window_size": window} if window else {}, steps=20)
    facts = {"machine": {"cpu": "some CPU", "cores": 2}, **changes}
    return records.record(job, float(depth), key=f"{job}", **facts)


BY_HAND = [
    run("resident", 4),
    run("l2l", 4),
    run("l2l", 6),
    run("zero-offload", 4, gate=FAILED),
    run("stronghold", 4, 2),
    run("stronghold", 8, 2),
    run("stronghold", 16, 2, status="oom-host"),
]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (1, [("l2l", 6), ("zero-offload", 4), ("stronghold", 8), ("stronghold", 16)]),  # the last one failed
        (2, [("l2l", 6), ("zero-offload", 4), ("stronghold", 4)]),
        (3, [("l2l", 4), ("zero-offload", 4), ("stronghold", 4)]),
        (4, [("stronghold", 4), ("stronghold", 8), ("stronghold", 16)]),
        (5, [("stronghold", 16)]),  # one window at each depth: the largest depth
    ],
)
def test_each_case_shows_its_part_of_runs_made_by_hand(number: int, shown: list[tuple[str, int]]) -> None:
    assert [(row.method, row.num_layers) for row in case.rows_of_any_runs(number, BY_HAND)] == shown


@pytest.mark.parametrize("newer", [{"source": "b"}, {"source": "a", "torch": "2.14.0"}])
def test_runs_by_two_states_of_a_method_s_code_are_not_one_line(newer: dict[str, str], capsys: Any) -> None:
    runs = [run("stronghold", 4, 2, software={"source": "a"}), run("stronghold", 8, 2, software=newer)]
    assert [row.num_layers for row in case.rows_of_any_runs(4, runs)] == [8]
    assert (
        "1 of 2 runs left out: made by other code than their method's newest run" in capsys.readouterr().err
    )


WINDOWS = [run("stronghold", 4, window) for window in (2, 4, 15)]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_of_several_windows_the_published_one_is_shown_where_the_case_is_not_about_windows(
    number: int,
) -> None:
    """The published order of runs leaves windows of case 5 beside those of the others: they were refused."""
    others = [run for run in BY_HAND if run.job.method != "stronghold"]
    shown = case.rows_of_any_runs(number, [*others, *WINDOWS])
    assert [(row.num_layers, row.window_size) for row in shown if row.method == "stronghold"] == [(4, 15)]
    (chosen,) = case.rows_of_any_runs(4, WINDOWS, ["window_size=2"])
    assert chosen.window_size == 2


def test_the_published_logs_make_the_pairs_of_the_published_panel(tmp_path: Path) -> None:
    """L2L was killed at 78 layers, and its pair is there; it was shown at 32."""
    for name in logs.CURVES:
        logs.write_published(tmp_path / "logs", name)
    imported = logs.imported(tmp_path / "logs", results=tmp_path)
    pairs = {(row.method, row.num_layers, row.window_size) for row in case.published_rows(2)}
    assert {
        (row.method, row.num_layers, row.window_size) for row in case.rows_of_any_runs(2, imported)
    } == pairs
    assert {row.status for row in case.rows_of_any_runs(2, imported) if row.num_layers == 78} == {
        "oom-host",
        "ok",
    }


def test_a_failed_gate_stays_one() -> None:
    rows = {row.method: row for row in case.rows_of_any_runs(3, BY_HAND)}
    assert not rows["zero-offload"].valid and rows["l2l"].valid
    assert rows["l2l"].value == 2 / 4  # batch over seconds


@pytest.mark.parametrize(
    ("other", "message", "choice"),
    [
        (run("l2l", 4, workload={"dtype": "bf16"}), r"dtype \(bf16, fp32\)", "dtype=fp32"),
        (
            run("l2l", 4, machine={"cpu": "another", "cores": 2}),
            r"machine \(another, 2 cores",
            "machine=some CPU, 2 cores",
        ),
        (run("l2l", 4, origin="imported"), r"origin \(imported, run\)", "origin=run"),
        (run("stronghold", 4, 4), r"window_size \(2, 4\)", "window_size=2"),
    ],
)
def test_what_must_not_be_mixed_is_named_with_a_choice_that_works(
    other: Record, message: str, choice: str
) -> None:
    with pytest.raises(
        ValueError,
        match=f"case 3: expected records with one value of each setting, got several: .*{message}.*--where",
    ):
        case.rows_of_any_runs(3, [*BY_HAND, other])
    assert case.rows_of_any_runs(3, [*BY_HAND, other], [choice]) == case.rows_of_any_runs(
        3, BY_HAND, [choice]
    )


def test_the_scripts_draw_runs_made_by_hand_and_imported_logs(tmp_path: Path) -> None:
    imported = [
        replace(run, origin="imported", machine={}, evidence={"unsaid": ["num_heads"]}) for run in BY_HAND
    ]
    for name, runs in (("hand", BY_HAND), ("logs", imported)):
        results = records.write(tmp_path / name, *runs)
        for only in ("extract", "draw"):
            run_case(CaseCall("3", results, only=only))
        rows, profiles = case_files.read_csv(results / "figures" / "case3_folder.csv")
        assert profiles == {"folder"} and {row.origin for row in rows} == {runs[0].origin, "published"}
        assert (results / "figures" / "case3_folder.png").exists()


def test_a_profile_that_has_records_is_drawn_before_others(tmp_path: Path) -> None:
    used = case.profile_of("demo", None)
    results = records.write(tmp_path, *BY_HAND, records.record(used.job("l2l", 2)))
    run_case(CaseCall("3", results, only="extract"))
    assert [path.name for path in results.glob("figures/*.csv")] == ["case3_demo.csv"]


@pytest.mark.parametrize(("runs", "where"), [([], []), (BY_HAND, ["dtype=bf16"]), ([], ["dtype=bf16"])])
def test_where_nothing_is_to_show_the_methods_and_the_choice_are_named(
    runs: list[Record], where: list[str]
) -> None:
    selection = " with dtype=bf16" if where else ""
    with pytest.raises(
        ValueError, match=f"no record of megatron-lm, .*, stronghold{selection} in these results; try"
    ):
        case.rows_of_any_runs(3, runs, where)


@pytest.mark.parametrize("text", ["dtype", "color=red"])
def test_a_choice_that_is_none_is_told_the_names(text: str) -> None:
    with pytest.raises(ValueError, match="--where: expected NAME=VALUE with a name of origin, machine"):
        case.rows_of_any_runs(3, BY_HAND, [text])
