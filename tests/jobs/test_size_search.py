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
from harness.jobs.size_search import OF, SizeAnswer, SizeAxis, SizeOutcome, extrapolate, search

sizes = st.integers(1, 500)


def up_to(edge: int) -> Callable[[int], SizeOutcome]:
    return lambda size: SizeOutcome(size <= edge, "device")


@given(edge=sizes, guess=sizes, repeats=st.integers(1, 3))
def test_a_sharp_edge_is_found_from_any_guess(edge: int, guess: int, repeats: int) -> None:
    answer = search(up_to(edge), guess, repeats=repeats)
    assert (answer.largest, answer.failed_above, answer.is_sharp) == (edge, edge + 1, True)
    assert answer.passing.count(edge) == answer.failing.count(edge + 1) == repeats


@given(edge=st.integers(0, 600), guess=sizes, least=st.integers(1, 50), most=st.integers(51, 400))
def test_bounds_are_kept_and_reaching_them_is_said(edge: int, guess: int, least: int, most: int) -> None:
    answer = search(up_to(edge), guess, least=least, most=most)
    assert all(least <= trial.size <= most for trial in answer.trials)
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
    assert (answer.largest, answer.failed_above) == (edge, edge + 1)
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
    assert answer.failed_above is not None and answer.largest <= flaky <= answer.failed_above
    if flaky in answer.passing and flaky in answer.failing:
        assert (answer.largest, answer.failed_above, answer.mixed()) == (flaky - 1, flaky + 1, [flaky])


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
        answer.failed_above is not None and edge <= answer.largest < answer.failed_above <= edge + width + 1
    )


@pytest.mark.parametrize("guess", [20, 10, 40, 19])
def test_a_failure_below_a_pass_is_found_beside_the_edge_and_reported_as_an_interval(guess: int) -> None:
    answer = search(lambda size: SizeOutcome(size <= 30 and size != 20), guess=guess, repeats=2)
    if 20 in answer.failing:
        assert (answer.largest, answer.failed_above, answer.is_sharp) == (19, 31, False)
        assert answer.mixed()[0] == 20 and answer.mixed()[-1] == 30
    else:
        assert (answer.largest, answer.failed_above, answer.is_sharp) == (30, 31, True)


@given(passes=st.lists(st.booleans(), min_size=60, max_size=60), guess=st.integers(1, 60))
def test_no_trial_contradicts_the_interval_whatever_the_oracle(passes: list[bool], guess: int) -> None:
    answer = search(lambda size: SizeOutcome(passes[size - 1]), guess, most=60)
    assert len(answer.trials) <= 40
    assert all(size > answer.largest for size in answer.failing)
    if answer.failed_above is not None:
        assert all(size < answer.failed_above for size in answer.passing)


def test_an_end_that_is_not_about_size_stops_the_search() -> None:
    answer = search(
        lambda size: SizeOutcome(True) if size < 5 else SizeOutcome(False, stop="at 6: crash"), guess=3
    )
    assert answer.stopped == "at 6: crash" and answer.failing == []
    assert answer.passing == [3, 4] and not answer.is_sharp


def test_trials_are_bounded() -> None:
    chance = random.Random(2)
    answer = search(lambda size: SizeOutcome(chance.random() < 0.5), guess=200, repeats=5)
    assert len(answer.trials) == 40 and answer.stopped == "no edge was found in 40 trials"


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
    assert (SizeAnswer().largest, SizeAnswer().failed_above, SizeAnswer().is_unlimited) == (0, None, False)


LOAD = Workload(num_layers=3, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=97)


@given(
    of=st.sampled_from(OF),
    seq_len=st.integers(1, 300),
    parts=st.integers(1, 6),
    power=st.integers(0, 6),
    number=st.integers(1, 500),
)
def test_each_size_is_larger_than_the_one_before_and_is_that_of_its_workload(
    of: str, seq_len: int, parts: int, power: int, number: int
) -> None:
    axis = SizeAxis(of, dataclasses.replace(LOAD, seq_len=seq_len, batch_size=parts), parts, step=2**power)
    assert axis.amount(number + 1) > axis.amount(number) > 0
    assert axis.number(axis.grown(number)) == number
    assert axis.grown(number).batch_size % parts == 0


@pytest.mark.parametrize(
    ("of", "sizes"),
    [
        ("layers", [(8, 2, 16), (16, 2, 16), (24, 2, 16), (32, 2, 16)]),
        ("batch", [(3, 2, 16), (3, 4, 16), (3, 6, 16), (3, 8, 16)]),
        ("seq", [(3, 2, 8), (3, 2, 16), (3, 2, 24), (3, 2, 32)]),
        # one sample of each part, then more of them
        ("tokens", [(3, 2, 8), (3, 2, 16), (3, 4, 16), (3, 6, 16)]),
    ],
)
def test_what_grows_grows_alone(of: str, sizes: list[tuple[int, int, int]]) -> None:
    """Layers, samples and tokens of the first four sizes, in two parts and steps of 8 layers or tokens."""
    loads = [SizeAxis(of, LOAD, 2, 8).grown(number) for number in range(1, 5)]
    assert [(load.num_layers, load.batch_size, load.seq_len) for load in loads] == sizes


@pytest.mark.parametrize(
    ("number", "step"), [(0, 1), (31, 1), (32, 1), (63, 1), (64, 2), (4096, 128), (131_072, 4096)]
)
def test_a_step_of_tokens_is_at_most_a_32nd_of_what_should_fit(number: int, step: int) -> None:
    assert SizeAxis("seq", LOAD).fitting(number).step == step
