"""The order of passes: by hand for small pipelines, and properties of all."""

from __future__ import annotations

import pytest

from methods.pipeline.schedule import SCHEDULES, SLOTS, orders, step_seconds

GRID = [(stages, micro_batches) for stages in (1, 2, 3, 5, 8) for micro_batches in (1, 2, 4, 9)]


def told(schedule: str, num_stages: int, num_micro_batches: int) -> list[str]:
    found = orders(schedule, num_stages, num_micro_batches)
    return [" ".join(f"{item.kind}{item.micro_batch}" for item in order) for order in found]


def test_varunas_order_by_hand() -> None:
    """Slot by slot: stage 0 begins R0 in the slot in which stage 1 has done half of B0."""
    assert told("varuna", 2, 2) == ["F0 F1 R0 B0 R1 B1", "F0 B0 F1 B1"]
    assert told("varuna", 2, 3) == ["F0 F1 F2 R0 B0 R1 B1 R2 B2", "F0 B0 F1 B1 F2 B2"]


def test_without_a_limit_the_first_stage_of_four_runs_all_eight_forward_passes_first() -> None:
    """As the original does: only inputs are kept."""
    assert told("varuna", 4, 8)[0].startswith("F0 F1 F2 F3 F4 F5 F6 F7 R0 B0")


def test_the_other_orders_by_hand() -> None:
    assert told("gpipe", 2, 2) == ["F0 F1 R0 B0 R1 B1"] * 2
    assert told("1f1b", 2, 3) == ["F0 F1 R0 B0 F2 R1 B1 R2 B2", "F0 R0 B0 F1 R1 B1 F2 R2 B2"]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), GRID)
def test_every_stage_does_every_pass_once_in_the_order_of_micro_batches(
    schedule: str, num_stages: int, num_micro_batches: int
) -> None:
    every = [*range(num_micro_batches)]
    for number, order in enumerate(orders(schedule, num_stages, num_micro_batches)):
        for kind in "FRB":
            is_spared = kind == "R" and schedule == "varuna" and number == num_stages - 1
            assert [item.micro_batch for item in order if item.kind == kind] == ([] if is_spared else every)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), GRID)
def test_no_order_waits_for_itself(schedule: str, num_stages: int, num_micro_batches: int) -> None:
    """And no step is shorter than its longest stage."""
    passes = [SLOTS] * num_stages
    seconds = step_seconds(orders(schedule, num_stages, num_micro_batches), passes)
    assert seconds >= 3 * num_micro_batches


def test_the_bubble_of_gpipe_is_that_of_its_paper() -> None:
    """With F and R + B as one unit each: (M + P - 1) of both (Huang et al. 2019, section 2.3)."""
    for num_stages, num_micro_batches in GRID:
        passes = [{"F": 1.0, "R": 0.0, "B": 1.0}] * num_stages
        seconds = step_seconds(orders("gpipe", num_stages, num_micro_batches), passes)
        assert seconds == 2 * (num_micro_batches + num_stages - 1)


def test_varuna_saves_the_last_stages_recompute() -> None:
    """Stages of F = R = 1 and B = 2: the last one has 3 slots a micro-batch, the others 4."""
    passes = [SLOTS] * 4
    varuna, gpipe = (step_seconds(orders(name, 4, 64), passes) for name in ("varuna", "gpipe"))
    assert 4 * 64 < varuna < gpipe


@pytest.mark.parametrize(
    ("num_stages", "factor", "wasted_percent"), [(5, 1, 33.3), (10, 1, 39.4), (5, 10, 4.8), (25, 10, 6.6)]
)
def test_the_share_of_time_that_stages_wait(num_stages: int, factor: int, wasted_percent: float) -> None:
    """As drawn from the rules, with `factor` times as many micro-batches as stages; against 4 slots for each."""
    num_micro_batches = factor * num_stages
    seconds = step_seconds(orders("varuna", num_stages, num_micro_batches), [SLOTS] * num_stages)
    assert 100 * (1 - 4 * num_micro_batches / seconds) == pytest.approx(wasted_percent, abs=0.05)


def test_a_message_under_way_delays_what_waits_for_it() -> None:
    """One micro-batch through two stages: F up, and B down, each after a message of 5 s."""
    found = orders("varuna", 2, 1)
    # F, message, F and B above, message, B below: R is done while the message is under way.
    assert step_seconds(found, [SLOTS] * 2, 5.0) == 1 + 5 + 3 + 5 + 2


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ValueError, match="expected varuna or 1f1b or gpipe, got 'zero'"):
        orders("zero", 2, 2)
