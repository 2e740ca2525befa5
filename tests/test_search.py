"""The search finds the edge there is, reports the edge that is none, and its probes are ordinary records."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.largest import Probes, find, texts
from harness.method import ROOT, create
from harness.record import read_all
from harness.search import Answer, Outcome, extrapolate, search
from harness.spec import Budget, Job, Workload
from harness.sweep import Sweep, resolve

depths = st.integers(1, 500)
TINY = Workload(num_layers=1, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)
MIB = 2**20

# Trains as l2l up to its wall, whatever its plan says, which is one MiB a layer.
WALL = """
from dataclasses import dataclass
from harness.spec import Plan
from methods.l2l import L2L

@dataclass(frozen=True)
class Wall:
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


def up_to(edge: int) -> Callable[[int], Outcome]:
    return lambda num_layers: Outcome(num_layers <= edge, "device")


@given(edge=depths, guess=depths, repeats=st.integers(1, 3))
def test_a_sharp_edge_is_found_from_any_guess(edge: int, guess: int, repeats: int) -> None:
    answer = search(up_to(edge), guess, repeats=repeats)
    assert (answer.largest, answer.failed_above, answer.is_sharp) == (edge, edge + 1, True)
    assert answer.passing.count(edge) == answer.failing.count(edge + 1) == repeats


@given(edge=st.integers(0, 600), guess=depths, least=st.integers(1, 50), most=st.integers(51, 400))
def test_bounds_are_kept_and_reaching_them_is_said(edge: int, guess: int, least: int, most: int) -> None:
    answer = search(up_to(edge), guess, least=least, most=most)
    assert all(least <= trial.num_layers <= most for trial in answer.trials)
    assert answer.is_unlimited == (edge >= most)
    assert answer.largest == max(least - 1, min(edge, most))
    assert answer.failed_above == (None if edge >= most else max(least, edge + 1))


def test_six_trials_suffice_on_average_where_the_guess_is_ten_percent_off() -> None:
    chance, trials = random.Random(4), []
    for _ in range(4000):
        edge = round(math.exp(chance.uniform(math.log(8), math.log(400))))
        guess = max(1, round(edge * (1 + chance.gauss(0, 0.1))))
        trials.append(len(search(up_to(edge), guess).trials))
    assert statistics.mean(trials) <= 6


@given(
    edge=st.integers(16, 400), error=st.floats(-0.5, 1.0), start=st.integers(0, 10**6), slope=st.integers(10**4, 10**5)
)
def test_two_small_runs_mend_a_plan_that_is_far_off(edge: int, error: float, start: int, slope: int) -> None:
    """Real needs are a line in depth, the guess is half to twice as deep: two small runs, the edge, what fails."""
    budget, measured = start + slope * edge + slope // 2, []

    def probe(num_layers: int) -> Outcome:
        need = start + slope * num_layers
        measured.append((num_layers, {"run": need}))
        return Outcome(need <= budget, "device")

    def refine() -> int:
        return max(depth for depth in range(1, 2000) if extrapolate(measured, depth) <= budget)

    answer = search(probe, round(edge * (1 + error)), refine=refine)
    assert (answer.largest, answer.failed_above) == (edge, edge + 1)
    assert len(answer.trials) <= 4


@given(flaky=st.integers(1, 400), guess=depths, repeats=st.integers(1, 3), seed=st.integers())
def test_a_depth_that_passes_by_chance_lies_in_the_interval(flaky: int, guess: int, repeats: int, seed: int) -> None:
    chance = random.Random(seed)
    answer = search(
        lambda depth: Outcome(depth < flaky or (depth == flaky and chance.random() < 0.5)), guess, repeats=repeats
    )
    assert answer.failed_above is not None and answer.largest <= flaky <= answer.failed_above
    if flaky in answer.passing and flaky in answer.failing:
        assert (answer.largest, answer.failed_above, answer.mixed()) == (flaky - 1, flaky + 1, [flaky])


