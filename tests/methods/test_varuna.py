"""Varuna as a method: any stages, replicas, schedule and dtype train what one process trains, and planted bugs show."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.core.job import Budget, Job, Room, Workload
from harness.core.method import create
from harness.core.record import read_all
from harness.plan.fit import resolve
from harness.run.timeline import read_timeline
from methods.pipeline.schedule import SCHEDULES
from tests.methods.pipeline.trainings import ABOVE, bits
from tests.run.test_ranks import training_ranks
from tests.support import cli
from tests.support.pipeline_bugs import BUGS
from tests.support.ranks import on_ranks
from tests.support.tiny import SIZES
from tests.support.training import TrainingResult, overflowing, tiny, train

PLACES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 1)]  # stages and replicas
QUICK = [((2, 2), "varuna"), ((2, 2), "1f1b"), ((3, 1), "gpipe")]
OTHERS = [(place, schedule) for place in PLACES for schedule in SCHEDULES if (place, schedule) not in QUICK]
STEPS, FEW_STEPS = 8, 4
WORKLOAD = tiny(num_layers=4, batch_size=4)
BUG_PLACES = {"gradient_of_a_replica_dropped": (1, 2)}
METHOD_BUGS = [bug.symptom for bug in BUGS if bug.file.endswith("gradients.py") or "overflow" in bug.symptom]


def job(
    place: tuple[int, int],
    schedule: str = "varuna",
    workload: Workload = WORKLOAD,
    steps: int = STEPS,
    **more: Any,
) -> dict[str, Any]:
    num_stages, num_replicas = place
    options = {
        "num_stages": num_stages,
        "chunk_size": more.pop("chunk_size", 1),
        "schedule": schedule,
        **more.pop("options", {}),
    }
    return {
        "kind": "method",
        "ranks": num_stages * num_replicas,
        "options": options,
        "steps": steps,
        "workload": dataclasses.asdict(workload),
        **more,
    }


def overflow_job(**more: Any) -> dict[str, Any]:
    return job((2, 1), workload=overflowing(batch_size=4), steps=8, overflows=True, **more)


@functools.cache
def resident(workload: Workload = WORKLOAD, steps: int = STEPS) -> TrainingResult:
    return train("resident", workload, steps)


def distance(result: dict[str, Any], reference: TrainingResult) -> float:
    """The largest relative difference of a loss or a norm; infinite where one is not finite, or was skipped."""
    worst = 0.0
    for value, expected in ((result["losses"], reference.losses), (result["norms"], reference.grad_norms)):
        for a, b in zip(value, expected, strict=True):
            if math.isfinite(a) and math.isfinite(b):
                worst = max(worst, abs(a - b) / abs(b))
            elif math.isfinite(a) != math.isfinite(b):
                return math.inf
    return worst


class TrainedByRanks:
    """Results of trainings that share one start of ranks, by name."""

    def __init__(self, jobs: dict[Any, dict[str, Any]]) -> None:
        results = on_ranks(4, "tests.methods.pipeline.trainings:on_this_rank", list(jobs.values()))
        self.by_name = {name: [ranks[number] for ranks in results] for number, name in enumerate(jobs)}

    def first(self, name: Any) -> dict[str, Any]:
        result: dict[str, Any] = self.by_name[name][0]
        return result


@pytest.fixture(scope="module")
def quick() -> TrainedByRanks:
    jobs: dict[Any, dict[str, Any]] = {names: job(*names) for names in QUICK}
    jobs["one micro-batch"] = job((2, 1), chunk_size=4, steps=8)
    return TrainedByRanks(jobs)


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> TrainedByRanks:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    jobs: dict[Any, dict[str, Any]] = {}
    jobs["bf16"] = job(
        (2, 1), workload=dataclasses.replace(WORKLOAD, dtype="bf16", learning_rate=0.1), steps=8
    )
    jobs["overflow"] = overflow_job()
    jobs["saved"] = job((2, 2), steps=4, options={"checkpoint": folder, "checkpoint_every": 2})
    jobs["resumed"] = job((3, 1), options={"resume": folder})
    for name in METHOD_BUGS:
        jobs[name] = (
            overflow_job(bug=name)
            if "overflow" in name
            else job(BUG_PLACES.get(name, (2, 1)), steps=4, bug=name)
        )
    return TrainedByRanks(jobs)


@pytest.fixture(scope="module")
def every() -> TrainedByRanks:
    return TrainedByRanks({place: job(*place, steps=FEW_STEPS) for place in OTHERS})


@pytest.mark.parametrize("names", QUICK, ids=str)
def test_losses_and_norms_are_those_of_one_process(names: Any, quick: TrainedByRanks) -> None:
    assert distance(quick.first(names), resident()) < 1e-6


@pytest.mark.heavy
@pytest.mark.parametrize("place", OTHERS, ids=str)
def test_every_place_and_schedule_has_the_losses_and_norms_of_one_process(
    place: Any, every: TrainedByRanks
) -> None:
    assert distance(every.first(place), resident(steps=FEW_STEPS)) < 1e-6


def test_every_rank_tells_the_same_losses_and_norms(quick: TrainedByRanks) -> None:
    for name, ranks in quick.by_name.items():
        reports = [(result["losses"], result["norms"]) for result in ranks if result]
        assert all(str(report) == str(reports[0]) for report in reports), name


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["bf16", "overflow", "saved", "resumed"])
def test_every_rank_of_a_special_training_tells_the_same(name: str, special: TrainedByRanks) -> None:
    reports = [(result["losses"], result["norms"]) for result in special.by_name[name] if result]
    assert all(str(report) == str(reports[0]) for report in reports)


def test_one_micro_batch_has_the_very_bits_of_resident_training(quick: TrainedByRanks) -> None:
    result, reference = quick.first("one micro-batch"), resident(steps=8)
    assert (result["losses"], result["norms"]) == (reference.losses, reference.grad_norms)
    assert result["tensors"] == {
        state.name: [bits(state.weight), bits(state.exp_avg)] for state in reference.trained.tensors
    }


def test_one_rank_has_the_very_bits_of_resident_training_dropout_included() -> None:
    workload = dataclasses.replace(WORKLOAD, dropout=0.1)
    reference, result = resident(workload, 6), train("varuna", workload, 6)
    assert (result.losses, result.grad_norms) == (reference.losses, reference.grad_norms)
    pairs = zip(result.trained.tensors, reference.trained.tensors, strict=True)
    assert all(bits(state.weight) == bits(expected.weight) for state, expected in pairs)


@pytest.mark.heavy
def test_bf16_is_within_the_gates_tolerance(special: TrainedByRanks) -> None:
    workload = dataclasses.replace(WORKLOAD, dtype="bf16", learning_rate=0.1)
    pairs = zip(special.first("bf16")["losses"], resident(workload, 8).losses, strict=True)
    assert max(abs(loss - expected) / expected for loss, expected in pairs) < 5e-3


@functools.cache
def overflowing_resident() -> TrainingResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("methods.shared.loss_scale.INITIAL_LOSS_SCALE", ABOVE)
        return train("resident", overflowing(batch_size=4), 8)


@pytest.mark.heavy
def test_every_rank_skips_the_steps_that_resident_training_skips(special: TrainedByRanks) -> None:
    """Three, of which the last has no gradient beyond fp16 but the sum of the embedding's two."""
    for result in special.by_name["overflow"][:2]:
        assert (
            result["skipped"]
            == [not math.isfinite(norm) for norm in result["norms"]]
            == [True] * 3 + [False] * 5
        )
        assert distance(result, overflowing_resident()) < 1e-3


