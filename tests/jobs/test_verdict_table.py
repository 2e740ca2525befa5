"""A sweep over several models ends in a table of verdicts, methods by models; --out writes it in Markdown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from harness.core.job import Job, Workload
from harness.core.record import Gate
from harness.jobs import verdict_table
from tests.support import cli, records
from tests.support.configured import configured

LLAMA, QWEN = (configured(family, model=f"tiny-{family}") for family in ("llama", "qwen3"))


def test_each_cell_tells_the_verdict_with_its_difference_or_how_the_run_ended() -> None:
    jobs = [
        Job(name, load, options)
        for name, options in (("l2l", {}), ("varuna", {"num_stages": 2}))
        for load in (LLAMA, QWEN)
    ]
    near = Gate("tolerance", "", "", {"loss_difference": 1.5e-7})
    outcomes = [
        records.record(jobs[0]),
        "varuna: expected ...",
        dataclasses.replace(records.record(jobs[2]), gate=near),
        records.record(jobs[3], status="oom-host"),
    ]
    assert verdict_table.verdict_rows(jobs, outcomes) == [
        ["l2l", "exact", "refused"],
        ["varuna num_stages=2", "tolerance, 1.5e-07", "oom-host"],
    ]


def test_a_verdict_stands_below_its_model_where_options_follow_the_model() -> None:
    jobs = [Job("stronghold", load, {"window_size": window}) for load, window in ((LLAMA, 2), (QWEN, 4))]
    assert verdict_table.verdict_rows(jobs, ["refused", records.record(jobs[1])]) == [
        ["stronghold window_size=2", "refused", "-"],
        ["stronghold window_size=4", "-", "exact"],
    ]


def test_columns_are_named_by_models_and_by_layers_where_a_model_has_several_numbers() -> None:
    gpt = Workload(num_layers=2)

    def heads(*loads: Workload) -> list[str] | None:
        heads = verdict_table.model_heads([Job("l2l", load) for load in loads])
        return None if heads is None else [*heads.values()]

    assert heads(LLAMA, gpt, LLAMA) == ["tiny-llama", "GPT"]
    assert heads(LLAMA, LLAMA.at_depth(2)) == ["tiny-llama, 3 layers", "tiny-llama, 2 of 3 layers"]
    wide = dataclasses.replace(gpt, hidden_size=4096)
    assert heads(gpt, wide) == ["2 layers x 2048", "2 layers x 4096"]
    assert heads(gpt, dataclasses.replace(gpt, batch_size=2)) is None


def test_a_sweep_over_models_writes_what_each_method_made_of_each(tmp_path: Path, in_process: None) -> None:
    arguments = (
        "-m",
        "l2l,superoffload",
        "--model",
        "tiny-llama,tiny-qwen3",
        "-b",
        "2",
        "--seq",
        "16",
        "--steps",
        "3",
    )
    ended = cli.run("sweep", *arguments, "--no-probe", "--results", tmp_path, "--out", tmp_path / "table.md")
    assert ended.returncode == 0, ended.stderr
    page = (tmp_path / "table.md").read_text()
    assert "| method | tiny-llama | tiny-qwen3 |\n| --- | --- | --- |\n| l2l | exact | exact |\n" in page
    assert "`./run.sh sweep -m l2l,superoffload --model tiny-llama,tiny-qwen3 -b 2" in page
    assert (
        page.count("- refused, such as superoffload, tiny-llama, 3 layers: ")
        == page.count("refused, such")
        == 1
    )
    assert "exact" in ended.stdout


def test_a_table_of_several_sizes_is_refused_before_anything_runs(tmp_path: Path) -> None:
    ended = cli.run("sweep", "-m", "l2l", "-b", "1,2", "-l", "2", "-h", "32", "--out", tmp_path / "table.md")
    assert ended.returncode == 2 and "--out: expected models of different layers or width" in ended.stderr
