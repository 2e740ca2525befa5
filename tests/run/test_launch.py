"""A worker and its parent: what is on disk afterwards, whoever ends first."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.base import executed_code, fork_server, scratch
from harness.base.checkout import ROOT
from harness.base.child_process import ask
from harness.base.executed_code import Executed
from harness.core import method
from harness.core.failures import End
from harness.core.identity import CodeIdentity, code_facts
from harness.core.job import Budget, Job, Workload
from harness.core.record import Record, read_all
from harness.jobs.sweep import Sweep
from harness.plan import run_time
from harness.plan.fit import resolve
from harness.run.launch import (
    SAMPLE_SECONDS,
    Deadline,
    Events,
    Start,
    completed_record,
    environment,
    launch,
    unless_changed,
)
from harness.run.memory_peaks import MemoryPeaks
from tests.support import cli, tiny
from tests.support.tiny import ENDLESS, TINY, write_compiling, write_ending, write_endless
from tests.support.until import until

TINY_JOB = Job("resident", TINY)
KILLS = int(os.environ.get("KILLS", "5"))  # 50 and more where there is time


def test_a_run_leaves_a_record_and_a_log_of_the_same_stem(tmp_path: Path) -> None:
    path = launch(Job("resident", TINY, steps=10), lambda: "key", tmp_path)
    record = Record.read(path)
    log = Path(str(path).removesuffix(".json") + ".txt").read_text()
    assert record.status == "ok" and len(record.losses) == 10
    assert record.software["source"] == method.source_hash("resident") and "unlisted" not in record.software
    assert " iteration       10/      10 |" in log and log.endswith(
        "ended as ok at done, after 10 of 10 steps\n"
    )
    assert record.peaks["host_anonymous"] > 50 * 2**20 and record.phase_seconds["import"] > 0


COMPILER = """
compiler = subprocess.Popen(["sleep", "infinity"])
Path("{folder}/unfinished").write_text(str(compiler.pid))
Path("{folder}/unfinished").rename("{folder}/pid")
compiler.wait()
"""
KILLED_BESIDE_A_CHILD = """
if not os.fork():
    signal.pause()
os.kill(os.getpid(), signal.SIGKILL)
"""
# For a method's file: waits until its run's memory has been sampled, as often as release_after() says.
WAITING = """
import os, time

def wait_for_samples():
    open("FOLDER/waiting", "w").close()
    while not os.path.exists("FOLDER/sampled"):
        time.sleep(0.01)

def go_on():
    os.unlink("FOLDER/waiting")
    os.unlink("FOLDER/sampled")

"""
HAS_CHILDREN = """
import subprocess
import sys
from dataclasses import dataclass
from harness.core.method import Method, Step, Trained
from harness.core.job import Plan

HOLD = "held = b'1' * 400_000_000; print(flush=True); input()"
WAITING

@dataclass(frozen=True)
class HasChildren(Method):
    brief: bool = True

    def plan(self, workload, budget):
        return Plan(device={"weights": 16 * workload.num_params})

    def train(self, workload, batches, device):
        import torch

        held = torch.ones(100_000_000)  # 400 MB
        for inputs, targets in batches:
            if self.brief:  # each is seen once before it runs its program
                for _ in range(5):
                    child = subprocess.Popen(["true"], preexec_fn=wait_for_samples)
                    go_on()
                    child.wait()
            else:
                child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                child.stdout.readline()
                wait_for_samples()
                go_on()
                child.communicate(b"end")
            yield Step(torch.tensor(1.0))
        return Trained([])
"""
COLLECTS_LATE = """
from dataclasses import dataclass
from harness.core.method import Method, Step, Trained
from harness.core.job import Plan

WAITING

@dataclass(frozen=True)
class CollectsLate(Method):
    def plan(self, workload, budget):
        return Plan(device={"weights": 16 * workload.num_params})

    def train(self, workload, batches, device):
        import torch

        for inputs, targets in batches:
            yield Step(torch.tensor(1.0))
        collected = torch.ones(100_000_000)  # 400 MB
        wait_for_samples()
        go_on()
        return Trained([])