def test_one_rank_has_the_very_bits_of_resident_training_through_overflows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("methods.shared.loss_scale.INITIAL_LOSS_SCALE", ABOVE)
    reference, result = overflowing_resident(), train("varuna", overflowing(batch_size=4), 8)
    assert result.losses == reference.losses
    pairs = zip(result.trained.tensors, reference.trained.tensors, strict=True)
    assert all(bits(state.weight) == bits(expected.weight) for state, expected in pairs)


@pytest.mark.heavy
@pytest.mark.parametrize("name", METHOD_BUGS)
def test_a_planted_bug_shows(name: str, special: TrainedByRanks) -> None:
    """In the losses or norms of the first rank, by a hundred times the tolerance and more."""
    result = special.first(name)
    if "overflow" in name:
        # other steps are skipped, or losses not finite
        assert distance(result, overflowing_resident()) == math.inf
    else:
        assert distance(result, resident(steps=4)) > 1e-4


@pytest.mark.heavy
def test_a_job_resumes_with_other_stages_and_replicas(special: TrainedByRanks) -> None:
    """Of 2 stages x 2 replicas after 4 steps, 3 stages go on: all losses and norms are of one training."""
    assert special.first("resumed")["losses"][:4] == pytest.approx(special.first("saved")["losses"], rel=1e-7)
    assert distance(special.first("resumed"), resident()) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"world_size": 4, "num_stages": 3},
            "expected a divisor of the 4 ranks, got 3; try 2 or 4, or --ranks 3",
        ),
        ({"num_stages": 2}, "expected a divisor of the 1 rank, got 2; try 1, or --ranks 2"),
        ({"world_size": 8, "num_stages": 8}, "num_stages: expected 1 to 4, the number of layers, got 8"),
        (
            {"world_size": 2, "num_stages": 2, "chunk_size": 3},
            "of the 4 samples of a replica, got 3; try 2 or 4",
        ),
        ({"world_size": 3, "num_stages": 1}, "a batch of 4 does not divide by 3 replicas; try -b 3 or 6"),
        ({"world_size": 4, "num_stages": 4, "chunk_size": 2, "schedule": "1f1b"}, "at least 4 micro-batches"),
        ({"schedule": "zero"}, "expected varuna or 1f1b or gpipe, got 'zero'"),
    ],
)
def test_what_cannot_be_cut_so_is_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        create("varuna", options).plan(WORKLOAD, Room())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_plan_chooses_and_names_what_fits() -> None:
    """As many stages as ranks where nothing is known; where a rank has room for half of the model, two."""
    workload = Workload(num_layers=16, batch_size=8)
    plan = create("varuna", {"world_size": 4}).plan(workload, Room())
    assert (plan.options["num_stages"], plan.options["chunk_size"]) == (4, 1)
    deep, _, shortfall = resolve(Job("varuna", workload.at_depth(64), {"world_size": 4}, Budget(8 * 2**30)))
    assert shortfall and "the largest that should fit has -l" in shortfall and deep.options["num_stages"] == 4


