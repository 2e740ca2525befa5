"""Ends of a worker, each provoked for real, and what is on disk afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from harness import worker
from harness.launch import launch
from harness.method import ROOT
from harness.record import Record, read_all
from harness.spec import Budget, Job, Workload
from harness.sweep import Sweep, resolve

TINY = Workload(num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)

METHOD = """
from dataclasses import dataclass
from harness.method import Step, Trained, Unavailable
from harness.spec import Plan

@dataclass(frozen=True)
class Ending:
    def plan(self, workload, budget):
        return Plan(device={{"weights": 1}})

    def train(self, workload, batches, device):
        import os, signal, sys, time, torch
        for inputs, targets in batches:
            yield Step(torch.tensor(1.5))
            {line}
        return Trained([])
"""


def ended(folder: Path, line: str, **budget) -> Record:
    """The record of a method that does `line` after its first step."""
    (folder / "methods").mkdir()
    (folder / "methods" / "ending.py").write_text(METHOD.format(line=line))
    job = Job("ending", TINY, budget=Budget(**budget), steps=3, warmup=0)
    return Record.read(launch(job, "key", folder, (folder / "methods",)))


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crash", "SIGSEGV"),
        ("os._exit(0)", "crash", "exit code 0 and no record"),
        ("raise RuntimeError('bad\\n luck')", "crash", "RuntimeError: bad luck"),
        ("raise Unavailable('needs an engine: pip install it')", "unavailable", "pip install it"),
        ("import no_such_engine", "unavailable", "no_such_engine"),
        ("torch.empty(2**50)", "oom-host", "can't allocate memory"),
        ("bytearray(2**50)", "oom-host", "MemoryError"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", "interrupted", "step 1"),
    ],
)
def test_each_end_has_its_name(tmp_path: Path, line: str, status: str, words: str) -> None:
    record = ended(tmp_path, line)
    assert (record.status, record.losses) == (status, [1.5])
    assert words in record.reason


def test_a_job_over_its_time_ends_as_timeout(tmp_path: Path) -> None:
    started = time.time()
    record = ended(tmp_path, "time.sleep(600)", seconds=5.0)
    assert record.status == "timeout" and "5 seconds" in record.reason
    assert time.time() - started < 60


def test_a_swallowed_memory_error_is_found_in_the_chain_of_causes() -> None:
    try:
        try:
            torch.empty(2**50)
        except RuntimeError as error:
            raise RuntimeError("can not create optimizer") from error
    except RuntimeError as error:
        assert worker.classify(error, "cpu")[0] == "oom-host"


def test_a_run_leaves_a_record_and_a_log_of_the_same_stem(tmp_path: Path) -> None:
    path = launch(Job("resident", TINY, steps=10), "key", tmp_path)
    record = Record.read(path)
    log = Path(str(path).removesuffix(".json") + ".txt").read_text()
    assert record.status == "ok" and len(record.losses) == 10
    assert " iteration       10/      10 |" in log
    assert record.peaks["host_anonymous"] > 50 * 2**20 and record.phase_seconds["import"] > 0


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from harness.launch import launch
from harness.spec import *
launch(Job("resident", {TINY!r}, steps=100000), "key", Path({str(tmp_path)!r}))
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    worker_process = wait_for(lambda: next(iter(psutil.Process(parent.pid).children()), None))
    wait_for(lambda: any("iteration" in log.read_text() for log in tmp_path.glob("*.txt")))
    parent.kill()
    parent.wait()
    worker_process.wait(30)
    (record,) = read_all(tmp_path)[0].values()
    assert record.status == "interrupted" and record.losses


def test_an_interrupted_run_ends_in_130_and_the_same_call_goes_on(tmp_path: Path) -> None:
    words = "-m resident -l 2 -h 32 -b 2 --heads 2 --seq 16 --vocab 97".split()
    command = [sys.executable, "-m", "harness", *words, "--steps", "30000", "--results", str(tmp_path)]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any("iteration" in log.read_text() for log in tmp_path.glob("*.txt")))
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130 and len(errors.strip().splitlines()) == 1, errors
    assert [record.status for record in read_all(tmp_path)[0].values()] == ["interrupted"]
    again = subprocess.run([*command[:-4], "--steps", "3", "--results", str(tmp_path)], cwd=ROOT)
    assert again.returncode == 0


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_kills_at_random_moments_leave_only_whole_records(tmp_path: Path) -> None:
    job = resolve(Job("resident", TINY, steps=40))[0]
    began = time.time()
    Sweep(tmp_path).run([job])
    length, generator = time.time() - began, random.Random(7)
    for _ in range(50):
        timer = threading.Timer(generator.uniform(0, length), kill_workers)
        timer.start()
        Sweep(tmp_path, rerun=True).run([job])
        timer.cancel()
        timer.join()
    records, complaints = read_all(tmp_path)
    statuses = [record.status for record in records.values()]
    assert complaints == [] and len(records) == 51
    assert set(statuses) == {"ok", "killed"} and statuses.count("killed") > 10
    fresh = resolve(Job("resident", TINY, steps=41))[0]
    assert Sweep(tmp_path).run([fresh])[0].gate.passed


def kill_workers() -> None:
    for process in psutil.Process(os.getpid()).children():
        if "harness.worker" in process.cmdline():
            process.kill()


def wait_for(condition, seconds: float = 60.0):
    """The first true value of the condition; fails after some seconds."""
    deadline = time.time() + seconds
    while time.time() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("waited in vain")
