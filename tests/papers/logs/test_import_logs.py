"""Import: the published raw logs, the verb, and what no log does to it: a traceback.

The property test mutates logs of a published run some times, and lets verify judge by them; 10,000 times with
    bench/fuzz.sh
"""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
from harness.core.job import MOST_LAYERS, Budget, Job, Workload
from harness.core.log_lines import BUILD_LOG
from harness.core.record import Record, read_all
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from harness.run.launch import launch
from papers.claims import claims, fairness, verify
from papers.logs.import_logs import import_logs, record_line
from tests.support.cli import run
from tests.support.fuzz import fuzzed
from tests.support.logs import (
    PUBLISHED,
    SMALL_NAME,
    deepspeed_lines,
    imported,
    megatron_lines,
    name_of,
    needs_published,
    one,
    own_lines,
    steps_of,
    write_log,
    write_published,
)


@needs_published
def test_the_raw_logs_get_the_known_verdicts(tmp_path: Path) -> None:
    verdicts = {
        (record.job.method, record.job.workload.num_layers): (
            record.status,
            record.gate.verdict,
            record.gate.reason,
        )
        for record in imported(PUBLISHED / "logs", results=tmp_path)
    }
    assert verdicts == {
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
        assert f" {row['ms_steady_median']} ms a step" in record_line(record) or not steady
        assert (
            record.median_step_seconds == pytest.approx(statistics.median(steady) / 1000) if steady else True
        )
        assert f"{record.job.workload.num_params / 1e9:.3f}" == row["params_B"]
        assert record.evidence.get("other_parameters") is None
        assert f"{record.peaks['device_allocated'] / 2**20:.1f}" == row["mem_max_alloc_MB"]
        assert f"{record.peaks['device_reserved'] / 2**20:.1f}" == row["mem_max_reserved_MB"]
        assert [f"{loss:.4f}" for loss in record.losses] == row["loss_all"].split()
        assert record.job.options.get("window_size", int(row["window"])) == int(row["window"])


def test_what_is_no_log_is_named_and_skipped(tmp_path: Path) -> None:
    (logs := tmp_path / "logs").mkdir()
    write_published(logs, "megatron-lm 32 4")
    (logs / "notes.txt").write_text("loss 3.0")
    (logs / name_of("l2l", 2, 64)).write_bytes(bytes(range(256)) * 100)
    (logs / "table.csv").write_text("not even looked at")
    done = run("import", logs, "--results", tmp_path / "results")
    assert done.returncode == 1
    assert [text.split(":")[0].rsplit("/")[-1] for text in done.stderr.splitlines()] == [
        name_of("l2l", 2, 64),
        "notes.txt",
    ]
    assert done.stdout.startswith("megatron-lm, 32 layers, 1.717 B parameters: ok, median")
    assert len(list((tmp_path / "results").iterdir())) == 1


@pytest.mark.heavy
def test_our_own_logs_say_how_their_runs_ended(tmp_path: Path) -> None:
    """One complete run of fewer steps than an interval, one that fills a device, one that is refused by its plan."""
    load = Workload(num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)
    small = Budget(device_bytes=2**16, host_bytes=2**26)
    (logs := tmp_path / "logs").mkdir()
    launch(Job("resident", load, steps=5, warmup=1), str, logs)
    launch(Job("l2l", load, budget=small, device="sim", steps=4, warmup=1), str, logs)
    Sweep(logs).run([resolve(Job("resident", load.at_depth(MOST_LAYERS)))])
    (logs / BUILD_LOG.format("zenflow")).write_text("ninja: no work to do")
    records = sorted(imported(logs, results=tmp_path), key=lambda record: record.evidence["log"])
    recorded_runs = sorted(read_all(logs)[0].items(), key=lambda item: item[0].name)
    assert [record.status for record in records] == ["oom-device", "does-not-fit", "ok"]
    for record, (_, recorded) in zip(records, recorded_runs, strict=True):
        assert record.job.workload == recorded.job.workload and record.reason == recorded.reason
        assert (record.status, record.phase) == (recorded.status, recorded.phase)
    assert records[-1].losses == [pytest.approx(statistics.fmean(recorded_runs[-1][1].losses), rel=1e-5)]


def test_importing_twice_writes_nothing_new_and_leaves_the_logs_alone(tmp_path: Path) -> None:
    for name in ("megatron-lm 32 4", "stronghold 16 15", "l2l 78 4"):
        write_published(tmp_path / "logs", name)
    before = {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert run("import", tmp_path / "logs", "--results", tmp_path / "results").returncode == 0
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    done = run("import", tmp_path / "logs", *before, "--results", tmp_path / "results")
    assert [text.endswith("[recorded before]") for text in done.stdout.splitlines()] == [True] * 3
    assert times == {path: path.stat().st_mtime_ns for path in (tmp_path / "results").iterdir()}
    assert before == {path: path.read_bytes() for path in (tmp_path / "logs").iterdir()}


@pytest.mark.parametrize("arguments", [["/nowhere/log.txt"], []])
def test_a_call_without_a_log_is_a_mistake_in_one_line(tmp_path: Path, arguments: list[str]) -> None:
    done = run("import", *arguments, "--results", tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_a_reference_that_no_log_is_of_is_a_mistake_that_names_those_there_are(tmp_path: Path) -> None:
    write_published(tmp_path, "megatron-lm 32 4")
    done = run("import", tmp_path, "--results", tmp_path, "--reference", "l2l")
    assert (done.returncode, done.stderr) == (
        2,
        "error: --reference: expected a method of these logs (megatron-lm), got 'l2l'\n",
    )


def test_an_empty_folder_is_a_mistake(tmp_path: Path) -> None:
    done = run("import", tmp_path, "--results", tmp_path / "results")
    assert (done.returncode, done.stderr.startswith("error: no log in")) == (2, True)


def test_a_log_of_a_year_that_no_record_has_is_skipped(tmp_path: Path) -> None:
    name = name_of("l2l", 2, 64).replace("1656730240", "999999999999")
    path, skipped = write_log(tmp_path / "logs", name, megatron_lines(2, 64, [9.0, 8.0])), []
    imported = import_logs([path], tmp_path, None, lambda *skip: skipped.append(skip))
    assert not list(imported) and "expected started as seconds from 1970 to the year 9999" in skipped[0][1]


def test_sweep_and_fairness_table_take_no_imported_record_for_their_own(tmp_path: Path) -> None:
    load = Workload(num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)
    job = resolve(Job("resident", load))[0]
    record = dataclasses.replace(
        one(tmp_path, name_of("m", 2, 64), megatron_lines(2, 64, [9.0, 8.0])), job=job
    )
    record = dataclasses.replace(record, key=Sweep(tmp_path).key(job))
    record.write(tmp_path / "log_resident.json")
    assert len(read_all(tmp_path)[0]) == 1
    assert Sweep(tmp_path).records == {}
    assert fairness.fairness_rows([record]) == []


TIMES = ("(ms): 1000.0", "(s): 1.00", "(ms): 1000,0", "(min): 0.02")


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with the records of logs of many kinds: units that are and are not read, several GPUs, unread steps, an
    early end, text that commands a terminal."""
    folder = tmp_path_factory.mktemp("varied")
    for number, time in enumerate(TIMES):
        lines = steps_of(size=4, time=f"elapsed time per iteration {time}")
        write_log(folder / "logs", SMALL_NAME.replace("800.txt", f"80{number}.txt"), lines)
    many = steps_of(size=16, arguments={"world_size": 4})
    write_log(folder / "logs", SMALL_NAME.replace("megatron-lm", "zero-offload"), many)
    odd = [*steps_of(size=4)[:20], "step 21: loss 3.0", "RuntimeError: \x1b[31m\u202eout\x07"]
    write_log(folder / "logs", SMALL_NAME.replace("megatron-lm", "l2l"), odd)
    write_log(folder / "logs", SMALL_NAME.replace("megatron-lm", "other"), ["KeyboardInterrupt"])
    lines = own_lines(2, 64, [9.0])
    lines[0] = lines[0].replace("no options", "{'world_size': 'x'}")
    write_log(folder / "logs", name_of("l2l", 2, 64), lines)
    done = run("import", folder / "logs", "--results", folder / "results")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "world_size" in done.stderr
    return folder / "results"


def test_every_record_of_an_import_is_read_again(varied: Path) -> None:
    records, complaints = read_all(varied)
    assert (len(records), complaints) == (7, [])
    assert len(harness.load(varied)) == 7


@pytest.mark.parametrize(
    "command",
    [
        "compare megatron-lm zero-offload",
        "compare --baseline {} l2l",
        "verify",
        "fairness",
        "case 3 --profile all --extract",
        pytest.param("report", marks=pytest.mark.heavy),
        pytest.param("bundle", marks=pytest.mark.heavy),
    ],
)
def test_every_verb_reads_the_records_of_an_import(varied: Path, command: str) -> None:
    done = run(*command.format(varied).split(), "--results", varied)  # a traceback would fail here
    assert "is not a record" not in done.stderr


def test_a_log_without_times_has_no_throughput_and_says_so(varied: Path) -> None:
    verdicts = {
        record.evidence["log"][-5]: record.gate
        for record in read_all(varied)[0].values()
        if record.job.method == "megatron-lm"
    }
    assert [verdicts[number].verdict for number in "0123"] == [
        "tolerance",
        "tolerance",
        "untested",
        "untested",
    ]
    assert "no time of a step could be read" in verdicts["2"].text


def test_a_copy_of_a_log_is_named_and_not_written(tmp_path: Path) -> None:
    logs, skipped = tmp_path / "logs", []
    for second in "01":
        write_log(logs, SMALL_NAME.replace("800.txt", f"80{second}.txt"), steps_of(size=4))
    for _ in range(2):
        skipped.clear()
        imported = list(import_logs([logs], tmp_path, None, lambda *pair: skipped.append(pair)))
    assert [is_new for _, is_new in imported] == [False] and len(list(tmp_path.glob("*.json"))) == 1
    assert [reason for _, reason in skipped] == [
        f"the same log as {SMALL_NAME.replace('800.txt', '800.txt')}"
    ]


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
    dialect = draw(st.sampled_from([megatron_lines, deepspeed_lines, own_lines]))
    lines = dialect(32, 2048, curve, of=draw(st.sampled_from([30, 50])))
    return mutate(
        [*lines, draw(st.sampled_from(["", "run.sh: line 5: 7 Killed  python", "MemoryError"]))], draw
    )


@fuzzed
@given(content=mutated_logs())
@pytest.mark.heavy
def test_a_mutated_log_is_a_record_or_no_log_and_never_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutated"
    results = folder / "results"
    results.mkdir(parents=True, exist_ok=True)
    for old in results.iterdir():
        old.unlink()
    if not (folder / name_of("megatron-lm", 32, 2048)).exists():
        write_log(folder, name_of("megatron-lm", 32, 2048), megatron_lines(32, 2048, [9.0, 8.0, 7.5]))
    path = folder / name_of("l2l", 32, 2048)
    path.write_bytes(b"\n".join(content))
    skipped: list = []
    records = imported_or_skipped(path, results, skipped)
    assert len(records) + len(skipped) == 1
    for record in records:
        record_line(record).encode()
        (stored,) = read_all(results)[0].values()
        assert 0 < (stored.median_step_seconds or 1.0) < math.inf
        assert not stored.gate.passed or stored.status == "ok"
        if zlib.crc32(b"".join(content)) % 16 == 0:
            assert len(verify.findings(results, None, "v100-vm")) == len(claims.load_claims())
        assert not any(is_new for _, is_new in import_logs([path], results, None, lambda *skip: None))


def imported_or_skipped(path: Path, results: Path, skipped: list) -> list[Record]:
    return [record for record, _ in import_logs([path], results, None, lambda *skip: skipped.append(skip))]