def test_a_job_that_resumes_from_its_own_folder_may_begin_there(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    options = {"checkpoint": str(tmp_path), "resume": f"{tmp_path}/other/.."}
    create("varuna", options).plan(WORKLOAD, Room())
    with pytest.raises(ValueError, match="expected a complete checkpoint, got none"):
        create("varuna", options | {"resume": str(tmp_path / "other")}).plan(WORKLOAD, Room())


def test_a_resumed_job_is_of_the_same_workload(tmp_path: Path) -> None:
    train("varuna", WORKLOAD, 2, checkpoint=str(tmp_path), checkpoint_every=2)
    with pytest.raises(ValueError, match="expected a checkpoint with batch_size 2, got 4"):
        train("varuna", dataclasses.replace(WORKLOAD, batch_size=2), 4, resume=str(tmp_path))


# ---- At the door


@pytest.mark.heavy
def test_the_door_trains_plans_and_traces_every_rank(tmp_path: Path) -> None:
    arguments = [
        "-m",
        "varuna",
        "--ranks",
        "4",
        "--option",
        "num_stages=2",
        *SIZES,
        "--results",
        str(tmp_path),
    ]
    done = cli.run(*arguments, "--steps", "6", "--trace", str(tmp_path / "trace.json"))
    assert done.returncode == 0 and "gate passed" in done.stdout, done.stderr + done.stdout
    record = next(record for record in read_all(tmp_path)[0].values() if record.job.method == "varuna")
    assert record.machine["peak_rank"] in range(4) and len(record.predicted["stages"]) == 2
    tracks = {span.track for span in read_timeline(tmp_path / "trace.json").spans}
    assert {f"compute rank {rank}" for rank in range(4)} <= tracks
    works = {span.work for span in read_timeline(tmp_path / "trace.json").spans}
    assert {"forward", "recompute", "backward", "send activation", "send gradient"} <= works
    planned = cli.run("plan", *arguments[:-2])
    assert "stage 0, embedding" in planned.stdout and "stage 1" in planned.stdout


@pytest.mark.heavy
def test_a_killed_rank_is_named_and_the_others_end_at_once(tmp_path: Path) -> None:
    arguments = [
        "-m",
        "varuna",
        "--ranks",
        "3",
        "--option",
        "num_stages=3",
        *SIZES,
        "--results",
        str(tmp_path),
    ]
    a_day = "peer_seconds=86400"  # for which a peer that is only silent is waited for
    run = cli.start(*arguments, "--steps", "20000", "--option", a_day, stderr=subprocess.PIPE)
    ranks = training_ranks(tmp_path)
    ranks[1].kill()
    psutil.wait_procs([ranks[0], ranks[2]])
    assert run.wait() == 3
    (record,) = read_all(tmp_path)[0].values()
    assert record.status == "killed" and record.reason.startswith("rank 1 of 3: killed by SIGKILL")


@pytest.mark.heavy
def test_a_rank_that_stands_still_is_named_after_the_limit(tmp_path: Path) -> None:
    arguments = [
        "-m",
        "varuna",
        "--ranks",
        "3",
        "--option",
        "num_stages=3",
        *SIZES,
        "--results",
        str(tmp_path),
    ]
    run = cli.start(*arguments, "--steps", "20000", "--option", "peer_seconds=15", stderr=subprocess.PIPE)
    ranks = training_ranks(tmp_path)
    ranks[1].suspend()
    try:
        assert run.wait() == 3  # the agent ends a process that does not answer after half a minute
    finally:
        for rank in ranks.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
    (record,) = read_all(tmp_path)[0].values()
    assert "rank 1" in record.reason


@pytest.mark.heavy
def test_a_job_resumes_at_the_door(tmp_path: Path) -> None:
    folder, arguments = tmp_path / "checkpoints", ["-m", "varuna", *SIZES, "--results", str(tmp_path)]
    first = cli.run(
        *arguments, "--steps", "4", "--option", f"checkpoint={folder}", "--option", "checkpoint_every=4"
    )
    assert first.returncode == 0, first.stderr + first.stdout
    done = cli.run(*arguments, "--steps", "8", "--ranks", "2", "--resume", folder)
    assert done.returncode == 0 and "gate passed" in done.stdout, done.stderr + done.stdout
    record = [record for record in read_all(tmp_path)[0].values() if record.job.options.get("resume")][-1]
    assert record.schedule["resumed_steps"] == 4 and len(record.timed_seconds) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 8 --option num_stages=8", "num_stages: expected 1 to 4"),
        ("--ranks 4 --option num_stages=3", "expected a divisor of the 4 ranks, got 3"),
        ("--option num_stages=2", "expected a divisor of the 1 rank, got 2"),
        ("--ranks 2 --option chunk_size=3", "expected a divisor of the 4 samples"),
        ("--resume no/such", "no/such: expected a complete checkpoint, got none"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(arguments: str, message: str, tmp_path: Path) -> None:
    done = cli.run("-m", "varuna", *arguments.split(), *SIZES, "--results", tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1) and message in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_one_stage_takes_the_largest_micro_batch_that_fits() -> None:
    workload = Workload(num_layers=2, hidden_size=128, num_heads=16, seq_len=64, vocab_size=512)
    whole = create("varuna", {}).plan(workload, Room())
    assert whole.options["chunk_size"] == workload.batch_size == 4
    less = create("varuna", {}).plan(workload, Room(device_bytes=whole.device_bytes - 1))
    assert less.options["chunk_size"] == 2
