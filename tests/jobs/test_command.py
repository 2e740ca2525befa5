"""What is said of a job that cannot fit, or takes long: needs, and calls that do work."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.plan_table import plan_row
from harness.core import method
from harness.core.job import GIB, Budget, Job, Plan, Workload
from harness.core.rates import Rates
from harness.core.record import read_all
from harness.devices import machine
from harness.gate.probe import Extent
from harness.jobs import progress
from harness.jobs.command import suggest_commands_of_job
from harness.plan import run_time
from harness.plan.fit import resolve, scale_down
from tests.support.cli import jobs_of, run

DEEP = (
    "-m stronghold -l 60 -h 64 -b 1 --heads 4 --seq 16 --vocab 128"
    " --device-memory 1MiB --host-memory 16MiB --steps 5"
)


def test_a_job_that_cannot_fit_is_a_result_with_calls_that_can(tmp_path: Path) -> None:
    done = run(*DEEP.split(), "--results", str(tmp_path))
    assert done.returncode == 4 and not done.stderr
    (record,) = read_all(tmp_path)[0].values()
    assert (record.status, record.phase) == ("does-not-fit", "plan") and "there is" in record.reason
    calls = [line.removeprefix("try ") for line in done.stdout.splitlines() if line.startswith("try ")]
    assert ["--disk" in call for call in calls] == [True, False]
    for call in calls:
        assert resolve(jobs_of(call)[0])[2] is None


def test_several_methods_none_of_which_can_fit_get_calls_for_all_of_them(tmp_path: Path) -> None:
    arguments = "-m resident,l2l,stronghold -l 200 --device-memory 8MiB --host-memory 64MiB -h 128 --seq 64 --vocab 512"
    done = run(*arguments.split(), "--results", str(tmp_path))
    calls = [line.removeprefix("try ") for line in done.stdout.splitlines() if line.startswith("try ")]
    assert calls and all(call.startswith("./run.sh -m resident,l2l,stronghold ") for call in calls)
    for call in calls:
        assert [resolve(job)[2] for job in jobs_of(call)] == [None] * 3


@pytest.mark.heavy
def test_the_calls_train(tmp_path: Path, compiled_sim: None, forked: None) -> None:
    for call, _ in suggest_commands_of_job(jobs_of(f"./run.sh {DEEP}")[0]):
        done = run(*shlex.split(call)[1:], "--results", tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [record.status for record in read_all(tmp_path)[0].values()].count("ok") >= 2


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_bytes", lambda: 24 * GIB)
    monkeypatch.setattr(machine, "devices", lambda: ["cpu", "sim"])
    machine.facts.cache_clear()


def test_the_largest_published_model_is_offered_scaled_on_disk_smaller_and_planned(
    small_machine: None,
) -> None:
    calls = dict(suggest_commands_of_job(jobs_of("./run.sh -m stronghold -l 100")[0]))
    scaled, disk, smaller, planned = calls
    assert scaled == "./run.sh -m stronghold -l 100 --scale fit" and "--disk" in disk
    assert " -l 100 --machine v100-vm" in planned and "hours" in calls[smaller]
    for call in (scaled, disk, smaller):
        assert resolve(jobs_of(call)[0])[2] is None
    deeper = replace(
        jobs_of(smaller)[0], workload=Workload(num_layers=jobs_of(smaller)[0].workload.num_layers + 1)
    )
    assert resolve(deeper)[2] is not None
    assert plan_row(jobs_of(planned)[0], (), exact=False)["fits"]


def test_scaling_keeps_layers_and_divides_widths_and_memories_alike() -> None:
    (job,) = jobs_of("./run.sh -m stronghold -l 100 --scale fit")
    load, full = job.workload, Workload(num_layers=100)
    factor = full.hidden_size // load.hidden_size
    assert (load.num_layers, load.num_heads, load.batch_size, job.device) == (100, 16, 4, "sim")
    assert (load.seq_len, load.vocab_size) == (1024 // factor, 50304 // factor)
    assert job.budget == Budget((31900 - 256) * 2**20 * 31 // 32 // factor**2, int(90.4 * GIB) // factor**2)
    # biases: by the factor
    assert load.num_params == pytest.approx(full.num_params / factor**2, rel=0.02 * factor)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_the_scaled_experiment_trains(tmp_path: Path, compiled_sim: None, forked: None) -> None:
    done = run(*"-m stronghold -l 100 --scale fit --steps 3 --warmup 1 --results".split(), str(tmp_path))
    assert done.returncode == 0 and "gate passed (exact)" in done.stdout.splitlines()[-1], (
        done.stdout + done.stderr
    )


def test_an_estimate_is_steps_times_arithmetic_beside_what_a_process_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "facts", lambda: {"cores": 2})
    job = Job("resident", Workload(num_layers=8))
    plan = Plan({"weights": 4 * 10**9})
    steps = 20 * job.workload.flops_per_step / (2 * 2e10)
    assert run_time.run_seconds(job, plan) == pytest.approx(4 + 2 + steps)
    known = Rates(device_flops_per_second=1e12)
    assert run_time.run_seconds(job, plan, known) == pytest.approx(
        6 + 20 * job.workload.flops_per_step / 1e12
    )
    assert [run_time.duration_text(seconds) for seconds in (40, 720, 19080)] == [
        "40 seconds",
        "12 minutes",
        "5.3 hours",
    ]


def test_a_probe_takes_as_many_trainings_of_4_layers_as_its_dtype_and_promises_ask_for() -> None:
    """Of a run of 104 s, 4 of them a process's start: 8 layers, 20 steps. A probe has 4 of them, 16 heads of 8 columns,
    64 tokens and 512 words: a tenth of this run pays for no more. By the method, by the reference and by it in another
    rounding, which mostly is enough in fp32; in half precision by all six."""
    load = Workload(num_layers=8, hidden_size=256, seq_len=64, vocab_size=512)
    small = Workload(num_layers=4, hidden_size=128, num_heads=16, seq_len=64, vocab_size=512)
    share = small.flops_per_step / load.flops_per_step
    for name, dtype, device, num_runs, num_models in (
        ("l2l", "fp32", "cpu", 2, 2),
        ("l2l", "bf16", "cpu", 2, 2),
        ("l2l", "fp32", "cuda", 3, 3),
        ("l2l", "bf16", "cuda", 6, 11),
        ("megatron-lm", "fp32", "cpu", 3, 3),
        ("megatron-lm", "bf16", "cpu", 6, 11),
        ("resident", "fp32", "cpu", 0, 0),
    ):
        job = Job(name, replace(load, dtype=dtype), device=device, steps=20)
        start = run_time.PROCESS_SECONDS[device]
        expected = num_runs * start + num_models * 100 * share
        assert run_time.probe_seconds(job, start + 100, method.load(name), Extent()) == pytest.approx(
            expected
        )


def events(seconds: float) -> list[dict[str, Any]]:
    job = Job("stronghold", Workload(num_layers=2))
    start = {"event": "start", "job": job, "plan": Plan({"weights": 1}), "index": 1, "total": 1}
    start |= {"foreseen_seconds": 2 * 20 * seconds, "has_reference": True}
    return [start, *({"event": "step", "step": step, "loss": 1.0, "seconds": seconds} for step in (1, 2))]


@pytest.mark.parametrize(
    ("seconds", "starts"),
    [
        (20.0, ["long: about 13 minutes", "[1/1]", "  about 13 minutes left"]),
        (3.0, ["[1/1]", "  about 2 minutes in all", "  about 2 minutes left"]),
        (0.1, ["[1/1]"]),
    ],
)
def test_a_long_run_says_so_first_and_the_rest_is_foretold_after_a_step(
    seconds: float, starts: list[str]
) -> None:
    lines: list[str] = []
    report = progress._Lines(lines.append).report
    for event in events(seconds):
        report(event)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=False))
    assert ("--scale fit" in lines[0]) is (seconds == 20.0)
    assert len(lines) == len(starts) + 1  # and the second step


def test_what_is_left_after_a_step_has_the_time_of_the_reference_and_of_the_probe() -> None:
    lines: list[str] = []
    report = progress._Lines(lines.append).report
    start, step, _ = events(3.0)
    for event in ({**start, "probe_runs": 2.0}, step):
        report(event)
    # 19 + 20 + 40 steps of 3 s
    assert lines[-1] == "  about 4 minutes left, its reference and its probe included"


def test_factors_divide_by_the_heads() -> None:
    odd = Workload(hidden_size=48, num_heads=3, seq_len=40, vocab_size=97)
    assert scale_down(odd, Budget(2**20), 4)[0] == replace(odd, hidden_size=12, seq_len=16, vocab_size=64)
