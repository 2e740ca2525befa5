"""The map of releases: its table, the words of its cells, its figure and its scripts."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases import _release_words as release_words
from cases import case10
from cases._release_reports import REPORTS
from cases._release_script import script
from cases._releases import ENGINES, SETTING_ROWS, UNSEEN, columns_of, order
from cases.case10 import CellChoice, cells_of
from harness.core.record import Gate, Record
from harness.plan.fit import resolve
from papers.figures import case, points
from papers.figures.case_files import EDITED
from papers.figures.point import FigureRow
from tests.papers.figures.test_case import DEMO, record
from tests.support.ports import free_ports

MAP = case10.ReleaseMap()
SCRIPTED = [name for name, row in SETTING_ROWS.items() if ENGINES[row.engine].script and row.is_scripted]
# What public threads told of wrong trainings when the map was made.
KNOWN = (
    *(
        f"deepspeedai/DeepSpeed#{number}"
        for number in (
            6550,
            7967,
            7981,
            7718,
            5692,
            7773,
            7749,
            7837,
            5294,
            4298,
            7905,
            7906,
            7925,
            7302,
            7292,
            8068,
            8010,
            8207,
        )
    ),
    "huggingface/trl#4540",
    "huggingface/trl#4631",
    "huggingface/accelerate#3877",
    "axolotl-ai-cloud/axolotl#3058",
    "pytorch/pytorch#148532",
    "huggingface/transformers#35438",
    "NVIDIA/Megatron-LM#2417",
)
NORM = (
    "gradient norm 0.8472355 instead of 1.708618 at step 1 (relative 5.0e-01, 1e-03 allowed), where the loss still"
    " agrees: the gradients, or the norm of them, are not the reference's"
)


def row(name: str, release: str, verdict: str = "passed", reason: str = "") -> FigureRow:
    """A cell's row; `verdict`: passed, failed, or how its run ended."""
    load = case10.workload_of(name)
    return FigureRow(
        "loss_difference",
        SETTING_ROWS[name].method,
        load.num_layers,
        load.hidden_size,
        None,
        1e-7,
        series=name,
        group=release,
        status="ok" if verdict in ("passed", "failed") else verdict,
        reason=reason,
        machine="some CPU, 2 cores",
        valid=verdict == "passed",
    )


def cell(name: str, release: str | None, **changes: Any) -> Record:
    """The record of a cell, as a run leaves it."""
    job = resolve(case10.job_of(DEMO, name, release))[0]
    return record(job, 1.0, **{"key": f"{name}@{release}", "software": {"deepspeed": "0.19.8"}, **changes})


@pytest.mark.parametrize("thread", KNOWN)
def test_each_known_report_is_in_the_table(thread: str) -> None:
    assert any(thread in report.threads for report in REPORTS)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.threads[0])
def test_a_report_is_about_rows_or_has_a_reason(report: Any) -> None:
    assert bool(report.rows) != bool(report.why_no_row) and set(report.rows) <= set(SETTING_ROWS)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+#\d+", thread) for thread in report.threads)
    known = [release for name in report.rows for release in ENGINES[SETTING_ROWS[name].engine].releases]
    assert {report.since, report.until} <= {"", *known} or not known


def test_the_map_has_every_stage_with_and_without_offload_and_micro_batches() -> None:
    settings = {
        (row.options.get("stage"), row.options.get("offload"), row.workload.get("micro_batches", 1))
        for row in SETTING_ROWS.values()
        if row.method == "deepspeed"
    }
    places = [(stage, None) for stage in range(4)] + [(1, "optimizer"), (2, "optimizer"), (3, "all")]
    assert {(*place, parts) for place in places for parts in (1, 4)} <= settings


@pytest.mark.parametrize("name", SETTING_ROWS)
def test_the_jobs_of_a_row_are_those_of_a_profile_of_the_case_and_of_no_other_row(name: str) -> None:
    """What a method cannot train raises an error."""
    release = columns_of(name)[0] if len(columns_of(name)) > 1 else None
    job = resolve(case10.job_of(DEMO, name, release))[0]
    assert case.has_job(DEMO, job) and job.device == "cpu"
    assert set(SETTING_ROWS[name].unseen) <= set(UNSEEN)
    assert [row.series for row in MAP.table([record(job)], DEMO)] == [name]


def test_the_case_itself_runs_only_installed_releases() -> None:
    jobs = MAP.jobs(DEMO, {})
    assert len(jobs) == len(SETTING_ROWS) and not any("release" in job.options for job in jobs)


