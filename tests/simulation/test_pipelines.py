"""The pipeline's virtual clock: by hand, and against the rules that make the orders."""

from __future__ import annotations

import itertools
import random

import pytest

from harness.simulation.pipelines import simulate
from methods.pipeline.schedule import SCHEDULES, SLOTS, orders, step_seconds

GRID = [(stages, micro_batches) for stages in (1, 2, 4, 7) for micro_batches in (1, 4, 12)]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), GRID)
def test_without_messages_a_step_takes_what_the_rules_say(num_stages: int, num_micro_batches: int) -> None:
    found = simulate("varuna", [SLOTS] * num_stages, num_micro_batches, is_opportunistic=False)
    assert found.step_seconds == step_seconds(orders("varuna", num_stages, num_micro_batches), [SLOTS] * num_stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_runs_once_and_no_stage_does_two_at_once(schedule: str) -> None:
    draws = random.Random(1)
    found = simulate(schedule, [SLOTS] * 4, 8, 0.7, noise=lambda seconds: seconds * draws.uniform(0.5, 1.5))
    assert len({(done.stage, done.work) for done in found.passes}) == len(found.passes)
    for stage in range(4):
        mine = [done for done in found.passes if done.stage == stage]
        assert len([done for done in mine if done.work.kind == "B"]) == 8
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(mine))


def test_a_late_gradient_lets_a_forward_pass_go_first() -> None:
    """On a slow network the choice saves time, on a fast one it costs none."""
    for send_seconds, saves in ((0.0, False), (1.0, True)):
        chosen, fixed = (
            simulate("varuna", [SLOTS] * 4, 16, send_seconds, is_opportunistic=each).step_seconds
            for each in (True, False)
        )
        assert chosen < fixed if saves else chosen <= fixed * 1.01


def test_the_bubble_is_the_share_that_is_no_pass() -> None:
    """Two stages, one micro-batch, GPipe: 2 x 4 units of work in 8 units of both stages' time."""
    assert simulate("gpipe", [SLOTS] * 2, 1).bubble == pytest.approx(0.5)