"""
SHARES_WITH_A_CHILD = """
if loss == 1.5:
    loss, shared = 1.0, mmap.mmap(-1, 300 * 2**20)
    for _ in range(300):
        shared.write(bytes(2**20))
    ready, is_ready = os.pipe()
    child = os.fork()
    if not child:
        shared.seek(0)
        kept = shared.read()
        os.write(is_ready, b"1")
        signal.pause()
    os.read(ready, 1)
    WAITING
    wait_for_samples()
    go_on()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def waiting(text: str, folder: Path) -> str:
    """A method's text that can wait for samples of its memory."""
    return re.sub(r"(?m)^( *)WAITING$", lambda line: textwrap.indent(WAITING, line[1]), text).replace(
        "FOLDER", str(folder)
    )


def release_after(
    num_turns: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    watching: type = MemoryPeaks,
    name: str = "sample",
) -> None:
    """Let a method go on that has waited for so many calls of a function of its watch, by default samples, in each of
    which its processes are listed anew. None is made while the method does not wait: a child that is seen on its way to
    waiting would be seen once too often."""
    function, num_seen, waits, sampled = getattr(watching, name), 0, folder / "waiting", folder / "sampled"

    def counted(*arguments: Any) -> None:
        nonlocal num_seen
        if not waits.exists():
            return
        function(*arguments)
        num_seen += 1
        if num_seen == num_turns:
            sampled.touch()
            until(lambda: not sampled.exists())  # the method may wait again by then
            num_seen = 0

    monkeypatch.setattr(watching, name, counted)
    monkeypatch.setattr("harness.run.memory_peaks.LIST_SECONDS", 0.0)


LOADS_A_NAME = """
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from harness.core.method import Method, Step, Trained
from harness.core.job import Plan


@dataclass(frozen=True)
class LoadsAName(Method):
    name: str = "_part"

    def plan(self, workload, budget):
        return Plan(device={"weights": 16 * workload.num_params})

    def train(self, workload, batches, device):
        import torch

        spec = util.spec_from_file_location("part", Path(__file__).with_name(f"{self.name}.py"))
        spec.loader.exec_module(util.module_from_spec(spec))
        for inputs, targets in batches:
            yield Step(torch.tensor(1.0))
        return Trained([])
"""


def test_code_that_a_run_executes_beyond_its_identity_is_on_record(tmp_path: Path) -> None:
    (tmp_path / "loads_a_name.py").write_text(LOADS_A_NAME)
    (tmp_path / "_part.py").write_text("A = 1")
    path = launch(Job("loads-a-name", TINY, steps=2, warmup=1), lambda: "key", tmp_path, (tmp_path,))
    assert Record.read(path).software["unlisted"] == ["_part.py"]


def test_a_run_that_begins_while_another_ends_leaves_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = executed_code.read_notes

    def beside_another(notes: Path) -> list[executed_code.Executed]:
        scratch.remove_stale_folders()
        return read(notes)

    monkeypatch.setattr(executed_code, "read_notes", beside_another)
    assert "unlisted" not in Record.read(launch(TINY_JOB, lambda: "key", tmp_path)).software


