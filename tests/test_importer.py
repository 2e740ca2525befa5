"""Logs as records: each dialect's numbers, how a run ended, what its curve is worth; no log is a traceback.

The property test mutates logs a few hundred times; 10,000 times with
    LOG_MUTATIONS=10000 ./test.sh tests/test_importer.py -k mutated
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.importer import import_logs, line
from harness.logrecord import to_record
from harness.method import ROOT
from harness.published import header_lines, interval_lines
from harness.rawlog import NotALog, read
from harness.record import Record, read_all
from harness.spec import Job, Workload
from harness.sweep import Sweep, resolve
from tests.logs import CURVES, deepspeed_lines, megatron_lines, name_of, write_log, write_published

PUBLISHED = ROOT.parent / "shared" / "published"
needs_published = pytest.mark.skipif(not PUBLISHED.exists(), reason="the published raw logs are not in ../shared")


def imported(*logs: Path, results: Path, reference: str | None = None) -> list[Record]:
    skipped: list = []
    records = [record for record, _ in import_logs(logs, results, reference, lambda *each: skipped.append(each))]
    assert not skipped
    return records


def one(folder: Path, name: str, lines: list[str]) -> Record:
    return to_record(read(write_log(folder, name, lines)), name)


# The dialects.


@pytest.mark.parametrize("name", ["log_some-method_l-2_hs-64_bs-4_ws-4_2022-07-02.1656730240.txt",
                                  "log_some-method_l-2_h-64_bs-4_ws-4_2022-07-02.1656730240.txt"])  # fmt: skip
def test_both_patterns_of_names_are_read(tmp_path: Path, name: str) -> None:
    record = one(tmp_path, name, megatron_lines(2, 64, [9.0, 8.0]))
    load = record.job.workload
    assert (record.job.method, load.num_layers, load.hidden_size, load.batch_size) == ("some-method", 2, 64, 4)
    assert record.started == 1656730240
    assert record.origin == "imported"


def test_megatrons_lines_become_losses_seconds_norms_and_peaks(tmp_path: Path) -> None:
    lines = megatron_lines(2, 64, [9.0, 8.5, 8.25], milliseconds=[900.0, 500.0, 400.0], norms=[3.0, 2.0, 1.5])
    record = one(tmp_path, name_of("m", 2, 64), lines)
    assert (record.status, record.phase, record.job.steps, record.interval_steps) == ("ok", "done", 30, 10)
    assert record.losses == [9.0, 8.5, 8.25]
    assert record.step_seconds == [0.9, 0.5, 0.4]
    assert record.grad_norms == [3.0, 2.0, 1.5]
    assert record.peaks == {"device_allocated": 120 * 2**20, "device_reserved": 200 * 2**20}
    assert record.median_step_seconds == pytest.approx(0.45)  # the first interval holds the warm-up
    assert record.evidence["samples_per_second"] == [4 / 0.9, 4 / 0.5, 4 / 0.4]
    assert record.evidence["samples_per_second_is"] == "mean of each interval"
    assert record.evidence["doubts"] == []


def test_the_arguments_are_the_workload(tmp_path: Path) -> None:
    record = one(tmp_path, name_of("m", 2, 64), megatron_lines(2, 64, [9.0], heads=8, dropout=0.1, data="/a/b/corpus"))
    load = record.job.workload
    assert (load.num_heads, load.dropout, load.corpus, load.dtype) == (8, 0.1, "corpus", "fp32")
    assert "/a/b" not in json.dumps(record.to_dict())  # a stranger's folders are nobody's business


def test_deepspeeds_speed_is_known_to_be_cumulative(tmp_path: Path) -> None:
    record = one(tmp_path, name_of("d", 2, 2048), deepspeed_lines(2, 2048, [9.0, 8.5, 8.25]))
    assert record.evidence["samples_per_second_is"].startswith("mean of all steps so far but the first two")
    assert record.losses == [9.0, 8.5, 8.25]
    assert record.peaks["device_reserved"] == 200 * 2**20
    assert record.evidence["doubts"] == ["its Tera Flops are 0.1 times what its parameters, tokens and times give"]


@needs_published
@pytest.mark.parametrize("name", ["zero-offload_l-48", "zero-infinity_l-32"])
def test_cumulative_speeds_take_apart_into_the_times_of_intervals(name: str) -> None:
    # Steps 3 to n take (n - 2) B / speed: the difference of two of those is an interval, without its data loading.
    path = next((PUBLISHED / "logs").glob(f"log_{name}_*"))
    evidence = to_record(read(path), path.name).evidence
    spent = [
        (n - 2) * 4 / speed for n, speed in zip(evidence["iterations"], evidence["samples_per_second"], strict=True)
    ]
    for index, elapsed in enumerate(evidence["elapsed_ms"][1:], start=1):
        assert (spent[index] - spent[index - 1]) * 100 == pytest.approx(elapsed, rel=1e-3)


def test_a_window_counts_where_the_method_has_one(tmp_path: Path) -> None:
    lines = megatron_lines(2, 64, [9.0])
    assert one(tmp_path, name_of("stronghold", 2, 64, window=2), lines).job.options == {"window_size": 2}
    record = one(tmp_path, name_of("l2l", 2, 64, window=4), lines)
    assert record.job.options == {}
    assert record.evidence["named_window"] == 4


def test_our_own_log_gives_its_job_back(tmp_path: Path) -> None:
    load = Workload(num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97, clip_norm=0)
    job = Job("stronghold", load, {"window_size": 2, "resident_layers": 0}, steps=20, warmup=5)
    measured = {"losses": [4.0] * 10 + [3.0] * 10, "step_seconds": [0.25] * 20, "grad_norms": [1.0] * 20}
    first = {key: values[:10] for key, values in measured.items()}
    lines = [*header_lines(job), *interval_lines(job, first, {}), *interval_lines(job, measured, {})]
    record = one(tmp_path, "log_stronghold_l-2_hs-32_bs-2_ws-2_2026-01-02.1800000000.txt", lines)
    assert (record.job.workload, record.job.options, record.job.steps) == (load, job.options, 20)
    assert (record.status, record.clock, record.losses) == ("ok", "cpu", [4.0, 3.0])
    assert record.evidence["doubts"] == []


# How a run ended.


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("/x/run.sh: line 56: 31047 Killed                  python train.py", "oom-host"),
        ("[2022-07-02] [ERROR] [launch.py] Process 7 exits with return code = -9", "oom-host"),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "oom-device"),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes", "oom-host"),
        ("/x/run.sh: line 56: 31047 Terminated              python train.py", "killed"),
        ("/x/run.sh: line 56: 31047 Segmentation fault      python train.py", "crash"),
        ("KeyboardInterrupt", "interrupted"),
        ("ModuleNotFoundError: No module named 'apex'", "unavailable"),
        ("ValueError: no such thing", "crash"),
        ("stronghold with 9 layers needs 9.0 GiB of host memory (weights 9.0 GiB), there is 1.0 GiB", "does-not-fit"),
        ("", "interrupted"),  # cut
    ],
)
def test_the_end_is_named_by_what_the_log_tells(tmp_path: Path, told: str, status: str) -> None:
    record = one(tmp_path, name_of("m", 2, 64), [*megatron_lines(2, 64, [9.0, 8.0], of=50), told])
    assert (record.status, record.phase) == (status, "step 21")
    assert "after iteration 20 of 50" in record.reason


def test_a_run_killed_after_its_last_step_has_trained(tmp_path: Path) -> None:
    lines = [*megatron_lines(2, 64, [9.0, 8.0]), "run.sh: line 5: 7 Killed  python"]
    record = one(tmp_path, name_of("m", 2, 64), lines)
    assert record.status == "ok"
    assert record.evidence["ends"] == ["line 5: 7 Killed"]


def test_a_run_that_exits_as_told_before_its_last_iteration_has_finished(tmp_path: Path) -> None:
    lines = [*megatron_lines(2, 64, [9.0, 8.0], of=50), "[exiting program at iteration 20] datetime: 2022-07-02"]
    record = one(tmp_path, name_of("m", 2, 64), lines)
    assert (record.status, record.job.steps) == ("ok", 20)


def test_a_whole_line_without_a_loss_is_not_a_number_and_a_cut_one_is_missing(tmp_path: Path) -> None:
    nan = one(tmp_path, name_of("m", 2, 64), megatron_lines(2, 64, [9.0, math.nan]))
    assert math.isnan(nan.losses[1])
    cut = [text.split("| lm loss")[0] if "20/" in text else text for text in megatron_lines(2, 64, [9.0, 8.0])]
    assert one(tmp_path, name_of("m", 2, 64), cut).losses == [9.0, None]


def test_a_missing_line_leaves_a_gap_and_not_a_shift(tmp_path: Path) -> None:
    lines = megatron_lines(2, 64, [9.0, 8.0, 7.0], milliseconds=[900.0, 500.0, 400.0])
    record = one(tmp_path, name_of("m", 2, 64), [text for text in lines if "10/" not in text])
    assert record.losses == [None, 8.0, 7.0]
    assert record.median_step_seconds == pytest.approx(0.45)


def test_other_parameters_than_the_names_are_said_and_fail(tmp_path: Path) -> None:
    write_log(tmp_path, name_of("resident", 3, 64), megatron_lines(2, 64, [9.0, 8.0]))
    (record,) = imported(tmp_path, results=tmp_path)
    assert record.gate.reason == "parameters"
    assert "num_layers is 3 in the name and 2 in the log" in record.evidence["doubts"]


# Verdicts. The losses are those of the published runs (its logs, losses at iterations 10 to 50).

# zero-offload trains; all others of the published methods but the reference do not.
EXPECTED = dict.fromkeys(CURVES, "failed loss") | {
    "megatron-lm 32 4": "tolerance ", "zero-offload 32 4": "tolerance ", "zero-offload 48 4": "tolerance ",
    "stronghold 32 2": "failed no-learning",
    "l2l 32 4": "failed no-learning", "l2l 78 4": "untested incomplete", "stronghold 16 15": "failed not-finite",
}  # fmt: skip


def test_the_published_runs_get_the_verdicts_that_their_losses_deserve(tmp_path: Path) -> None:
    for name in CURVES:
        write_published(tmp_path, name)
    found = {}
    for record in imported(tmp_path, results=tmp_path):
        job, window = record.job, record.evidence["named_window"]
        found[f"{job.method} {job.workload.num_layers} {window}"] = f"{record.gate.verdict} {record.gate.reason}"
    assert found == EXPECTED


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


def test_the_reference_may_be_named(tmp_path: Path) -> None:
    for name in ("zero-offload 32 4", "zero-infinity 32 4"):
        write_published(tmp_path, name)
    records = imported(tmp_path, results=tmp_path, reference="zero-offload")
    assert {record.job.method: record.gate.verdict for record in records} == {
        "zero-offload": "tolerance", "zero-infinity": "failed",
    }  # fmt: skip


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


# The published raw logs themselves.


@needs_published
def test_the_raw_logs_get_the_known_verdicts(tmp_path: Path) -> None:
    found = {
        (record.job.method, record.job.workload.num_layers): (record.status, record.gate.verdict, record.gate.reason)
        for record in imported(PUBLISHED / "logs", results=tmp_path)
    }
    assert found == {
        ("megatron-lm", 32): ("ok", "tolerance", ""),
        ("zero-offload", 48): ("ok", "tolerance", ""),
        ("zero-infinity", 32): ("ok", "failed", "loss"),
        ("stronghold", 16): ("ok", "failed", "not-finite"),
        ("stronghold", 32): ("ok", "failed", "loss"),
        ("stronghold", 100): ("ok", "failed", "loss"),
        ("l2l", 78): ("oom-host", "untested", "incomplete"),
    }


@needs_published
def test_the_raw_logs_have_the_published_medians_parameters_and_memory(tmp_path: Path) -> None:
    rows = {row["log"]: row for row in csv.DictReader((PUBLISHED / "runs.csv").open())}
    records = imported(PUBLISHED / "logs", results=tmp_path)
    assert len(records) == 7
    for record in records:
        row, evidence = rows[record.evidence["log"]], record.evidence
        assert str(round(statistics.median(evidence["samples_per_second"]), 5)) == row["sps_median"]
        steady = evidence["elapsed_ms"][1:]
        assert (f"{statistics.median(steady):.1f}" if steady else "") == row["ms_steady_median"]
        assert f" {row['ms_steady_median']} ms a step" in line(record) or not steady
        assert record.median_step_seconds == pytest.approx(statistics.median(steady) / 1000) if steady else True
        assert f"{record.job.workload.num_params / 1e9:.3f}" == row["params_B"]
        assert record.evidence.get("other_parameters") is None
        assert f"{record.peaks['device_allocated'] / 2**20:.1f}" == row["mem_max_alloc_MB"]
        assert f"{record.peaks['device_reserved'] / 2**20:.1f}" == row["mem_max_reserved_MB"]
        assert [f"{loss:.4f}" for loss in record.losses] == row["loss_all"].split()
        assert record.job.options.get("window_size", int(row["window"])) == int(row["window"])


# The verb.


def run(*words: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "harness", "import", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_what_is_no_log_is_named_and_skipped(tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    write_published(logs, "megatron-lm 32 4")
    (logs / "notes.txt").write_text("loss 3.0")
    (logs / name_of("l2l", 2, 64)).write_bytes(bytes(range(256)) * 100)
    (logs / "table.csv").write_text("not even looked at")
    done = run(logs, "--results", tmp_path / "results")
    assert done.returncode == 1
    assert [text.split(":")[0].rsplit("/")[-1] for text in done.stderr.splitlines()] == [
        name_of("l2l", 2, 64), "notes.txt",
    ]  # fmt: skip
    assert done.stdout.startswith("megatron-lm, 32 layers, 1.717 B parameters: ok, median")
    assert len(list((tmp_path / "results").iterdir())) == 1


def test_importing_twice_writes_nothing_new_and_leaves_the_logs_alone(tmp_path: Path) -> None:
    for name in ("megatron-lm 32 4", "stronghold 16 15", "l2l 78 4"):
        write_published(tmp_path / "logs", name)
    before = {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert run(tmp_path / "logs", "--results", tmp_path / "results").returncode == 0
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    done = run(tmp_path / "logs", *before, "--results", tmp_path / "results")
    assert [text.endswith("[recorded before]") for text in done.stdout.splitlines()] == [True] * 3
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert before == {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()}


@pytest.mark.parametrize("words", [["/nowhere/log.txt"], []])
def test_a_call_without_a_log_is_a_mistake_in_one_line(tmp_path: Path, words: list[str]) -> None:
    done = run(*words, "--results", tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_an_empty_folder_is_a_mistake(tmp_path: Path) -> None:
    done = run(tmp_path, "--results", tmp_path / "results")
    assert (done.returncode, done.stderr.startswith("error: no log in")) == (2, True)


def test_a_sweep_takes_no_imported_record_for_its_own(tmp_path: Path) -> None:
    load = Workload(num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)
    job = resolve(Job("resident", load, steps=4, warmup=1))[0]
    record = dataclasses.replace(one(tmp_path, name_of("m", 2, 64), megatron_lines(2, 64, [9.0, 8.0])), job=job)
    record = dataclasses.replace(record, key=Sweep(tmp_path).key(job))
    record.write(tmp_path / "log_resident.json")
    assert len(read_all(tmp_path)[0]) == 1
    assert Sweep(tmp_path).records == {}


# Anything may be in a log.


def mutate(lines: list[str], draw: st.DrawFn) -> list[bytes]:
    """Lines cut, doubled, exchanged, dropped and garbled."""
    mutated = [text.encode() for text in lines]
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["cut", "double", "exchange", "drop", "garble", "number", "end"]))
        index = draw(st.integers(0, len(mutated) - 1))
        text = mutated[index]
        if kind == "cut":
            mutated[index] = text[: draw(st.integers(0, len(text)))]
        elif kind == "double":
            mutated.insert(draw(st.integers(0, len(mutated))), text)
        elif kind == "exchange":
            other = draw(st.integers(0, len(mutated) - 1))
            mutated[index], mutated[other] = mutated[other], text
        elif kind == "drop" and len(mutated) > 1:
            del mutated[index]
        elif kind == "garble":
            at = draw(st.integers(0, len(text)))
            mutated[index] = text[:at] + draw(st.binary(max_size=8)) + text[at + draw(st.integers(0, 4)) :]
        elif kind == "number":
            digits = [place for place, byte in enumerate(text) if chr(byte).isdigit()]
            if digits:
                at = draw(st.sampled_from(digits))
                new = draw(st.sampled_from([b"0", b"-1", b"9" * 30, b"1e400", b"nan", b".", b"1E-320", b"7"]))
                mutated[index] = text[:at] + new + text[at + 1 :]
        elif kind == "end":
            mutated = mutated[: index + 1]
    return mutated


@st.composite
def mutated_logs(draw: st.DrawFn) -> list[bytes]:
    curve = draw(st.sampled_from([[9.0, 8.0, 7.5], [9.0, 9.0], [9.0, math.nan, math.nan], [8.0]]))
    lines = draw(st.sampled_from([megatron_lines, deepspeed_lines]))(2, 64, curve, of=draw(st.sampled_from([30, 50])))
    return mutate([*lines, draw(st.sampled_from(["", "run.sh: line 5: 7 Killed  python", "MemoryError"]))], draw)


@settings(
    max_examples=int(os.environ.get("LOG_MUTATIONS", "300")), deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(content=mutated_logs())
def test_a_mutated_log_is_a_record_or_no_log_and_never_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutated"
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    for old in results.iterdir():
        old.unlink()
    if not (folder / name_of("megatron-lm", 2, 64)).exists():
        write_log(folder, name_of("megatron-lm", 2, 64), megatron_lines(2, 64, [9.0, 8.0, 7.5]))
    path = folder / name_of("l2l", 2, 64)
    path.write_bytes(b"\n".join(content))
    skipped: list = []
    records = imported_or_skipped(path, results, skipped)
    assert len(records) + len(skipped) == 1
    for record in records:
        line(record).encode()
        (stored,) = read_all(results)[0].values()
        assert 0 < (stored.median_step_seconds or 1.0) < math.inf
        assert not stored.gate.passed or stored.status == "ok"
        assert not any(is_new for _, is_new in import_logs([path], results, None, lambda *each: None))


def imported_or_skipped(path: Path, results: Path, skipped: list) -> list[Record]:
    return [record for record, _ in import_logs([path], results, None, lambda *each: skipped.append(each))]


def test_a_name_that_is_no_logs_is_not_even_opened(tmp_path: Path) -> None:
    with pytest.raises(NotALog, match="its name is not"):
        read(tmp_path / "log_l2l_l-x_hs-64_bs-4_ws-4.txt")


def test_a_long_file_of_anything_is_read_in_seconds(tmp_path: Path) -> None:
    path = write_log(tmp_path, name_of("m", 2, 64), megatron_lines(2, 64, [9.0, 8.0]))
    with path.open("ab") as file:
        file.write(b"  a . " + b" " * 3_000_000 + b"x" + b"\0" * 10_000_000 + b"\n" + b"iteration 1/ \n" * 50_000)
    assert to_record(read(path), path.name).losses == [9.0, 8.0]
