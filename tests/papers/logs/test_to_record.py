"""A log as a record: each dialect's numbers, names and windows, and how a run ended, by what the log tells."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.core.job import Job, Workload
from harness.core.log_lines import header_lines, interval_lines
from papers.logs.parse import NotALog, read_log
from papers.logs.to_record import to_record
from tests.support.logs import (
    PUBLISHED,
    SMALL_NAME,
    VARIANTS,
    deepspeed_lines,
    imported,
    megatron_lines,
    name_of,
    needs_published,
    one,
    own_lines,
    steps_of,
    write_log,
)


@pytest.mark.parametrize(
    "name",
    [
        "log_some-method_l-2_hs-64_bs-4_ws-4_2022-07-02.1656730240.txt",
        "log_some-method_l-2_h-64_bs-4_ws-4_2022-07-02.1656730240.txt",
    ],
)
def test_both_patterns_of_names_are_read(tmp_path: Path, name: str) -> None:
    record = one(tmp_path, name, megatron_lines(2, 64, [9.0, 8.0]))
    load = record.job.workload
    assert (record.job.method, load.num_layers, load.hidden_size, load.batch_size) == (
        "some-method",
        2,
        64,
        4,
    )
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
    record = one(
        tmp_path, name_of("m", 2, 64), megatron_lines(2, 64, [9.0], heads=8, dropout=0.1, data="/a/b/corpus")
    )
    load = record.job.workload
    assert (load.num_heads, load.dropout, load.corpus, load.dtype) == (8, 0.1, "corpus", "fp32")
    assert "/a/b" not in json.dumps(record.to_dict())  # a stranger's folders are nobody's business


def test_deepspeeds_speed_is_known_to_be_cumulative(tmp_path: Path) -> None:
    record = one(tmp_path, name_of("d", 2, 2048), deepspeed_lines(2, 2048, [9.0, 8.5, 8.25]))
    assert record.evidence["samples_per_second_is"].startswith("mean of all steps so far but the first two")
    assert record.losses == [9.0, 8.5, 8.25]
    assert record.peaks["device_reserved"] == 200 * 2**20
    assert record.evidence["doubts"] == [
        "its Tera Flops are 0.1 times what its parameters, tokens and times give"
    ]


@needs_published
@pytest.mark.parametrize("name", ["zero-offload_l-48", "zero-infinity_l-32"])
def test_cumulative_speeds_take_apart_into_the_times_of_intervals(name: str) -> None:
    # Steps 3 to n take (n - 2) B / speed: the difference of two of those is an interval, without its data loading.
    path = next((PUBLISHED / "logs").glob(f"log_{name}_*"))
    evidence = to_record(read_log(path), path.name).evidence
    spent = [
        (n - 2) * 4 / speed
        for n, speed in zip(evidence["iterations"], evidence["samples_per_second"], strict=True)
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
    load = Workload(
        num_layers=2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97, clip_norm=0
    )
    job = Job("stronghold", load, {"window_size": 2, "resident_layers": 0}, steps=20, warmup=5)
    measured = {"losses": [4.0] * 10 + [3.0] * 10, "step_seconds": [0.25] * 20, "grad_norms": [1.0] * 20}
    measured |= {"loss_scales": [], "skipped_steps": []}
    first = {key: values[:10] for key, values in measured.items()}
    lines = [*header_lines(job), *interval_lines(job, first, {}), *interval_lines(job, measured, {})]
    record = one(tmp_path, "log_stronghold_l-2_hs-32_bs-2_ws-2_2026-01-02.1800000000.txt", lines)
    assert (record.job.workload, record.job.options, record.job.steps) == (load, job.options, 20)
    assert (record.status, record.clock, record.losses) == ("ok", "cpu", [4.0, 3.0])
    assert record.evidence["doubts"] == []


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("/x/run.sh: line 56: 31047 Killed                  python train.py", "oom-host"),
        ("[2022-07-02] [ERROR] [launch.py] Process 7 exits with return code = -9", "oom-host"),
        ("  exitcode  : -9 (pid: 31047)", "oom-host"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", "oom-host"),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "oom-device"),
        ("torch.OutOfMemoryError: sim device out of memory: tried to allocate 64 bytes", "oom-device"),
        ("torch.OutOfMemoryError: sim pinned out of memory: tried to allocate 64 bytes", "oom-host"),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes",
            "oom-host",
        ),
        ("/x/run.sh: line 56: 31047 Terminated              python train.py", "killed"),
        ("/x/run.sh: line 56: 31047 Segmentation fault      python train.py", "crash"),
        ("KeyboardInterrupt", "interrupted"),
        ("ModuleNotFoundError: No module named 'apex'", "unavailable"),
        ("ValueError: no such thing", "crash"),
        (
            "stronghold with 9 layers needs 9.0 GiB of host memory (weights 9.0 GiB), there is 1.0 GiB",
            "does-not-fit",
        ),
        (
            "stronghold with 1 layer needs 9.0 GiB of host memory (weights 9.0 GiB), there is 1.0 GiB",
            "does-not-fit",
        ),
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-05-03T10:00:00 DUE TO TIME LIMIT ***",
            "timeout",
        ),
        (
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2024-05-03T10:00:00 DUE TO PREEMPTION ***",
            "killed",
        ),
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-05-03T10:00:00 DUE TO NODE FAILURE ***",
            "killed",
        ),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-05-03T10:00:00 ***", "interrupted"),
        ("srun: error: n1: task 0: Out Of Memory", "oom-host"),
        ("slurmstepd: error: Exceeded job memory limit at some point.", "oom-host"),
        ("State: OUT_OF_MEMORY (exit code 0)", "oom-host"),
        ("srun: error: n1: task 0: Bus error (core dumped)", "crash"),
        ("Bus error (core dumped)", "crash"),
        ("Fatal Python error: Bus error", "crash"),
        (
            "RuntimeError: DataLoader worker is killed by signal: Bus error. insufficient shared memory (shm)",
            "oom-host",
        ),
        ("srun: error: n1: tasks 0-3: Exited with exit code 1", "crash"),
        ("srun: error: n1: task 0: Killed", "killed"),
        ("", "interrupted"),  # cut
    ],
)
def test_the_end_is_named_by_what_the_log_tells(tmp_path: Path, line: str, status: str) -> None:
    record = one(tmp_path, name_of("m", 2, 64), [*megatron_lines(2, 64, [9.0, 8.0], of=50), line])
    assert (record.status, record.phase) == (status, "step 21")
    assert "after iteration 20 of 50" in record.reason


def test_a_run_killed_after_its_last_step_has_trained(tmp_path: Path) -> None:
    lines = [*megatron_lines(2, 64, [9.0, 8.0]), "run.sh: line 5: 7 Killed  python"]
    record = one(tmp_path, name_of("m", 2, 64), lines)
    assert record.status == "ok"
    assert record.evidence["ends"] == ["line 5: 7 Killed"]


def test_a_run_that_exits_as_told_before_its_last_iteration_has_finished(tmp_path: Path) -> None:
    lines = [
        *megatron_lines(2, 64, [9.0, 8.0], of=50),
        "[exiting program at iteration 20] datetime: 2022-07-02",
    ]
    record = one(tmp_path, name_of("m", 2, 64), lines)
    assert (record.status, record.job.steps) == ("ok", 20)


def test_a_whole_line_without_a_loss_is_not_a_number_and_a_cut_one_is_missing(tmp_path: Path) -> None:
    nan = one(tmp_path, name_of("m", 2, 64), megatron_lines(2, 64, [9.0, math.nan]))
    assert math.isnan(nan.losses[1])
    cut = [
        text.split("| lm loss")[0] if "20/" in text else text for text in megatron_lines(2, 64, [9.0, 8.0])
    ]
    assert one(tmp_path, name_of("m", 2, 64), cut).losses == [9.0, None]


@pytest.mark.parametrize("vary", VARIANTS)
@pytest.mark.parametrize("dialect", [megatron_lines, deepspeed_lines])
def test_a_dialect_that_nobody_has_shown_us_reads_as_the_one_that_it_is_near(
    tmp_path: Path, vary: Callable, dialect: Callable
) -> None:
    for name, losses in (("whole", [9.0, 8.5, 8.25]), ("nan", [9.0, math.nan, math.nan])):
        record = one(tmp_path, name_of(name, 2, 64), vary(dialect(2, 64, losses)))
        assert (record.status, record.job.steps, str(record.losses)) == ("ok", 30, str(losses))
        assert record.median_step_seconds == 0.5
    short = one(tmp_path, name_of("short", 2, 64), vary([*dialect(2, 64, [9.0], of=50), "KeyboardInterrupt"]))
    assert (short.status, short.phase, short.losses) == ("interrupted", "step 11", [9.0])


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


def test_a_name_that_is_no_logs_is_not_even_opened(tmp_path: Path) -> None:
    with pytest.raises(NotALog, match="its name is not"):
        read_log(tmp_path / "log_l2l_l-x_hs-64_bs-4_ws-4.txt")


def test_a_long_file_of_anything_is_read_in_seconds(tmp_path: Path) -> None:
    path = write_log(tmp_path, name_of("m", 2, 64), megatron_lines(2, 64, [9.0, 8.0]))
    with path.open("ab") as file:
        file.write(
            b"  a . " + b" " * 3_000_000 + b"x" + b"\0" * 10_000_000 + b"\n" + b"iteration 1/ \n" * 50_000
        )
    assert to_record(read_log(path), path.name).losses == [9.0, 8.0]
    lines = ["method m with , 3 steps on cpu, Workload(" + "a" * 16_000 + ")"] * 100
    assert read_log(write_log(tmp_path, path.name, lines)).first_line["workload"] == {}


def test_slurms_reason_goes_before_the_kill_that_it_caused(tmp_path: Path) -> None:
    cancelled = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2024-05-03T10:00:00 DUE TO TIME LIMIT ***"
    record = one(tmp_path, SMALL_NAME, [*steps_of()[:-1], "run.sh: line 5: 7 Killed  python", cancelled])
    assert (record.status, record.phase) == ("timeout", "step 20")


def test_steps_after_a_time_in_brackets_are_read(tmp_path: Path) -> None:
    record = one(tmp_path, SMALL_NAME, steps_of(size=4))
    assert (record.status, record.job.steps, len(record.losses)) == ("ok", 20, 20)
    assert record.evidence["doubts"] == []


@pytest.mark.parametrize(
    "before", ["", "2024-03-30 12:00:00 ", "[rank0]: ", "[default0]:[2024-03-30 12:00:00] ", "0: "]
)
def test_whatever_stands_before_a_step_it_is_read(tmp_path: Path, before: str) -> None:
    lines = [before + text for text in steps_of(size=4, before="")]
    record = one(tmp_path, SMALL_NAME, lines)
    assert (record.job.workload.num_heads, len(record.losses), record.evidence["doubts"]) == (8, 20, [])


def test_the_samples_of_a_step_are_the_global_batch(tmp_path: Path) -> None:
    record = one(tmp_path, SMALL_NAME, steps_of(size=16))
    # a step of 16 samples takes one second
    assert record.samples_per_step / record.median_step_seconds == 16.0
    assert record.evidence["doubts"] == ["batch_size is 4 in the name and 16 in the log"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"global_batch_size": 32},
        {"data_parallel_size": 8},
        {"world_size": 16, "tensor_model_parallel_size": 2},
    ],
)
def test_without_a_size_on_the_lines_the_arguments_tell_the_global_batch(
    tmp_path: Path, arguments: dict
) -> None:
    record = one(tmp_path, SMALL_NAME, steps_of(size=None, arguments=arguments))
    assert record.samples_per_step == 32


def test_the_gpus_that_share_a_training_are_its_ranks(tmp_path: Path) -> None:
    record = one(tmp_path, SMALL_NAME, steps_of(size=16, arguments={"world_size": 4}))
    assert record.job.world_size == 4


def test_a_batch_that_ramps_up_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotALog, match="one batch size, got steps of 4 to 8 samples"):
        one(tmp_path, SMALL_NAME, steps_of(size=[4] * 10 + [8] * 10))
    with pytest.raises(NotALog, match="one batch size, got a ramp-up"):
        one(tmp_path, SMALL_NAME, steps_of(size=None, arguments={"rampup_batch_size": "['2', '2', '100']"}))


def test_a_ramp_up_within_the_first_interval_is_a_doubt(tmp_path: Path) -> None:
    lines = steps_of(size=[4] * 5 + [8] * 15, arguments={"log_interval": 10})
    record = one(
        tmp_path, SMALL_NAME, [text for text in lines if "iteration" not in text or "0/      20" in text]
    )
    assert "its consumed samples grow by 6 a step, its batch has 8" in record.evidence["doubts"]


def test_parameters_of_one_part_of_a_model_are_not_compared_with_the_whole(tmp_path: Path) -> None:
    count = " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1000"
    cut = steps_of(arguments={"tensor_model_parallel_size": 2, "world_size": 2})
    record = one(tmp_path, SMALL_NAME, [count, *cut])
    assert "other_parameters" not in record.evidence
    assert any("in each of 2 parts" in doubt for doubt in record.evidence["doubts"])


def test_seconds_in_place_of_milliseconds_are_seconds(tmp_path: Path) -> None:
    record = one(tmp_path, SMALL_NAME, steps_of(size=4, time="elapsed time per iteration (s): 1.50"))
    assert record.step_seconds == [1.5] * 20
    assert record.evidence["doubts"] == []


@pytest.mark.parametrize(
    "time", ["elapsed time per iteration (ms): 1000,0", "elapsed time per iteration (min): 1.0"]
)
def test_a_time_that_cannot_be_read_is_a_doubt(tmp_path: Path, time: str) -> None:
    record = one(tmp_path, SMALL_NAME, steps_of(size=4, time=time))
    assert record.step_seconds == [None] * 20 and record.first_step_seconds is None
    assert record.evidence["doubts"][-1] == "20 of 20 iteration lines tell no time of a step in ms or s"


@pytest.mark.parametrize(
    "line",
    [
        "step 7/20: train loss 10.1, 1000 ms",
        "{'loss': 10.8, 'grad_norm': 1.0, 'epoch': 0.1}",
        "iter: 3 lm_loss=9.1",
        " iteration        7/      20",
        "iteration 7: loss 3.0",
    ],
)
def test_a_line_that_looks_like_a_step_and_is_not_read_is_a_doubt(tmp_path: Path, line: str) -> None:
    record = one(tmp_path, SMALL_NAME, [*steps_of(size=4), line])
    (doubt,) = record.evidence["doubts"]
    assert doubt.startswith("1 line like a step's could not be read:")


@pytest.mark.parametrize(
    "line",
    [
        " validation loss at iteration 10 | lm loss value: 1.080000E+01 | lm loss PPL: 4.9E+04 |",
        "Overflow: reducing loss scale from 65536 to 32768 at step 3",
        "python train.py --train-iters 50 --loss-scale 1",
    ],
)
def test_a_line_about_no_step_of_the_training_is_no_doubt(tmp_path: Path, line: str) -> None:
    assert one(tmp_path, SMALL_NAME, [*steps_of(size=4), line]).evidence["doubts"] == []


def test_a_log_of_unread_steps_is_not_said_to_have_ended_before_its_first(tmp_path: Path) -> None:
    lines = [text for text in steps_of(size=4) if "iteration" not in text]
    record = one(tmp_path, SMALL_NAME, [*lines, *(f"step {step}: loss 9.0" for step in range(20))])
    assert record.reason == "the log ends in steps that could not be read without a reason"
    assert (record.status, record.phase) == ("interrupted", "")


@pytest.mark.parametrize("dialect", [megatron_lines, deepspeed_lines, own_lines])
def test_runs_that_are_appended_in_one_file_are_a_doubt(tmp_path: Path, dialect: Callable) -> None:
    """The second one goes on after the first one's last step: no step is there twice."""
    first, whole = dialect(2, 64, [9.0], of=20), dialect(2, 64, [9.0, 8.0])
    second = [text for text in whole if "10/" not in text]
    doubts = [
        one(tmp_path, name_of("l2l", 2, 64), lines).evidence["doubts"]
        for lines in (second, [*first, *second])
    ]
    text = "its arguments are listed again after steps, as by 2 runs in one file"
    assert [text in doubt for doubt in doubts] == [False, True]


def test_a_speed_that_batch_and_times_contradict_is_a_doubt(tmp_path: Path) -> None:
    speed = "NumWorkers: 1; IterationTime: 1.0;  SamplesPerSecond: 16.0"
    record = one(tmp_path, SMALL_NAME, [*steps_of(size=4), *[speed] * 3])
    assert record.evidence["doubts"] == ["its samples/s are 4 times what its batch and times give"]