@given(edge=depths, width=st.integers(1, 20), guess=depths, repeats=st.integers(1, 3), seed=st.integers())
def test_a_blurred_edge_is_an_interval_within_the_blur(
    edge: int, width: int, guess: int, repeats: int, seed: int
) -> None:
    """All depths up to `edge` pass, all beyond edge + width fail."""
    chance = random.Random(seed)
    answer = search(
        lambda depth: Outcome(depth <= edge or (depth <= edge + width and chance.random() < 0.5)),
        guess, repeats=repeats, max_trials=1000,
    )  # fmt: skip
    assert answer.failed_above is not None and edge <= answer.largest < answer.failed_above <= edge + width + 1


@pytest.mark.parametrize("guess", [20, 10, 40, 19])
def test_a_failure_below_a_pass_is_found_beside_the_edge_and_reported_as_an_interval(guess: int) -> None:
    answer = search(lambda depth: Outcome(depth <= 30 and depth != 20), guess=guess, repeats=2)
    if 20 in answer.failing:
        assert (answer.largest, answer.failed_above, answer.is_sharp) == (19, 31, False)
        assert answer.mixed()[0] == 20 and answer.mixed()[-1] == 30
    else:
        assert (answer.largest, answer.failed_above, answer.is_sharp) == (30, 31, True)


@given(passes=st.lists(st.booleans(), min_size=60, max_size=60), guess=st.integers(1, 60))
def test_no_trial_contradicts_the_interval_whatever_the_oracle(passes: list[bool], guess: int) -> None:
    answer = search(lambda depth: Outcome(passes[depth - 1]), guess, most=60)
    assert len(answer.trials) <= 40
    assert all(depth > answer.largest for depth in answer.failing)
    if answer.failed_above is not None:
        assert all(depth < answer.failed_above for depth in answer.passing)


def test_an_end_that_is_not_about_size_stops_the_search() -> None:
    answer = search(lambda depth: Outcome(True) if depth < 5 else Outcome(False, stop="crash: bad luck"), guess=3)
    assert answer.stopped == "at 6 layers: crash: bad luck" and answer.failing == []
    assert answer.passing == [3, 4] and not answer.is_sharp


def test_trials_are_bounded() -> None:
    chance = random.Random(1)
    answer = search(lambda depth: Outcome(chance.random() < 0.5), guess=200, repeats=5)
    assert len(answer.trials) == 40 and answer.stopped == "no edge was found in 40 trials"


def test_two_small_runs_tell_the_published_peak_of_32_layers() -> None:
    """Published log, Megatron-LM, 32 layers: 29775.17 MiB; a twin's peaks at 4 and 8 layers: 7343.8 and 10545.4."""
    assert extrapolate([(8, {"run": 10545}), (4, {"run": 7344})], 32) == pytest.approx(29775, rel=1e-3)


@given(slopes=st.tuples(*[st.integers(0, 99)] * 2), starts=st.tuples(*[st.integers(0, 9999)] * 2), depth=depths)
def test_each_phase_is_extrapolated_on_its_own(slopes: tuple[int, int], starts: tuple[int, int], depth: int) -> None:
    def peaks(num_layers: int) -> dict[str, int]:
        return {name: a * num_layers + b for name, a, b in zip(("build", "step"), slopes, starts, strict=True)}

    assert extrapolate([(2, peaks(2)), (4, peaks(4))], depth) == max(peaks(depth).values())


@settings(max_examples=50)
@given(
    device=st.integers(4 * MIB, 40 * MIB), host=st.integers(MIB, 90 * MIB), num_layers=st.integers(1, 40),
)  # fmt: skip
def test_stronghold_plans_what_fits_wherever_anything_fits(device: int, host: int, num_layers: int) -> None:
    workload = Workload(num_layers=num_layers, hidden_size=128, seq_len=64, vocab_size=512)
    budget = Budget(device, host)

    def fits(**options: int | None) -> bool:
        return create("stronghold", options).plan(workload, budget).shortfall(budget) is None

    windows = range(1, min(3, num_layers) + 1)
    any_fits = any(
        fits(window_size=window, resident_layers=resident) for window in windows for resident in range(num_layers + 1)
    )
    assert fits() == any_fits
    assert create("stronghold", {}).plan(workload, budget).options["window_size"] in windows


def with_wall(folder: Path) -> Path:
    """A folder of methods with the one above."""
    (folder / "methods").mkdir(exist_ok=True)
    (folder / "methods" / "wall.py").write_text(WALL)
    return folder / "methods"