def test_a_cell_is_named_by_the_release_that_ran() -> None:
    """The installed one is told by the record, and not by what is installed now."""
    cells = [cell("stage-2", "0.18.9"), cell("stage-2", None, software={"deepspeed": "0.19.7"})]
    assert [(row.series, row.group) for row in MAP.table(cells, DEMO)] == [
        ("stage-2", "0.18.9"),
        ("stage-2", "0.19.7"),
    ]


def test_a_record_of_a_version_that_is_none_is_no_cell() -> None:
    assert MAP.table([cell("stage-2", None, software={"deepspeed": "newest"})], DEMO) == []


def test_a_cell_is_its_newest_result() -> None:
    cells = [
        cell("stage-2", "0.18.9"),
        cell("stage-2", "0.18.9", gate=Gate("failed", "gradient", NORM)),
        cell("stage-2", "0.18.9", status="crash"),
    ]
    (row,) = MAP.table(cells, DEMO)
    assert (row.status, row.reason, row.valid) == ("ok", NORM, False)


def test_a_cell_without_a_verdict_neither_passes_nor_fails() -> None:
    (row,) = MAP.table(
        [cell("stage-2", "0.18.9", gate=Gate("untested", "no-reference", "no reference"))], DEMO
    )
    assert release_words.cell_word(row) == "untested: no reference"


def test_runs_of_several_releases_are_kept_though_their_software_differs() -> None:
    """A method's runs by an older state of its code are left out, for each release by itself."""
    releases = [("0.18.9", "0.18.9", "a"), ("0.18.4", "0.18.4", "a"), ("0.18.9", "0.18.9", "b")]
    runs = [
        cell("stage-2", release, key=str(number), software={"deepspeed": version, "source": source})
        for number, (release, version, source) in enumerate(releases)
    ]
    assert points.of_newest_code(runs) == runs[1:]
    assert case.select_runs(10, DEMO, runs) == runs[1:]


@pytest.mark.parametrize(
    ("verdict", "reason", "text"),
    [
        ("passed", "20 steps and all weights bit-equal", "passes"),
        ("failed", NORM, "fails: gradient norm 0.8472 instead of 1.709 at step 1"),
        (
            "crash",
            "RuntimeError: Output 0 of Split is a view and is being modified inplace. This view is the output of a"
            " function at step 1; its log has the traceback",
            "crash: RuntimeError: Output 0 of Split is a view and is being modified inplace",
        ),
        (
            "unavailable",
            "deepspeed 0.18.9 does not import under torch 2.13.0 (ImportError: no name 'x') (at import)",
            "unavailable: does not import under torch 2.13.0 (ImportError: no name 'x')",
        ),
        ("timeout", "ran longer than its 5 seconds", "timeout: ran longer than its 5 seconds"),
        ("failed", "untested: not compared with the reference", "untested: not compared with the reference"),
    ],
)
def test_the_word_of_a_cell(verdict: str, reason: str, text: str) -> None:
    assert release_words.cell_word(row("stage-2", "0.18.9", verdict, reason)) == text


def test_numbers_that_differ_in_their_last_digits_keep_these() -> None:
    text = release_words.cell_word(
        row("stage-2", "0.18.9", "failed", "loss 6.247884 instead of 6.247893 at step 2 (relative 1e-6)")
    )
    assert text == "fails: loss 6.247884 instead of 6.247893 at step 2"


def test_a_cell_whose_line_was_edited_does_not_pass() -> None:
    edited = dataclasses.replace(row("stage-2", "0.18.9"), valid=False, reason=EDITED)
    assert release_words.cell_word(edited) == f"untested: {EDITED}"


def test_a_report_stands_beside_a_failed_cell_and_is_missed_where_there_is_none() -> None:
    known, unknown = (
        row("stage-2-offload-4", "0.18.9", "failed", NORM),
        row("stage-1", "0.18.9", "failed", NORM),
    )
    assert "DeepSpeed/issues/7967" in release_words.reports_text(known) and not release_words.is_unreported(
        known
    )
    assert release_words.reports_text(
        unknown
    ) == f"**{release_words.NONE_KNOWN}**" and release_words.is_unreported(unknown)


