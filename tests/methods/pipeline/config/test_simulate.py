"""The pipelines' virtual clock: by hand, by properties, and against published and recorded trials."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harness.simulation.event_core import KINDS, F
from methods.pipeline.config.simulate import Network, simulate_step
from methods.pipeline.schedule import SCHEDULES, SLOTS, units

NOISY = Network(0.7, jitter=0.3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_runs_once_and_no_stage_does_two_at_once(schedule: str) -> None:
    run = simulate_step(schedule, [SLOTS] * 4, 8, NOISY, pass_jitter=0.3, keeps_units=True)
    assert run.starts is not None and run.ends is not None
    for stage, queue in enumerate(units(schedule, [(4, 8)])[0]):
        both = zip(run.starts[:, stage].ravel(), run.ends[:, stage].ravel(), strict=True)
        spans = sorted(span for span in both if not np.isnan(span).any())
        assert len(spans) == np.count_nonzero(queue)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_pass_begins_before_what_it_needs_is_there(schedule: str) -> None:
    run = simulate_step(schedule, [SLOTS] * 5, 12, NOISY, pass_jitter=0.3, keeps_units=True)
    assert run.starts is not None and run.ends is not None
    starts, ends = (dict(zip(KINDS, times, strict=True)) for times in (run.starts, run.ends))
    assert (starts["F"][1:] >= ends["F"][:-1]).all() and (starts["B"][:-1] >= ends["B"][1:]).all()
    recomputed = np.nan_to_num(ends["R"])
    assert (starts["B"] >= recomputed).all() and (np.nan_to_num(starts["R"], nan=np.inf) >= ends["F"]).all()
    if schedule != "varuna":
        assert (starts["R"][:-1] >= ends["B"][1:]).all()


def test_a_late_gradient_lets_a_forward_pass_go_first() -> None:
    """On a slow network the choice saves time, on a fast one it costs none."""
    for send_seconds, saves in ((0.0, False), (1.0, True)):
        chosen, fixed = (
            simulate_step(
                "varuna", [SLOTS] * 4, 16, Network(send_seconds), is_opportunistic=is_opportunistic
            ).step_seconds
            for is_opportunistic in (True, False)
        )
        assert chosen < fixed if saves else chosen <= fixed * 1.01


def test_the_bubble_is_the_share_that_is_no_pass() -> None:
    """Two stages, one micro-batch, GPipe: 2 x 4 units of work in 8 units of both stages' time."""
    assert simulate_step("gpipe", [SLOTS] * 2, 1).bubble == pytest.approx(0.5)


def test_a_link_takes_so_many_messages_at_once() -> None:
    """Two stages by GPipe, messages of 5 s up. One at once: the third arrives after 1 + 3 x 5 s; two: it waits for the
    first one's place. Above all three forward passes, then 3 x 3 s; below the last gradient, and its R and B."""
    passes = [{"F": 1.0, "R": 0.0, "B": 0.0}, {"F": 1.0, "R": 0.0, "B": 0.0}]
    for at_once, arrives in ((1, 1 + 3 * 5), (2, 6 + 5), (3, 3 + 5)):
        run = simulate_step("gpipe", passes, 3, Network(5.0, sends_at_once=at_once), keeps_units=True)
        assert run.ends is not None and run.ends[F - 1, 1, 2] == arrives + 1


def test_messages_between_machines_are_long() -> None:
    """Four stages, two on a machine: only the middle cut's message takes long."""
    network = Network(1.0, long_send_seconds=7.0, stages_per_machine=2)
    assert network.message_seconds(4) == [1.0, 7.0, 1.0]
    run = simulate_step("gpipe", [SLOTS] * 4, 1, network)
    assert run.step_seconds == 4 * 1 + 9 + 4 * 3 + 9


def test_replicas_end_with_their_sum_and_wait_for_the_slowest() -> None:
    network = Network(0.5, jitter=0.3, sum_seconds=3.0)
    one, four = (
        simulate_step("varuna", [SLOTS] * 4, 16, network, num_replicas=number).step_seconds
        for number in (1, 4)
    )
    assert four > one + 3.0
    assert simulate_step("gpipe", [SLOTS], 2, network, num_replicas=2).step_seconds == 2 * 4 + 3.0


# Trials recorded by another simulation of the same rules, relative to Varuna's choosing order: GPipe, 1F1B, efficiency.
TRIALS = {
    (9, 64, 0.05, 0.0): (1.01, 1.00, 0.92),
    (9, 64, 0.5, 0.3): (1.05, 1.23, 0.86),
    (9, 64, 2.0, 0.3): (1.05, 1.71, 0.81),
    (18, 128, 0.5, 0.3): (1.04, 1.25, 0.84),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_jitter_costs_1f1b_as_much_as_in_the_recorded_trials(trial: tuple[int, int, float, float]) -> None:
    """And GPipe and Varuna little. There a stage's noise was drawn otherwise: within 0.055."""
    num_stages, number, send_seconds, jitter = trial
    spared = [SLOTS] * (num_stages - 1) + [{**SLOTS, "R": 0}]
    runs = [
        simulate_step(name, spared, number, Network(send_seconds, jitter=jitter), seed=seed).step_seconds
        for name in ("varuna", "gpipe", "1f1b")
        for seed in range(3)
    ]
    varuna, gpipe, alternating = (sum(runs[start : start + 3]) / 3 for start in (0, 3, 6))
    assert (gpipe / varuna, alternating / varuna, 4 * number / varuna) == pytest.approx(
        TRIALS[trial], abs=0.055
    )


def test_a_hundred_stages_and_a_thousand_micro_batches_lose_little_to_jitter() -> None:
    """Three hundred thousand passes: at least those of one stage, and at most a third more."""
    run = simulate_step("varuna", [SLOTS] * 100, 1000, Network(0.5, jitter=0.3))
    assert 4 * 1000 < run.step_seconds < 1.3 * 4 * 1000