def test_the_key_is_taken_when_it_is_the_runs_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code may change while a call waits for the device."""
    code = ["old"]

    @contextlib.contextmanager
    def turn(*waiting: object) -> Iterator[None]:
        code[0] = "new"
        yield

    monkeypatch.setattr("harness.run.launch.turn", turn)
    assert launch(TINY_JOB, lambda: code[0], tmp_path, recorded=Path) == Path("new")


@pytest.mark.parametrize(("after", "changed"), [("key", None), ("other", ["its key, key to other"])])
def test_a_key_that_changed_while_the_run_went_on_is_on_record(after: str, changed: list[str] | None) -> None:
    record = unless_changed(Record(TINY_JOB, "key", "ok"), lambda: after)
    assert record.software.get("changed") == changed


@pytest.mark.parametrize(
    ("text", "changed"),
    [("A = 1", None), ("A = 1  # one", None), ("A = 2", ["its code"]), ("", ["its code"])],
)
def test_source_that_is_another_after_the_run_is_on_record(
    tmp_path: Path, text: str, changed: list[str] | None
) -> None:
    file = tmp_path.resolve() / "own.py"
    file.write_text("A = 1")
    executed = [Executed(str(file), file.stat().st_mtime_ns)]
    before = CodeIdentity.of(file)
    file.write_text(text)
    assert code_facts(before, executed, lambda: CodeIdentity.of(file)).get("changed") == changed


def test_a_run_whose_notes_are_gone_executed_what_nobody_knows(tmp_path: Path) -> None:
    file = tmp_path.resolve() / "own.py"
    file.write_text("A = 1")
    assert code_facts(CodeIdentity.of(file), [], lambda: CodeIdentity.of(file))["unlisted"] == [
        "code that it did not note"
    ]


@pytest.mark.heavy
def test_what_a_method_collects_after_its_last_step_is_not_in_its_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release_after(3, tmp_path, monkeypatch, Deadline, "check")
    (tmp_path / "collects_late.py").write_text(waiting(COLLECTS_LATE, tmp_path))
    path = launch(Job("collects-late", TINY, steps=2, warmup=1), lambda: "key", tmp_path, (tmp_path,))
    assert Record.read(path).host_peak_bytes < 400e6


@pytest.mark.heavy
@pytest.mark.parametrize(("brief", "least", "most"), [(True, 400e6, 900e6), (False, 900e6, 1300e6)])
def test_a_child_counts_unless_it_is_about_to_run_a_program(
    tmp_path: Path, brief: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's 400 MB and as much of a child's; the rest of a worker has 230 MB."""
    release_after(1 if brief else 4, tmp_path, monkeypatch)
    (tmp_path / "has_children.py").write_text(waiting(HAS_CHILDREN, tmp_path))
    path = launch(
        Job("has-children", TINY, {"brief": brief}, steps=2, warmup=1), lambda: "key", tmp_path, (tmp_path,)
    )
    assert least < Record.read(path).host_peak_bytes < most


@pytest.mark.heavy
def test_memory_that_a_worker_and_its_child_share_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 MiB that both map, and a copy of the child's own."""
    release_after(4, tmp_path, monkeypatch)
    methods = write_ending(tmp_path, waiting(SHARES_WITH_A_CHILD, tmp_path))
    record = Record.read(launch(Job("ending", TINY, steps=2, warmup=1), lambda: "key", tmp_path, (methods,)))
    assert record.status == "ok" and record.peaks["host_anonymous"] > 500 * 2**20, "its child was not seen"
    assert 300 * 2**20 <= record.peaks["host_shared"] < 450 * 2**20


@pytest.mark.heavy
def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    methods = write_ending(tmp_path, ENDLESS)
    code = f"""
from pathlib import Path
from harness.run.launch import launch
from harness.core.job import *
launch(Job("ending", {TINY!r}, steps=12), lambda: "key", Path({str(tmp_path)!r}), (Path({str(methods)!r}),))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    cli.wait_for_steps(tmp_path)
    others = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    assert len(others) == 2
    psutil.wait_procs(others)
    (record,) = read_all(tmp_path)[0].values()
    assert record.status == "interrupted" and record.losses


def test_a_killed_worker_is_noticed_by_its_end_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No limit of seconds ends the run, and its pipe stays open: a child holds it."""
    for limit in ("deadline_seconds", "silence_seconds"):
        monkeypatch.setattr(run_time, limit, lambda job: math.inf)
    methods = write_ending(tmp_path, KILLED_BESIDE_A_CHILD)
    record = Record.read(launch(Job("ending", TINY, steps=2, warmup=1), lambda: "key", tmp_path, (methods,)))
    assert record.status == "killed" and "killed by SIGKILL from outside at step 1" in record.reason