def test_a_report_of_an_error_stands_beside_a_crash_alone() -> None:
    crash, wrong = (
        row("stage-2-offload-4-2-ranks", "0.17.6", status, "why") for status in ("crash", "failed")
    )
    assert "issues/7629" in release_words.reports_text(
        crash
    ) and "issues/7967" not in release_words.reports_text(crash)
    assert "issues/7967" in release_words.reports_text(
        wrong
    ) and "issues/7629" not in release_words.reports_text(wrong)
    assert release_words.reports_text(row("stage-2-offload-4-2-ranks", "0.17.6", "unavailable", "why")) == ""


def test_a_setting_that_trains_otherwise_by_design_needs_no_report() -> None:
    late = [row("zenflow-bf16", "0.19.8", "failed", "loss"), row("zenflow", "0.18.2", "failed", "norm")]
    transposed = row("zenflow", "0.19.8", "failed", "loss")
    assert {release_words.reports_text(cell_row) for cell_row in late} == {
        "by design: most gradients are applied some steps late"
    }
    assert release_words.is_unreported(transposed) and not any(map(release_words.is_unreported, late))


def test_a_report_that_a_passing_cell_does_not_show_is_told() -> None:
    assert release_words.reports_text(row("stage-1-offload-4", "0.18.9")).endswith(": not seen here")
    assert release_words.reports_text(row("stage-1-offload-4", "0.19.8")) == ""


def test_neighbors_of_one_word_share_a_line_of_the_page() -> None:
    wrong = [
        row("stage-2-offload-4", release, "failed", NORM)
        for release in ("0.15.2", "0.15.3", "0.15.4", "0.18.9")
    ]
    lines = list(release_words.page_rows([*wrong, row("stage-2-offload-4", "0.19.8")]))
    assert [(line[1], line[2]) for line in lines[:2]] == [
        ("fails: gradient norm 0.8472 instead of 1.709 at step 1", "0.15.2 to 0.15.4, 0.18.9"),
        ("passes", "0.19.8"),
    ]
    name, verdict, releases, _ = lines[2]
    assert (name, verdict) == ("`stage-2-offload-4`", "not run") and releases.startswith(
        "0.14.0 to 0.15.1, 0.16.0 to "
    )


def test_the_page_tells_what_was_not_tried() -> None:
    bare = dataclasses.replace(row("stage-2", "0.19.8"), reason="8 steps; not tested: the probe was left out")
    text = "\n".join(release_words.page_notes([bare]))
    assert "no probe was trained" in text and "cannot show a wrong sum over ranks" in text
    assert "no probe was trained" not in "\n".join(release_words.page_notes([row("stage-2", "0.19.8")]))
    assert all(report.links in text for report in REPORTS)


def test_the_figure_has_a_word_in_each_cell_and_a_frame_around_what_no_report_tells() -> None:
    rows = [
        row("stage-1", "0.18.9", "failed", NORM),
        row("stage-2-offload-4", "0.18.9", "failed", NORM),
        row("stage-2-offload-4", "0.19.8"),
        row("megatron", "0.15.3"),
    ]
    figure = MAP.figure(rows, "demo")
    first, second = figure.axes
    assert [text.get_text() for text in first.texts] == ["fails", "fails", "passes"]
    assert [text.get_text() for text in second.texts] == ["passes"]
    framed = [patch for patch in first.patches if patch.get_linewidth() > 1]
    assert [(patch.get_x(), patch.get_y()) for patch in framed] == [(0, 0)]
    assert [label.get_text() for label in first.get_xticklabels()] == ["0.18.9", "0.19.8"]


def test_many_failed_neighbors_share_the_whole_word() -> None:
    releases = [release for release in columns_of("stage-2-offload-4") if "0.15.2" <= release < "0.19"]
    rows = [row("stage-2-offload-4", release, "failed", NORM) for release in releases]
    (text,) = MAP.figure(rows, "demo").axes[0].texts
    assert text.get_text() == "fails: gradient norm 0.8472 instead of 1.709 at step 1"


def test_colors_of_cells_differ_in_grey() -> None:
    from cases.case10 import CELL_LOOKS, OTHER_LOOK

    def grey(color: str) -> float:
        red, green, blue = bytes.fromhex("FFFFFF" if color == "white" else color[1:])
        return 0.299 * red + 0.587 * green + 0.114 * blue

    shades = sorted(grey(face) for face, _, _ in (*CELL_LOOKS.values(), OTHER_LOOK))
    assert all(later - earlier > 12 for earlier, later in itertools.pairwise(shades))


def test_since_and_until_choose_releases() -> None:
    cells = cells_of(CellChoice("deepspeed", ["stage-2", "zenflow"], "0.18.9", "0.19.1"))
    assert cells == [
        (name, release) for name in ("stage-2", "zenflow") for release in ("0.18.9", "0.19.0", "0.19.1")
    ]


