"""The search finds the edge there is and reports the edge that is none, on simulated oracles."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.job import Workload
from harness.jobs.size_search import AXES, SizeAnswer, SizeAxis, SizeOutcome, extrapolate, search

sizes = st.integers(1, 500)


def up_to(edge: int) -> Callable[[int], SizeOutcome]:
    return lambda size: SizeOutcome(size <= edge, "device")


@given(edge=sizes, guess=sizes, repeats=st.integers(1, 3))
def test_a_sharp_edge_is_found_from_any_guess(edge: int, guess: int, repeats: int) -> None:
    answer = search(up_to(edge), guess, repeats=repeats)
    assert (answer.largest_size, answer.failing_size, answer.is_sharp) == (edge, edge + 1, True)
    assert answer.passing_sizes.count(edge) == answer.failing_sizes.count(edge + 1) == repeats


@given(edge=st.integers(0, 600), guess=sizes, least_size=st.integers(1, 50), most_size=st.integers(51, 400))
def test_bounds_are_kept_and_reaching_them_is_said(
    edge: int, guess: int, least_size: int, most_size: int
) -> None:
    answer = search(up_to(edge), guess, least_size=least_size, most_size=most_size)
    assert all(least_size <= trial.size <= most_size for trial in answer.trials)
    assert answer.is_unlimited == (edge >= most_size)
    assert answer.largest_size == max(least_size - 1, min(edge, most_size))
    assert answer.failing_size == (None if edge >= most_size else max(least_size, edge + 1))


def test_six_trials_suffice_on_average_where_the_guess_is_ten_percent_off() -> None:
    chance, trials = random.Random(4), []
    for _ in range(4000):
        edge = round(math.exp(chance.uniform(math.log(8), math.log(400))))
        guess = max(1, round(edge * (1 + chance.gauss(0, 0.1))))
        trials.append(len(search(up_to(edge), guess).trials))
    assert statistics.mean(trials) <= 6


@given(
    edge=st.integers(16, 400),
    error=st.floats(-0.5, 1.0),
    start=st.integers(0, 10**6),
    slope=st.integers(10**4, 10**5),
)
def test_two_small_runs_mend_a_plan_that_is_far_off(edge: int, error: float, start: int, slope: int) -> None:
    """Real needs are a line in size, the guess is half to twice as deep: two small runs, the edge, what fails."""
    budget, measured = start + slope * edge + slope // 2, []

    def probe(size: int) -> SizeOutcome:
        need = start + slope * size
        measured.append((size, {"run": need}))
        return SizeOutcome(need <= budget, "device")

    def refine() -> int:
        return max(size for size in range(1, 2000) if extrapolate(measured, size) <= budget)

    answer = search(probe, round(edge * (1 + error)), refine=refine)
    assert (answer.largest_size, answer.failing_size) == (edge, edge + 1)
    assert len(answer.trials) <= 4


def test_beside_a_mended_guess_that_fails_the_next_size_below_is_tried_first() -> None:
    answer = search(up_to(8), 8, refine=lambda: 9)
    assert [trial.size for trial in answer.trials] == [2, 4, 9, 8]


@given(flaky=st.integers(1, 400), guess=sizes, repeats=st.integers(1, 3), seed=st.integers())
def test_a_size_that_passes_by_chance_lies_in_the_interval(
    flaky: int, guess: int, repeats: int, seed: int
) -> None:
    chance = random.Random(seed)
    answer = search(
        lambda size: SizeOutcome(size < flaky or (size == flaky and chance.random() < 0.5)),
        guess,
        repeats=repeats,
    )
    assert answer.failing_size is not None and answer.largest_size <= flaky <= answer.failing_size
    if flaky in answer.passing_sizes and flaky in answer.failing_sizes:
        assert (answer.largest_size, answer.failing_size, answer.contradicting_sizes()) == (
            flaky - 1,
            flaky + 1,
            [flaky],
        )


@given(edge=sizes, width=st.integers(1, 20), guess=sizes, repeats=st.integers(1, 3), seed=st.integers())
def test_a_blurred_edge_is_an_interval_within_the_blur(
    edge: int, width: int, guess: int, repeats: int, seed: int
) -> None:
    """All sizes up to `edge` pass, all beyond edge + width fail."""
    chance = random.Random(seed)
    answer = search(
        lambda size: SizeOutcome(size <= edge or (size <= edge + width and chance.random() < 0.5)),
        guess,
        repeats=repeats,
        max_trials=1000,
    )
    assert (
        answer.failing_size is not None
        and edge <= answer.largest_size < answer.failing_size <= edge + width + 1
    )


@pytest.mark.parametrize("guess", [20, 10, 40, 19])
def test_a_failure_below_a_pass_is_found_beside_the_edge_and_reported_as_an_interval(guess: int) -> None:
    answer = search(lambda size: SizeOutcome(size <= 30 and size != 20), guess=guess, repeats=2)
    if 20 in answer.failing_sizes:
        assert (answer.largest_size, answer.failing_size, answer.is_sharp) == (19, 31, False)
        assert answer.contradicting_sizes()[0] == 20 and answer.contradicting_sizes()[-1] == 30
    else:
        assert (answer.largest_size, answer.failing_size, answer.is_sharp) == (30, 31, True)


@given(passes=st.lists(st.booleans(), min_size=60, max_size=60), guess=st.integers(1, 60))
def test_no_trial_contradicts_the_interval_whatever_the_oracle(passes: list[bool], guess: int) -> None:
    answer = search(lambda size: SizeOutcome(passes[size - 1]), guess, most_size=60)
    assert len(answer.trials) <= 40
    assert all(size > answer.largest_size for size in answer.failing_sizes)
    if answer.failing_size is not None:
        assert all(size < answer.failing_size for size in answer.passing_sizes)


def test_an_end_that_is_not_about_size_stops_the_search() -> None:
    answer = search(
        lambda size: SizeOutcome(True) if size < 5 else SizeOutcome(False, stop_reason="at 6: crash"), guess=3
    )
    assert answer.stop_reason == "at 6: crash" and answer.failing_sizes == []
    assert answer.passing_sizes == [3, 4] and not answer.is_sharp


def test_trials_are_bounded() -> None:
    chance = random.Random(2)
    answer = search(lambda size: SizeOutcome(chance.random() < 0.5), guess=200, repeats=5)
    assert len(answer.trials) == 40 and answer.stop_reason == "no edge was found in 40 trials"


def test_two_small_runs_tell_the_published_peak_of_32_layers() -> None:
    """Published log, Megatron-LM, 32 layers: 29775.17 MiB; peaks rehearsed at 4 and 8 layers: 7343.8 and 10545.4."""
    assert extrapolate([(8, {"run": 10545}), (4, {"run": 7344})], 32) == pytest.approx(29775, rel=1e-3)


@given(slopes=st.tuples(*[st.integers(0, 99)] * 2), starts=st.tuples(*[st.integers(0, 9999)] * 2), size=sizes)
def test_each_phase_is_extrapolated_on_its_own(
    slopes: tuple[int, int], starts: tuple[int, int], size: int
) -> None:
    def peaks(size: int) -> dict[str, int]:
        return {name: a * size + b for name, a, b in zip(("build", "step"), slopes, starts, strict=True)}

    assert extrapolate([(2, peaks(2)), (4, peaks(4))], size) == max(peaks(size).values())


def test_an_answer_without_a_pass_says_so() -> None:
    assert (SizeAnswer().largest_size, SizeAnswer().failing_size, SizeAnswer().is_unlimited) == (
        0,
        None,
        False,
    )


LOAD = Workload(num_layers=3, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)


@given(
    quantity=st.sampled_from(AXES),
    seq_len=st.integers(1, 300),
    added_samples=st.integers(1, 6),
    power=st.integers(0, 6),
    size=st.integers(1, 500),
)
def test_each_size_is_larger_than_the_one_before_and_is_that_of_its_workload(
    quantity: str, seq_len: int, added_samples: int, power: int, size: int
) -> None:
    axis = SizeAxis(
        quantity,
        dataclasses.replace(LOAD, seq_len=seq_len, batch_size=added_samples),
        added_samples,
        step=2**power,
    )
    assert axis.amount(size + 1) > axis.amount(size) > 0
    assert axis.size_of(axis.workload_at(size)) == size
    assert axis.workload_at(size).batch_size % added_samples == 0


@pytest.mark.parametrize(
    ("quantity", "sizes"),
    [
        ("layers", [(8, 2, 16), (16, 2, 16), (24, 2, 16), (32, 2, 16)]),
        ("batch", [(3, 2, 16), (3, 4, 16), (3, 6, 16), (3, 8, 16)]),
        ("seq", [(3, 2, 8), (3, 2, 16), (3, 2, 24), (3, 2, 32)]),
        # one sample of each part, then more of them
        ("tokens", [(3, 2, 8), (3, 2, 16), (3, 4, 16), (3, 6, 16)]),
    ],
)
def test_what_grows_grows_alone(quantity: str, sizes: list[tuple[int, int, int]]) -> None:
    """Layers, samples and tokens of the first four sizes, in two parts and steps of 8 layers or tokens."""
    loads = [SizeAxis(quantity, LOAD, 2, 8).workload_at(size) for size in range(1, 5)]
    assert [(load.num_layers, load.batch_size, load.seq_len) for load in loads] == sizes


@pytest.mark.parametrize(
    ("size", "step"), [(0, 1), (31, 1), (32, 1), (63, 1), (64, 2), (4096, 128), (131_072, 4096)]
)
def test_a_step_of_tokens_is_at_most_a_32nd_of_what_should_fit(size: int, step: int) -> None:
    assert SizeAxis("seq", LOAD).with_token_steps(size).step == step
