"""Probes are ordinary records that run whatever their plan says, and the verb ends in a table of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core.job import Budget, Job, Plan, Room, Workload
from harness.core.method import create
from harness.core.record import Record, read_all
from harness.jobs.largest_size import Probes, answer_texts, find_largest
from harness.jobs.size_search import SizeOutcome, search
from harness.jobs.sweep import Sweep
from harness.plan.fit import Planned, resolve
from methods.streaming.placement.placed_layers import PlacedLayers
from tests.support.cli import run

TINY = Workload(num_layers=1, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)
SMALL = Workload(hidden_size=128, seq_len=64, vocab_size=512)
MIB = 2**20

# Trains as l2l up to its wall, whatever its plan says, which is one MiB a layer.
WALL = """
from dataclasses import dataclass
from harness.core.method import Method
from harness.core.job import Plan
from methods.l2l import L2L

@dataclass(frozen=True)
class Wall(Method):
    wall: int = 3
    end: str = "torch.OutOfMemoryError('sim device out of memory: tried to allocate 512 bytes, 99 of 100 bytes in use')"
    least: int = 1

    def plan(self, workload, budget):
        if workload.num_layers < self.least:
            raise ValueError("too few layers")
        return Plan(device={"weights": workload.num_layers * 2**20})

    def train(self, workload, batches, device):
        import torch
        if workload.num_layers > self.wall:
            raise eval(self.end)
        return (yield from L2L().train(workload, batches, device))