def test_a_result_that_the_parent_did_not_complete_is_no_result(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from harness.run import launch
from harness.core.job import *
launch.completed_record = lambda record, *facts: os.kill(os.getpid(), signal.SIGKILL)
launch.launch(Job("resident", {TINY!r}, steps=2, warmup=1), lambda: "key", Path({str(tmp_path)!r}))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGKILL
    assert read_all(tmp_path) == ({}, [])


def test_a_clock_set_forward_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, ahead = time.time, {"seconds": 0.0}
    monkeypatch.setattr(time, "time", lambda: now() + ahead["seconds"])
    job = Job("resident", TINY, budget=Budget(seconds=3600), steps=2, warmup=1)
    path = launch(job, lambda: "key", tmp_path, report=lambda event: ahead.update(seconds=7200.0))
    assert Record.read(path).status == "ok"


def test_an_end_by_a_limit_of_the_shell_is_tried_again(tmp_path: Path, own_server: None) -> None:
    text = waiting(COLLECTS_LATE, tmp_path).replace("torch.ones(100_000_000)", "bytearray(2**36)")
    (tmp_path / "collects_late.py").write_text(text)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**35, most))
    try:
        record = Record.read(
            launch(Job("collects-late", TINY, steps=2, warmup=1), lambda: "key", tmp_path, (tmp_path,))
        )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    assert (record.status, record.evidence["limit_of"], record.is_lasting) == ("oom-host", "ulimit -v", False)


def test_a_run_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("hydra", TINY, {"num_models": 2, "num_devices": 2}, steps=2, warmup=1)
    with tempfile.TemporaryDirectory() as folder:  # of a short name, for sockets lie in it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        assert Record.read(launch(resolve(job)[0], lambda: "key", tmp_path)).status == "ok"
        assert not os.listdir(folder)


def test_a_folder_of_a_run_whose_processes_were_killed_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (used, held), (left, alone) = scratch.make_folder(), scratch.make_folder()
    (left / "file").touch()
    os.close(alone)
    new, handle = scratch.make_folder()
    assert {*tmp_path.iterdir()} == {used, new}
    os.close(handle)
    os.close(held)


def test_a_folder_of_a_users_own_stays_whatever_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (results := tmp_path / f"{scratch.NAME_PREFIX}results").mkdir()
    (results / "log_l2l.json").write_text("a record")
    scratch.remove_stale_folders()
    assert (results / "log_l2l.json").read_text() == "a record"


