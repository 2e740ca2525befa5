"""A sweep runs what is missing, judges what ends, and refuses what cannot fit, on record."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
import tempfile
from functools import partial
from pathlib import Path

import pytest

from harness.core.job import GIB, MOST_LAYERS, Budget, Job, Plan, Workload
from harness.core.record import Record, read_all
from harness.devices import machine
from harness.jobs.progress import _Lines, job_result_line, print_results
from harness.jobs.sweep import Store, Sweep
from harness.plan.fit import Planned, most_layers, resolve
from papers.report.tables import Entry, record_row
from tests.support import forks, records
from tests.support.tiny import TINY


def plans(*methods: str, **changes) -> list[Planned]:
    workload = dataclasses.replace(TINY, **changes)
    return [resolve(Job(name, workload, steps=4, warmup=1)) for name in methods]


def jobs(*methods: str, **changes) -> list[Job]:
    return [planned.job for planned in plans(*methods, **changes)]


def starts(events: list[dict]) -> list[str]:
    return [event["job"].method for event in events if event["event"] == "start"]


def test_the_reference_is_run_once_for_all_who_need_it(tmp_path: Path, in_process: None) -> None:
    events: list[dict] = []
    records = Sweep(tmp_path, report=events.append).run(plans("l2l", "stronghold"))
    assert starts(events) == ["l2l", "resident", "stronghold"]
    assert [record.gate.verdict for record in records] == ["exact", "exact"]


def test_other_threads_are_another_measurement_and_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.run.launch import launch
    from papers.figures.point import machine_of

    names = []
    for number, server in (("1", contextlib.nullcontext()), ("2", forks.own_server())):
        monkeypatch.setenv("OMP_NUM_THREADS", number)
        (job,) = jobs("resident")
        with server:
            record = Record.read(launch(job, partial(Sweep(tmp_path).key, job), tmp_path))
        names.append((record.key, machine_of(record)))
        assert record.machine["environment"] == f"OMP_NUM_THREADS={number}"
    assert len({key for key, _ in names}) == len({name for _, name in names}) == 2


def test_as_many_other_cores_are_another_measurement_and_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = jobs("resident")
    keys = {Sweep(tmp_path).key(job)}
    monkeypatch.setattr(machine, "facts", machine.facts.__wrapped__)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for cores, affinity in (({0, 2, 3}, "0,2-3"), ({0, 1, 2}, "0-2"), ({7}, "7")):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
        keys.add(Sweep(tmp_path).key(job))
        assert machine.facts()["affinity"] == affinity
    assert len(keys) == 4


@pytest.mark.parametrize(("version", "is_same"), [("3.11.2", True), ("3.12.9", False)])
def test_another_python_is_another_measurement_and_a_patch_of_it_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_same: bool
) -> None:
    (job,) = jobs("resident")
    software = {**machine.software(), "python": "3.11.1"}
    keys = []
    for python in ("3.11.1", version):
        monkeypatch.setattr(machine, "software", lambda python=python: {**software, "python": python})
        keys.append(Sweep(tmp_path).key(job))
    assert (keys[0] == keys[1]) == is_same


@pytest.mark.parametrize(
    "name", ["OMP_THREAD_LIMIT", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "CUDA_DEVICE_MAX_CONNECTIONS"]
)
def test_another_variable_of_threads_or_kernels_is_another_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (job,) = jobs("resident")
    before = Sweep(tmp_path).key(job)
    monkeypatch.setenv(name, "1")
    assert Sweep(tmp_path).key(job) != before


def test_what_a_plan_refuses_is_of_the_same_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from papers.figures.point import machine_of

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    refused = dataclasses.replace(jobs("resident")[0], workload=TINY.at_depth(MOST_LAYERS))
    assert (
        len({machine_of(record) for record in Sweep(tmp_path).run([*plans("resident"), resolve(refused)])})
        == 1
    )


def test_the_same_call_again_runs_only_what_is_missing(tmp_path: Path, in_process: None) -> None:
    Sweep(tmp_path).run(plans("resident", "l2l"))
    events: list[dict] = []
    Sweep(tmp_path, report=events.append).run(plans("resident", "l2l", "stronghold"))
    assert starts(events) == ["stronghold"]


def test_what_another_call_has_measured_meanwhile_is_not_measured_again(
    tmp_path: Path, in_process: None
) -> None:
    sweep = Sweep(tmp_path)  # has read the folder before
    Sweep(tmp_path).run(plans("resident"))
    assert [record.status for record in sweep.run(plans("resident"))] == ["ok"]
    assert len(list(tmp_path.glob("log_*.json"))) == 1


def test_what_did_not_end_well_is_run_again(tmp_path: Path, in_process: None) -> None:
    sweep = Sweep(tmp_path)
    sweep.run(plans("resident"))
    (path, record), *_ = read_all(tmp_path)[0].items()
    dataclasses.replace(record, status="killed").write(path)
    events: list[dict] = []
    Sweep(tmp_path, report=events.append).run(plans("resident"))
    assert starts(events) == ["resident"]


def test_a_reference_that_shared_its_device_judges_and_is_measured_again_for_its_speed(
    tmp_path: Path, in_process: None
) -> None:
    Sweep(tmp_path).run(plans("l2l"))
    (path,) = tmp_path.glob("log_resident*.json")
    shared = dataclasses.replace(Record.read(path), is_timed=False)
    shared.write(path)
    assert shared.samples_per_second is None and shared.losses
    events: list[dict] = []
    Sweep(tmp_path, report=events.append).run(plans("stronghold"))
    assert starts(events) == ["stronghold"]
    (again,) = Sweep(tmp_path, report=events.append).run(plans("resident"))
    assert starts(events) == ["stronghold", "resident"] and again.is_timed


def test_what_is_asked_for_is_timed_and_references_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []

    def launch(job: Job, *arguments, is_timed: bool, **others) -> Path:
        launched.append((job.method, is_timed))
        return forks.launch(job, *arguments)

    monkeypatch.setattr("harness.jobs.sweep.launch", launch)
    Sweep(Path(tempfile.mkdtemp(dir=tmp_path))).run(plans("l2l"))
    Sweep(Path(tempfile.mkdtemp(dir=tmp_path))).run(plans("l2l", "resident"))
    assert launched == [("l2l", True), ("resident", False), ("l2l", True), ("resident", True)]


def test_what_is_asked_for_is_timed_although_its_code_changed_since_the_call_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[str, bool]] = []

    def launch(job: Job, *arguments, is_timed: bool, **others) -> Path:
        launched.append((job.method, is_timed))
        return records.launch(job, *arguments)

    monkeypatch.setattr("harness.jobs.sweep.launch", launch)
    monkeypatch.setattr(Store, "key", lambda self, job: f"{job.method} {bool(launched)}")
    Sweep(tmp_path).run(plans("resident", "l2l"))
    assert launched[:2] == [("resident", True), ("l2l", True)]


def test_rerun_measures_again_but_the_reference_only_once(tmp_path: Path, in_process: None) -> None:
    Sweep(tmp_path).run(plans("l2l"))
    events: list[dict] = []
    Sweep(tmp_path, report=events.append, rerun=True).run(plans("l2l", "stronghold"))
    assert starts(events) == ["l2l", "resident", "stronghold"]


def test_a_record_left_unjudged_by_a_crash_is_judged_without_a_run(tmp_path: Path, in_process: None) -> None:
    from harness.core.record import Gate

    Sweep(tmp_path).run(plans("l2l"))
    for path, record in read_all(tmp_path)[0].items():
        dataclasses.replace(record, gate=Gate()).write(path)
    events: list[dict] = []
    records = Sweep(tmp_path, report=events.append).run(plans("l2l"))
    assert starts(events) == [] and records[0].gate.verdict == "exact"


def test_a_size_that_cannot_fit_is_a_recorded_result(tmp_path: Path) -> None:
    records = Sweep(tmp_path).run(plans("resident", num_layers=2**20))
    assert records[0].status == "does-not-fit" and "the largest that should fit has -l " in records[0].reason
    assert [record.status for record in read_all(tmp_path)[0].values()] == ["does-not-fit"]


def test_what_was_refused_is_run_once_there_is_room(tmp_path: Path, in_process: None) -> None:
    Sweep(tmp_path).run(plans("resident"))
    (path, record), *_ = read_all(tmp_path)[0].items()
    dataclasses.replace(record, status="does-not-fit", phase="plan").write(path)
    assert Sweep(tmp_path).run(plans("resident"))[0].status == "ok"


def test_another_corpus_under_the_same_name_is_another_job(tmp_path: Path) -> None:
    corpus = tmp_path / "text.bin"
    keys = set()
    for contents in (b"ab", b"abcd"):
        corpus.write_bytes(contents)
        keys.add(
            Sweep(tmp_path).key(Job("resident", dataclasses.replace(TINY, corpus=str(tmp_path / "text"))))
        )
    assert len(keys) == 2


@pytest.mark.parametrize("kind", ["bin", "idx"])
def test_a_corpus_rewritten_with_its_size_and_times_kept_is_another_job(tmp_path: Path, kind: str) -> None:
    job, keys = Job("resident", dataclasses.replace(TINY, corpus=str(tmp_path / "text"))), []
    for ending in ("bin", "idx"):
        (tmp_path / f"text.{ending}").write_bytes(bytes(2**21))
    path = tmp_path / f"text.{kind}"
    times = path.stat()
    for contents in (bytes(2**21), bytes(2**20) + b"\1" * 2**20):
        path.write_bytes(contents)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        keys.append(Sweep(tmp_path).key(job))
    assert keys[0] != keys[1]


def test_one_token_that_a_job_reads_makes_it_another_job(tmp_path: Path) -> None:
    """In a corpus of 8 MB, of which an eighth lies in the blocks that are hashed."""
    from harness.core.data import _uniform

    job, num_tokens = Job("resident", dataclasses.replace(TINY, corpus=str(tmp_path / "text"))), 4_000_000
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, num_tokens, 0, 0, 1)
    (tmp_path / "text.idx").write_bytes(index)
    (tmp_path / "text.bin").write_bytes(bytes(2 * num_tokens))
    keys = [Sweep(tmp_path).key(job)]
    for number in range(0, 40, 10):  # of the 40 samples
        place = int(_uniform(TINY.seed, number, 1)[0] * (num_tokens - TINY.seq_len))
        with open(tmp_path / "text.bin", "r+b") as file:
            file.seek(2 * place)
            file.write(b"\1")
        keys.append(Sweep(tmp_path).key(job))
    assert len(set(keys)) == 5


def test_a_copied_corpus_is_the_same_job(tmp_path: Path) -> None:
    keys = set()
    for time in (1, 2):
        (tmp_path / "text.bin").write_bytes(b"abcd")
        os.utime(tmp_path / "text.bin", ns=(time, time))
        keys.add(
            Sweep(tmp_path).key(Job("resident", dataclasses.replace(TINY, corpus=str(tmp_path / "text"))))
        )
    assert len(keys) == 1


def test_the_named_largest_depth_fits_and_the_next_does_not() -> None:
    _, _, text = resolve(Job("stronghold", Workload(num_layers=2**20)))
    assert text is not None
    largest = int(text.rpartition("-l ")[2])
    assert resolve(Job("stronghold", Workload(num_layers=largest)))[2] is None
    assert resolve(Job("stronghold", Workload(num_layers=largest + 1)))[2] is not None


def test_a_placement_of_so_many_layers_fits_no_other_depth() -> None:
    for budget, depth in ((Budget(), "3"), (Budget(device_bytes=1), "0")):
        job = Job("stronghold", dataclasses.replace(TINY, num_layers=3), {"placement": "R1W2"}, budget)
        assert str(most_layers(job, budget)) == depth


@pytest.mark.parametrize("placement", ["R40", "R20W20"])
def test_a_placement_that_does_not_fit_is_what_to_leave_out_where_others_do(placement: str) -> None:
    workload = Workload(num_layers=40, hidden_size=128, seq_len=64, vocab_size=512)
    job = Job("stronghold", workload, {"placement": placement}, Budget(16 * 2**20, 64 * 2**20))
    advice = f"the largest that should fit without --placement {placement} has -l "
    _, separator, rest = (resolve(job)[2] or "").partition(advice)
    assert separator
    depth = int(rest.partition(",")[0])
    fits = [
        resolve(dataclasses.replace(job, workload=workload.at_depth(n), options={}))[2]
        for n in (depth, depth + 1)
    ]
    assert fits[0] is None and fits[1] is not None


@pytest.mark.heavy
def test_where_the_reference_does_not_fit_a_twin_is_checked(tmp_path: Path, forked: None) -> None:
    workload = dataclasses.replace(TINY, num_layers=12)
    needed = resolve(Job("resident", dataclasses.replace(TINY, num_layers=4)))[1].device_bytes
    job = Job(
        "stronghold", workload, {"window_size": 2}, Budget(device_bytes=needed + 1000), steps=4, warmup=1
    )
    record = Sweep(tmp_path).run([resolve(job)])[0]
    assert (record.gate.verdict, record.gate.evidence["twin_layers"]) == ("twin", 4)


@pytest.mark.parametrize("change", [{"learning_rate": 1e-3}, {"batch_size": 1}, {"hidden_size": 64}])
def test_two_references_of_one_call_do_not_print_alike(change: dict) -> None:
    first, second = jobs("resident") + jobs("resident", **change)
    lines: list[str] = []
    for job in (first, second):
        _Lines(lines.append).report({"event": "start", "job": job, "plan": Plan({}), "role": "reference"})
    titles = [line.partition(":")[0] for line in lines]
    assert (
        titles[0]
        == "(reference) resident, 2 layers x 32, batch 2 x 16 tokens, learning rate 4.69e-08 to 1.87e-07 (peak 0.00015)"
        != titles[1]
    )


def test_several_jobs_end_in_a_table_with_a_column_for_what_differs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = [
        records.record(Job("l2l", Workload(num_layers=2))),
        records.record(Job("stronghold", Workload(num_layers=4), {"window_size": 2, "clipping": "deferred"})),
        records.record(
            Job("stronghold", Workload(num_layers=4), {"window_size": 4, "clipping": "deferred"}), 2.0
        ),
        records.record(Job("stronghold", Workload(num_layers=8)), status="oom-host"),
    ]
    print_results(ended)
    head, _, *lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert head == ["method", "layers", "window_size", "samples/s", "device", "host", "result"]
    assert lines == [
        ["l2l", "2", "-", "4", "-", "-", "gate", "exact"],
        ["stronghold", "4", "2", "4", "-", "-", "gate", "exact"],
        ["stronghold", "4", "4", "2", "-", "-", "gate", "exact"],
        ["stronghold", "8", "-", "-", "-", "-", "oom-host"],
    ]


@pytest.mark.parametrize(("total", "times"), [(1, 2), (3, 1)])
def test_options_are_told_once_for_each_of_several_jobs(total: int, times: int) -> None:
    lines: list[str] = []
    report, job = (
        _Lines(lines.append).report,
        Job("stronghold", Workload(num_layers=2), {"placement": "R1W1"}),
    )
    report({"event": "start", "job": job, "plan": Plan({}), "index": 1, "total": total})
    report({"event": "end", "path": "log.json", "record": records.record(job)})
    assert sum("R1W1" in line for line in lines) == times


def test_the_closing_line_names_parameters_speed_peaks_and_verdict(tmp_path: Path) -> None:
    line = job_result_line(Sweep(tmp_path).run(plans("l2l"))[0])
    for part in ("l2l", "0.0291 M parameters", "samples/s", "host peak", "gate passed (exact)"):
        assert part in line


@pytest.mark.parametrize(
    ("retries", "warning"), [(0, ""), (1, "emptied its cache once"), (7, "emptied its cache 7 times")]
)
def test_a_run_whose_allocator_had_to_retry_says_so_beside_its_speed(retries: int, warning: str) -> None:
    record = records.record(dataclasses.replace(jobs("l2l")[0], steps=6), num_alloc_retries=retries)
    speed = job_result_line(record).split("samples/s")[1].split(", host peak")[0]
    small_print = record_row(Entry(1, Path("log.json"), record))["samples/s"].more
    assert (
        (speed, small_print) == (f" (the allocator {warning})", f"the allocator {warning}")
        if warning
        else ("", "")
    )


@pytest.mark.parametrize(
    ("steps", "warmup", "warning"),
    [
        (3, 2, " (1 step timed after 2 of warm-up, too few; try --steps 10)"),
        (5, 2, " (3 steps timed after 2 of warm-up, too few; try --steps 7)"),
        (6, 5, " (1 step timed after 5 of warm-up, too few; try --steps 10)"),
        (9, 5, " (4 steps timed after 5 of warm-up, too few; try --steps 10)"),
        (10, 5, ""),
    ],
)
def test_a_speed_that_rests_on_few_steps_says_so(steps: int, warmup: int, warning: str) -> None:
    job = dataclasses.replace(jobs("l2l")[0], steps=steps, warmup=warmup)
    assert job_result_line(records.record(job)).split("samples/s")[1].split(", host peak")[0] == warning


def test_a_refused_job_is_advised_about_what_was_asked_for() -> None:
    """A resolved job names a placement that nobody gave, and a window that was."""
    job = Job("stronghold", Workload(num_layers=40), {"window_size": 2}, Budget(host_bytes=24 * GIB))
    resolved, _, shortfall = resolve(job, room=job.budget.room)
    again = resolve(resolved, room=job.budget.room)[2]
    assert (
        "placement" in resolved.options
        and again == shortfall
        and "the largest that should fit has -l 2" in again
    )
    placed = dataclasses.replace(job, options={"placement": "R1W39"})
    assert "without --placement R1W39" in str(resolve(placed, room=job.budget.room)[2])