def searched(folder: Path, budget_mib: int, **words) -> tuple[dict, list[dict]]:
    """The row of the method above, and the events of its search."""
    folders = (with_wall(folder),)
    events: list[dict] = []
    most, repeats = words.pop("most", 2**20), words.pop("repeats", 1)
    job = Job("wall", TINY, words, Budget(budget_mib * MIB), steps=5, warmup=2)
    return find(Probes(Sweep(folder, folders, events.append), job), repeats, most), events


def probes(events: list[dict]) -> list[int]:
    return [
        event["job"].workload.num_layers for event in events if event["event"] == "start" and "probe" in event["role"]
    ]


def test_probes_run_beyond_what_the_plan_allows_and_are_judged_and_resumed(tmp_path: Path) -> None:
    found, events = searched(tmp_path, budget_mib=1, wall=2)
    assert probes(events) == [1, 2, 4, 3]
    assert (found["largest"], found["fails_at"], found["gate"], found["trials"]) == (2, 3, "exact", 4)
    again, events = searched(tmp_path, budget_mib=1, wall=2)
    assert again == found and [event for event in events if event["event"] == "start"] == []


def test_a_refusal_by_plan_is_no_failed_probe(tmp_path: Path) -> None:
    folders = (with_wall(tmp_path),)
    job = Job("wall", TINY.at_depth(2), {"least": 2}, Budget(MIB), steps=5, warmup=2)
    assert Sweep(tmp_path, folders).run([resolve(job, folders)[0]])[0].status == "does-not-fit"
    found, events = searched(tmp_path, budget_mib=1, least=2, most=2)
    assert probes(events) == [2] and found["binding"] == "none up to 2 layers, the most tried"


def test_a_crash_is_not_too_large(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, budget_mib=2, wall=1, end="RuntimeError('bad luck')")
    assert found["stopped"] == "at 2 layers: crash: RuntimeError: bad luck" and found["fails_at"] is None
    assert found["record"].status == "crash" and "no answer: at 2 layers" in texts(found)["what binds"]


def test_each_confirmation_is_a_record_of_its_own(tmp_path: Path) -> None:
    found, _ = searched(tmp_path, budget_mib=1, wall=1, repeats=2)
    ends = [record.status for record in read_all(tmp_path)[0].values() if record.job.method == "wall"]
    assert found["largest"] == 1 and ends.count("ok") == 2 and len(ends) == found["trials"] == 5


def test_the_smallest_depth_is_the_first_that_the_options_allow(tmp_path: Path) -> None:
    found, events = searched(tmp_path, budget_mib=2, wall=1, least=2)
    assert probes(events) == [2] and (found["largest"], found["fails_at"]) == (0, 2)


def run(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "harness", "search", "largest", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_verb_ends_in_a_row_for_each_method(tmp_path: Path) -> None:
    (with_wall(tmp_path) / "absent.py").write_text(WALL.replace("import torch", "import no_such_engine"))
    sizes = "-h 32 -b 2 --heads 2 --seq 16 --vocab 97 --option wall=1 --device-memory 1MiB --json".split()
    done = run("-m", "wall,absent", *sizes, "--methods", str(tmp_path / "methods"), "--results", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in map(json.loads, done.stdout.splitlines()) if row["event"] == "answer"}
    assert (rows["wall"]["largest"], rows["wall"]["fails_at"]) == (1, 2)
    assert "no_such_engine" in rows["absent"]["stopped"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--steps 4", "--steps 4 is too few for a probe: 5 at least"),
        ("-w 0", "-w takes 1 to"),
        ("--repeats 0", "--repeats"),
    ],
)
def test_bad_input_is_one_line_and_exit_2_and_writes_nothing(words: str, told: str, tmp_path: Path) -> None:
    done = run("-m", "stronghold", *words.split(), "--results", str(tmp_path / "new"))
    assert (done.returncode, done.stdout) == (2, "") and told in done.stderr
    assert not (tmp_path / "new").exists()


def test_an_answer_without_a_pass_says_so() -> None:
    assert (Answer().largest, Answer().failed_above, Answer().is_unlimited) == (0, None, False)