def test_a_run_killed_before_it_locked_its_folder_leaves_nothing_and_a_living_one_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flock, num_calls = fcntl.flock, itertools.count()

    def meanwhile(handle: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            if not (number := next(num_calls)):
                os.close(handle)
                raise SystemExit  # the first run is killed here
            if (
                number == 1
            ):  # the second one's folder is not locked yet when another run looks for folders that are left
                scratch.remove_stale_folders()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", meanwhile)
    with pytest.raises(SystemExit):
        scratch.make_folder()
    folder, handle = scratch.make_folder()
    assert {*tmp_path.iterdir()} == {folder}
    os.close(handle)


def test_a_run_that_cannot_be_started_leaves_nothing_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(fork_server, "_server", None)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        launch(Job("resident", TINY), lambda: "key", tmp_path)
    assert not os.listdir(scratch)


@pytest.mark.parametrize(
    ("stopped", "status"), [("interrupt", "interrupted"), ("deadline", "timeout"), ("", "crash")]
)
def test_whatever_an_import_raises_that_is_broken_off_is_no_crash(stopped: str, status: str) -> None:
    record = Record(TINY_JOB, "key", "crash", "import", "ImportError: cannot import name")
    start, end = Start.now(TINY_JOB, "key", (), None), End("import", stopped=stopped)
    peaks = MemoryPeaks(os.getpid(), TINY_JOB, None)
    assert completed_record(record, start, end, peaks, []).status == status


def test_an_event_whose_report_fails_costs_no_other() -> None:
    def report(event: dict) -> None:
        if event["event"] == "phase":
            raise BrokenPipeError

    events = Events("start", report)
    step = json.dumps({"event": "step", "step": 1, "loss": 2.0, "seconds": 3.0})
    with pytest.raises(BrokenPipeError):
        events.feed(b'{"event": "phase", "phase": "build"}\n' + step.encode() + b"\n")
    events.feed(b"")
    assert events.losses == [2.0]


def test_a_call_that_is_ended_while_something_is_compiled_leaves_no_compiler(tmp_path: Path) -> None:
    folder = write_compiling(tmp_path, COMPILER.format(folder=tmp_path))
    command = ["-m", "compiling", *tiny.WORDS[2:], "--methods", str(folder), "--results", str(tmp_path)]
    call = cli.start(*command, stderr=subprocess.DEVNULL)
    compiler = until(lambda: (file := tmp_path / "pid").exists() and psutil.Process(int(file.read_text())))
    call.send_signal(signal.SIGTERM)
    assert call.wait() == 130
    compiler.wait()


def test_an_interrupted_run_ends_in_130_and_the_same_call_goes_on(tmp_path: Path) -> None:
    command = [*tiny.WORDS, "--results", tmp_path]
    run = cli.start(*command, *write_endless(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        cli.wait_for_steps(tmp_path)
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 130 and len(errors.strip().splitlines()) == 1, errors
    assert [record.status for record in read_all(tmp_path)[0].values()] == ["interrupted"]
    assert cli.run(*command, "--steps", 3).returncode == 0


@pytest.mark.shows("records survive a kill")
def test_kills_at_random_moments_leave_only_whole_records(tmp_path: Path) -> None:
    """At a random event of the run, and a random part of a step later."""
    job, generator, events = resolve(Job("resident", TINY, steps=40))[0], random.Random(7), list[str]()

    def report(event: dict[str, Any]) -> None:
        events.append(event["event"])
        if len(events) == moment:
            time.sleep(generator.uniform(0, SAMPLE_SECONDS))
            kill_workers()

    moment = 0
    Sweep(tmp_path, report=report).run([resolve(job)])
    num_events = len(events)
    for _ in range(KILLS):
        moment = generator.randrange(2, num_events)  # before the first there is no worker
        events.clear()
        Sweep(tmp_path, report=report, rerun=True).run([resolve(job)])
    records, complaints = read_all(tmp_path)
    statuses = {record.status for record in records.values()}
    assert complaints == [] and len(records) == KILLS + 1
    assert "killed" in statuses and statuses <= {"ok", "killed"}
    fresh = resolve(Job("resident", TINY, steps=41))[0]
    assert Sweep(tmp_path).run([resolve(fresh)])[0].gate.passed


def kill_workers() -> None:
    """Those that are forked, and not who forks them."""
    this = psutil.Process()
    for process in {*this.children(recursive=True)} - {*this.children()}:
        if not process.children():
            process.kill()


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [
        ("cuda", "", "expandable_segments:True"),
        ("cuda", "max_split_size_mb:64", "max_split_size_mb:64"),
        ("cpu", "", None),
    ],
)
def test_the_allocator_of_a_gpu_grows_its_segments_unless_it_is_set_otherwise(
    monkeypatch: pytest.MonkeyPatch, device: str, setting: str, expected: str | None
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    if setting:
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    assert environment(Job("resident", TINY, device=device)).get("PYTORCH_ALLOC_CONF") == expected


@pytest.mark.parametrize(("setting", "expected"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_the_first_gpu_of_a_job_and_of_a_calibration_is_nvmls_first_unless_the_caller_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if setting:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", setting)
    (tmp_path / "tells_order.py").write_text(
        'import json, os; print(json.dumps(os.environ["CUDA_DEVICE_ORDER"]))'
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    values = environment(Job("resident", TINY, device="cuda"))["CUDA_DEVICE_ORDER"], ask("tells_order", None)
    assert values == (expected, expected)


def test_small_layers_are_computed_by_one_thread_in_any_batch_unless_the_caller_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    small = Workload(num_layers=4, hidden_size=128, seq_len=64)  # 64 x 24 x 128**2 FLOPs of a sample: 25 M
    values = [
        environment(Job("resident", replace(small, batch_size=batch))).get("OMP_NUM_THREADS")
        for batch in (2, 64)
    ]
    assert values == ["1", "1"]
    assert "OMP_NUM_THREADS" not in environment(Job("resident", Workload()))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert environment(Job("resident", small))["OMP_NUM_THREADS"] == "2"
