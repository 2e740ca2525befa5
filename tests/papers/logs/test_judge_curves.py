"""Verdicts on curves: the published runs get theirs, and where the evidence does not suffice there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.logs import (
    CURVES,
    VARIANTS,
    deepspeed_lines,
    imported,
    megatron_lines,
    name_of,
    write_log,
    write_published,
)

# zero-offload trains; all others of the published methods but the reference do not.
EXPECTED = dict.fromkeys(CURVES, "failed loss") | {
    "megatron-lm 32 4": "tolerance ",
    "zero-offload 32 4": "tolerance ",
    "zero-offload 48 4": "tolerance ",
    "stronghold 32 2": "failed no-learning",
    "l2l 32 4": "failed no-learning",
    "l2l 78 4": "untested incomplete",
    "stronghold 16 15": "failed not-finite",
}


def test_the_published_runs_get_the_verdicts_that_their_losses_deserve(tmp_path: Path) -> None:
    for name in CURVES:
        write_published(tmp_path, name)
    verdicts = {}
    for record in imported(tmp_path, results=tmp_path):
        job, window = record.job, record.evidence["named_window"]
        verdicts[f"{job.method} {job.workload.num_layers} {window}"] = (
            f"{record.gate.verdict} {record.gate.reason}"
        )
    assert verdicts == EXPECTED


@pytest.mark.parametrize("vary", VARIANTS)
def test_a_log_of_an_unknown_dialect_is_judged_as_the_one_that_it_is_near(
    tmp_path: Path, vary: Callable
) -> None:
    names = (
        "megatron-lm 32 4",
        "zero-offload 32 4",
        "zero-infinity 32 4",
        "stronghold 16 15",
        "l2l 32 4",
        "l2l 78 4",
    )
    for name in names:
        path = write_published(tmp_path, name)
        path.write_text("\n".join(vary(path.read_text().splitlines())) + "\n")
    verdicts = {}
    for record in imported(tmp_path, results=tmp_path):
        job, window = record.job, record.evidence["named_window"]
        verdicts[f"{job.method} {job.workload.num_layers} {window}"] = (
            f"{record.gate.verdict} {record.gate.reason}"
        )
    assert verdicts == {name: EXPECTED[name] for name in names}


def test_a_size_without_reference_is_held_to_a_method_that_agrees_with_it_elsewhere(tmp_path: Path) -> None:
    for name in ("megatron-lm 32 4", "zero-offload 32 4", "zero-offload 48 4", "zero-infinity 48 4"):
        write_published(tmp_path, name)
    gate = next(r.gate for r in imported(tmp_path, results=tmp_path) if r.job.method == "zero-infinity")
    assert (gate.evidence["reference_method"], gate.evidence["reference_layers"]) == ("zero-offload", 48)
    assert gate.reason == "loss"


def test_without_a_reference_there_is_no_verdict(tmp_path: Path) -> None:
    write_published(tmp_path, "zero-offload 48 4")
    (record,) = imported(tmp_path, results=tmp_path)
    assert (record.gate.verdict, record.gate.reason) == ("untested", "no-reference")


def test_a_resident_log_whose_loss_rose_is_named_as_no_reference(tmp_path: Path) -> None:
    write_log(tmp_path, name_of("megatron-lm", 2, 64), megatron_lines(2, 64, [10.0, 10.5]))
    write_log(tmp_path, name_of("l2l", 2, 64), megatron_lines(2, 64, [10.0, 9.0]))
    texts = {record.job.method: record.gate.text for record in imported(tmp_path, results=tmp_path)}
    flaw = "its logged losses do not fall: from 10 to 10.5"
    assert texts == {
        "megatron-lm": f"would be the reference, but {flaw}",
        "l2l": f"megatron-lm at 2 layers beside it is no reference: {flaw}",
    }


def test_a_reference_that_rose_does_not_stand_before_one_that_learned(tmp_path: Path) -> None:
    write_log(tmp_path, name_of("resident", 2, 64), megatron_lines(2, 64, [10.0, 10.5]))
    write_log(tmp_path, name_of("megatron-lm", 2, 64), megatron_lines(2, 64, [10.0, 9.0]))
    path = write_log(tmp_path, name_of("l2l", 2, 64), megatron_lines(2, 64, [10.0, 9.01]))
    assert imported(path, results=tmp_path)[0].gate.evidence["reference_method"] == "megatron-lm"


def test_the_reference_may_be_named(tmp_path: Path) -> None:
    for name in ("zero-offload 32 4", "zero-infinity 32 4"):
        write_published(tmp_path, name)
    records = imported(tmp_path, results=tmp_path, reference="zero-offload")
    assert {record.job.method: record.gate.verdict for record in records} == {
        "zero-offload": "tolerance",
        "zero-infinity": "failed",
    }


def test_a_reference_many_doublings_away_cannot_tell(tmp_path: Path) -> None:
    falling = [10.0, 9.0, 8.5]
    write_log(tmp_path, name_of("megatron-lm", 2, 64), megatron_lines(2, 64, falling))
    path = write_log(tmp_path, name_of("zero-offload", 16, 64), deepspeed_lines(16, 64, falling))
    assert imported(path, results=tmp_path)[0].gate.reason == "far-reference"
    write_log(tmp_path, name_of("zero-offload", 2, 64), deepspeed_lines(2, 64, falling))
    assert imported(path, results=tmp_path)[0].gate.verdict == "twin"


def test_a_method_that_fails_beside_the_reference_does_not_pass_far_from_it(tmp_path: Path) -> None:
    write_log(tmp_path, name_of("megatron-lm", 4, 64), megatron_lines(4, 64, [10.0, 9.0, 8.5]))
    write_log(tmp_path, name_of("l2l", 4, 64), megatron_lines(4, 64, [10.0, 9.2, 8.5]))  # 13 % of 1.5 off
    path = write_log(tmp_path, name_of("l2l", 6, 64), megatron_lines(6, 64, [10.0, 9.2, 8.5]))
    gate = imported(path, results=tmp_path)[0].gate
    assert (gate.verdict, gate.reason) == ("failed", "loss")
    assert gate.text.startswith("its twin at 4 layers")


def test_a_reference_that_hardly_learned_condemns_nobody(tmp_path: Path) -> None:
    write_log(tmp_path, name_of("megatron-lm", 2, 64), megatron_lines(2, 64, [10.0, 9.999]))
    path = write_log(tmp_path, name_of("l2l", 2, 64), megatron_lines(2, 64, [10.0, 10.0]))
    assert imported(path, results=tmp_path)[0].gate.reason == "weak-reference"


def test_a_verdict_does_not_depend_on_which_logs_are_named(tmp_path: Path) -> None:
    logs = [write_published(tmp_path, name) for name in ("megatron-lm 32 4", "zero-infinity 32 4")]
    (results := tmp_path / "results").mkdir()
    alone = imported(logs[1], results=results)[0]
    assert alone.gate == imported(*logs, results=results)[1].gate
    assert alone.gate.verdict == "failed"