"""


TOKENS = "workload.batch_size * workload.seq_len // 16"
WALL_OF_TOKENS = WALL.replace("workload.num_layers > self.wall", f"{TOKENS} > self.wall").replace(
    "workload.num_layers * 2**20", f"{TOKENS} * 2**20"
)


@settings(max_examples=50)
@given(
    device=st.integers(4 * MIB, 40 * MIB),
    host=st.integers(MIB, 90 * MIB),
    num_layers=st.integers(1, 40),
)
def test_stronghold_plans_what_fits_wherever_anything_fits(device: int, host: int, num_layers: int) -> None:
    workload = Workload(num_layers=num_layers, hidden_size=128, seq_len=64, vocab_size=512)
    room = Room(device, host)

    def fits(**options: int | None) -> bool:
        return create("stronghold", options).plan(workload, room).shortfall(room) is None

    windows = range(1, min(3, num_layers) + 1)
    any_fits = any(
        fits(window_size=window, resident_layers=resident)
        for window in windows
        for resident in range(num_layers + 1)
    )
    assert fits() == any_fits
    assert create("stronghold", {}).plan(workload, room).options["window_size"] in windows


def with_wall(folder: Path) -> Path:
    """A folder of methods with the one above."""
    (folder / "methods").mkdir(exist_ok=True)
    (folder / "methods" / "wall.py").write_text(WALL)
    return folder / "methods"


def searched(folder: Path, budget_mib: int, **options) -> tuple[dict, list[dict]]:
    """The row of the method above, and the events of its search."""
    folders = (with_wall(folder),)
    events: list[dict] = []
    most, repeats = options.pop("most", 2**20), options.pop("repeats", 1)
    job = Job("wall", TINY, options, Budget(budget_mib * MIB), steps=5, warmup=2)
    return find_largest(Probes(Sweep(folder, folders, events.append), job), repeats, most), events


def probes(events: list[dict]) -> list[int]:
    return [
        event["job"].workload.num_layers
        for event in events
        if event["event"] == "start" and "probe" in event["role"]
    ]


@pytest.mark.heavy
def test_probes_run_beyond_what_the_plan_allows_and_are_judged_and_resumed(
    tmp_path: Path, in_process: None
) -> None:
    answer, events = searched(tmp_path, budget_mib=1, wall=2)
    assert probes(events) == [1, 2, 4, 3]
    assert (answer["largest"], answer["fails_at"], answer["gate"], answer["trials"]) == (2, 3, "exact", 4)
    again, events = searched(tmp_path, budget_mib=1, wall=2)
    assert again == answer and [event for event in events if event["event"] == "start"] == []


def test_a_refusal_by_plan_is_no_failed_probe(tmp_path: Path, in_process: None) -> None:
    folders = (with_wall(tmp_path),)
    job = Job("wall", TINY.at_depth(2), {"least": 2}, Budget(MIB), steps=5, warmup=2)
    assert Sweep(tmp_path, folders).run([resolve(job, folders)])[0].status == "does-not-fit"
    answer, events = searched(tmp_path, budget_mib=1, least=2, most=2)
    assert probes(events) == [2] and answer["binding"] == "none up to 2 layers, the most tried"


def test_a_crash_is_not_too_large(tmp_path: Path, in_process: None) -> None:
    answer, _ = searched(tmp_path, budget_mib=2, wall=1, end="RuntimeError('bad luck')")
    assert (
        answer["stopped"].startswith("at 2 layers: crash: RuntimeError: bad luck")
        and answer["fails_at"] is None
    )
    assert (
        answer["record"].status == "crash" and "no answer: at 2 layers" in answer_texts(answer)["what binds"]
    )


def test_each_confirmation_is_a_record_of_its_own(tmp_path: Path, in_process: None) -> None:
    answer, _ = searched(tmp_path, budget_mib=1, wall=1, repeats=2, most=2)
    ends = [record.status for record in read_all(tmp_path)[0].values() if record.job.method == "wall"]
    assert answer["largest"] == 1 and ends.count("ok") == 2 and len(ends) == answer["trials"] == 4


def test_the_smallest_depth_is_the_first_that_the_options_allow(tmp_path: Path, in_process: None) -> None:
    answer, events = searched(tmp_path, budget_mib=2, wall=1, least=2)
    assert probes(events) == [2] and (answer["largest"], answer["fails_at"]) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "largest", "fails_at", "tokens"),
    [
        (["--of", "batch", "-l", "1", "--seq", "16"], 3, 4, 48),
        (["--of", "batch", "-l", "1", "--seq", "16", "-b", "2"], 2, None, 32),  # the most that was asked for
        (["--of", "tokens", "-l", "2", "--seq", "16"], 48, 64, 48),
        (["--of", "seq", "-l", "1", "-b", "3", "--seq", "24"], 21, 22, 63),
    ],
)
def test_the_largest_batch_sample_or_step_is_searched_at_one_depth(
    arguments: list[str], largest: int, fails_at: int | None, tokens: int, tmp_path: Path, in_process: None
) -> None:
    """The wall stands at 48 to 63 tokens a step, where a sixteen more would be begun."""
    (with_wall(tmp_path) / "wall_of_tokens.py").write_text(WALL_OF_TOKENS)
    sizes = "-m wall-of-tokens --option wall=3 -h 32 --heads 2 --vocab 97 --device cpu --device-memory 3MiB --json"
    folders = ("--methods", tmp_path / "methods", "--results", tmp_path / "r")
    done = run("search", "largest", *arguments, *sizes.split(), *folders)
    assert done.returncode == 0, done.stderr
    # no traceback of a failed probe
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    (row,) = [line for line in map(json.loads, lines) if line["event"] == "answer"]
    assert (row["largest"], row["fails_at"], row["tokens"]) == (largest, fails_at, tokens)


@pytest.mark.heavy
def test_the_verb_ends_in_a_row_for_each_method(tmp_path: Path) -> None:
    (with_wall(tmp_path) / "absent.py").write_text(WALL.replace("import torch", "import no_such_engine"))
    sizes = "-h 32 -b 2 --heads 2 --seq 16 --vocab 97 --option wall=1 --device-memory 1MiB --json".split()
    arguments = ["-m", "wall,absent", *sizes, "--methods", tmp_path / "methods", "--results", tmp_path / "r"]
    done = run("search", "largest", *arguments)
    assert done.returncode == 0, done.stderr
    rows = {
        row["method"]: row for row in map(json.loads, done.stdout.splitlines()) if row["event"] == "answer"
    }
    assert (rows["wall"]["largest"], rows["wall"]["fails_at"]) == (1, 2)
    assert "no_such_engine" in rows["absent"]["stopped"]


class AsPlanned(Probes):
    """Probes that end as the plan of their job says."""

    def _run(self, planned: Planned) -> SizeOutcome:
        return SizeOutcome(plan_of(planned.job).shortfall(self.room) is None, "device")

    def _raise_reserve(self, record: Record, plan: Plan) -> None:
        """No run goes beyond its plan."""


def plan_of(job: Job) -> Plan:
    return create(job.method, job.options).plan(job.workload, Room())


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("groups", [1, 3, 4, 7])
def test_depths_that_stages_do_not_divide_are_no_sizes(stages: int, groups: int, tmp_path: Path) -> None:
    load = dataclasses.replace(SMALL, num_layers=1, batch_size=stages)
    job = Job("megatron-lm", load, {"world_size": stages, "pipeline_parallel": stages}, device="cpu")
    deepest = dataclasses.replace(job, workload=load.at_depth(stages * groups))
    job = dataclasses.replace(job, budget=Budget(plan_of(deepest).device_bytes))
    ends = AsPlanned(Sweep(tmp_path), job)
    answer = search(ends, ends.guess(), least_size=ends.least_size, most_size=ends.size_limit(None))
    assert answer.is_sharp
    assert [
        ends.axis.amount(size) for size in (ends.least_size, answer.largest_size, answer.failing_size or 0)
    ] == [
        stages,
        stages * groups,
        stages * (groups + 1),
    ]


def test_the_most_layers_asked_for_are_those_that_stages_divide(tmp_path: Path) -> None:
    load = dataclasses.replace(SMALL, num_layers=1, batch_size=2)
    ends = Probes(
        Sweep(tmp_path), Job("megatron-lm", load, {"world_size": 2, "pipeline_parallel": 2}, device="cpu")
    )
    assert ends.axis.amount(ends.size_limit(7)) == 6


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (3, 3), (2, 3)])
def test_samples_are_added_by_the_micro_batches_of_all_ranks(
    ranks: int, micro_batches: int, tmp_path: Path
) -> None:
    load = dataclasses.replace(
        SMALL, num_layers=1, batch_size=ranks * micro_batches, micro_batches=micro_batches
    )
    job = Job("l2l", load, {"world_size": ranks}, device="cpu")
    ten = dataclasses.replace(job, workload=dataclasses.replace(load, batch_size=10 * ranks * micro_batches))
    job = dataclasses.replace(job, budget=Budget(plan_of(ten).device_bytes))
    ends = AsPlanned(Sweep(tmp_path), job, "batch")
    answer = search(ends, ends.guess(), least_size=ends.least_size, most_size=ends.size_limit(None))
    assert (ends.axis.amount(answer.largest_size), answer.is_sharp) == (ten.workload.batch_size, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 4", "--steps: expected at least 5 in a search, got 4"),
        ("-w 0", "-w: expected a window of 1 to"),
        ("--repeats 0", "--repeats"),
        ("--placement R2W3", "placement R2W3: expected the model's 1 layer, got 5"),
        (
            "--placement R2W2",
            "a search tries other depths: leave --placement out, or give its last run no length",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_2_and_writes_nothing(
    arguments: str, message: str, tmp_path: Path
) -> None:
    done = run(
        "search", "largest", "-m", "stronghold", *arguments.split(), "--results", str(tmp_path / "new")
    )
    assert (done.returncode, done.stdout) == (2, "") and message in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.heavy
def test_where_a_plan_was_too_hopeful_its_next_options_are_tried_before_a_depth_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    """A budget of the very bytes that the plan with two resident layers asks for; training takes up to 1 MiB more."""

    whole_plan = PlacedLayers.plan

    def hopeful(layers: PlacedLayers) -> Plan:
        plan = whole_plan(layers)
        return dataclasses.replace(plan, device={**plan.device, "buffers": plan.device["buffers"] - 2**20})

    monkeypatch.setattr(PlacedLayers, "plan", hopeful)
    planned = create("stronghold", {"window_size": 3, "resident_layers": 2}).plan(SMALL.at_depth(5), Room())
    job = Job("stronghold", SMALL, {}, Budget(planned.device_bytes, 64 * MIB), "sim", steps=5, warmup=2)
    method_probes = Probes(Sweep(tmp_path), job)
    assert method_probes(5).has_passed
    ends = [(record.status, record.job.options["resident_layers"]) for record in method_probes.records]
    assert ends == [("oom-device", 2), ("ok", 1)]


@pytest.mark.heavy
def test_sums_of_two_threads_round_alike_on_sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose backward pass has a thread of its own: it takes as many cores as the CPU's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    job = Job("l2l", SMALL.at_depth(1), {}, Budget(16 * MIB, 64 * MIB), "sim", steps=5, warmup=2)
    assert Sweep(tmp_path).run([resolve(job)])[0].gate.verdict == "exact"


@pytest.mark.heavy
def test_layers_that_stay_on_the_device_let_stronghold_go_deeper_than_the_host_alone(
    tmp_path: Path, forked: None
) -> None:
    """The host of 64 MiB holds 21 layers of 16 bytes a parameter; two more stay on the device of 16 MiB."""
    answers = {}
    for name in ("l2l", "stronghold"):
        job = Job(name, SMALL, {}, Budget(16 * MIB, 64 * MIB), "sim", steps=5, warmup=2)
        answers[name] = find_largest(Probes(Sweep(tmp_path), job), repeats=1, most_size=2**20)
    assert {name: (row["largest"], row["fails_at"], row["trials"]) for name, row in answers.items()} == {
        "l2l": (21, 22, 4),
        "stronghold": (23, 24, 4),
    }
    assert all(row["binding"].startswith("host: ") and row["gate"] == "exact" for row in answers.values())