def test_a_setting_begins_with_the_first_release_that_has_it() -> None:
    assert columns_of("zenflow")[0] == "0.17.5" and columns_of("stage-2")[0] == "0.14.0"
    named = cells_of(CellChoice(names=["stage-2", "zenflow"], releases=["0.17.4", "0.17.5"]))
    assert named == [("stage-2", "0.17.4"), ("stage-2", "0.17.5"), ("zenflow", "0.17.5")]


def test_a_release_that_the_table_lacks_may_be_named() -> None:
    assert cells_of(CellChoice("deepspeed", ["stage-2"], releases=["9.9.9"])) == [("stage-2", "9.9.9")]


def test_quick_takes_both_sides_of_each_change() -> None:
    releases = {
        release for name, release in cells_of(CellChoice(is_quick=True)) if name == "stage-2-offload-4"
    }
    assert {"0.15.1", "0.15.2", "0.18.9", "0.19.0"} <= releases and "0.16.9" not in releases


def test_quick_leaves_out_what_a_cpu_cannot_show() -> None:
    """Buckets of an exchange that overlaps are wrong until 0.14.2 on streams; on a GPU this change is tried, too."""
    change = {("stage-2-4-overlap-2-ranks", release) for release in ("0.14.2", "0.14.3")}
    on_cpu, on_gpu = (cells_of(CellChoice(is_quick=True, has_gpu=has_gpu)) for has_gpu in (False, True))
    assert not change & {*on_cpu} and change <= {*on_gpu} and len(on_cpu) <= 32


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"engine": "jax"}, "expected an engine of deepspeed"),
        ({"names": ["stage-9"]}, "expected a setting of stage-0, "),
        ({"engine": "fsdp2", "names": ["stage-2"]}, "expected a setting of fsdp2, got stage-2"),
        ({"since": "0.18.9"}, "expected releases of one engine, got deepspeed, megatron-core, transformers"),
        (
            {"engine": "deepspeed", "until": "new"},
            "release: expected a version of deepspeed such as 0.18.9, got 'new'",
        ),
    ],
)
def test_what_the_map_lacks_is_named(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cells_of(CellChoice(**choice))


def test_releases_are_ordered_as_numbers() -> None:
    assert order("") < order("0.9.5") < order("0.10.0") < order("0.19.10")


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_script_is_short_and_needs_only_torch_and_the_engine(name: str) -> None:
    text = script(name, "0.18.9")
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) for node in imports}
    assert modules == {"copy", "os", "deepspeed", "torch", "torch.distributed"}
    assert len(text.splitlines()) <= 80 and max(map(len, text.splitlines())) <= 120
    assert "deepspeed==0.18.9" in text


@pytest.mark.parametrize("name", ["superoffload", "megatron", "stage-9"])
def test_a_row_without_a_script_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"--script: expected a setting of stage-0, .*, got"):
        script(name)


def run_script(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "shown.py"
    file.write_text(script(name))
    environment = os.environ | {"MASTER_PORT": str(free_ports(1)[0])}
    done = subprocess.run([sys.executable, file], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["stage-2-offload-4", "stage-2-4-caller", "stage-3-4", "stage-2-offload-4-bf16"]
)
def test_the_script_of_the_installed_release_shows_equal_norms_and_updates(name: str, tmp_path: Path) -> None:
    done = run_script(name, tmp_path)
    pairs = re.findall(r"(?:gradient norm|weights moved) ([\d.]+) torch, ([\d.]+) DeepSpeed", done.stdout)
    assert len(pairs) == 10 and "DEPARTS" not in done.stdout
    for plain, engine in pairs:
        assert float(engine) == pytest.approx(float(plain), rel=2e-2 if name.endswith("bf16") else 1e-3)


@pytest.mark.heavy
def test_the_script_shows_updates_that_are_too_short_although_norms_agree(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 counts a step too many in stage 0: its first update is 0.744 of Adam's."""
    first, *_ = run_script("stage-0-4-bf16", tmp_path).stdout.splitlines()
    numbers = re.findall(r"([\d.]+) torch, ([\d.]+) DeepSpeed", first)
    (plain_norm, norm), (plain_far, far) = [(float(plain), float(engine)) for plain, engine in numbers[1:]]
    assert norm == pytest.approx(plain_norm, rel=1e-2) and first.endswith("DEPARTS")
    assert far / plain_far == pytest.approx(0.744, abs=0.05)
