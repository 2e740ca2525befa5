"""The order of passes: by hand for small pipelines, and properties of all."""

from __future__ import annotations

import pytest

from methods.pipeline.schedule import SCHEDULES, SLOTS, orders, simulate_step_seconds

GRID = [(stages, micro_batches) for stages in (1, 2, 3, 5, 8) for micro_batches in (1, 2, 4, 9)]


def order_texts(schedule: str, num_stages: int, num_micro_batches: int) -> list[str]:
    stage_orders = orders(schedule, num_stages, num_micro_batches)
    return [" ".join(f"{item.kind}{item.micro_batch}" for item in order) for order in stage_orders]


def test_varunas_order_by_hand() -> None:
    """Slot by slot: stage 0 begins R0 in the slot in which stage 1 has done half of B0."""
    assert order_texts("varuna", 2, 2) == ["F0 F1 R0 B0 R1 B1", "F0 B0 F1 B1"]
    assert order_texts("varuna", 2, 3) == ["F0 F1 F2 R0 B0 R1 B1 R2 B2", "F0 B0 F1 B1 F2 B2"]


def test_without_a_limit_the_first_stage_of_four_runs_all_eight_forward_passes_first() -> None:
    """As the original does: only inputs are kept."""
    assert order_texts("varuna", 4, 8)[0].startswith("F0 F1 F2 F3 F4 F5 F6 F7 R0 B0")


def test_the_other_orders_by_hand() -> None:
    assert order_texts("gpipe", 2, 2) == ["F0 F1 R0 B0 R1 B1"] * 2
    assert order_texts("1f1b", 2, 3) == ["F0 F1 R0 B0 F2 R1 B1 R2 B2", "F0 R0 B0 F1 R1 B1 F2 R2 B2"]


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
    [seconds] = simulate_step_seconds(schedule, [(passes, num_micro_batches, 0.0)])
    assert seconds >= 3 * num_micro_batches


def test_the_bubble_of_gpipe_is_that_of_its_paper() -> None:
    """With F and R + B as one unit each: (M + P - 1) of both (Huang et al. 2019, section 2.3)."""
    for num_stages, num_micro_batches in GRID:
        passes = [{"F": 1.0, "R": 0.0, "B": 1.0}] * num_stages
        [seconds] = simulate_step_seconds("gpipe", [(passes, num_micro_batches, 0.0)])
        assert seconds == 2 * (num_micro_batches + num_stages - 1)


def test_varuna_saves_the_last_stages_recompute() -> None:
    """Stages of F = R = 1 and B = 2: the last one has 3 slots a micro-batch, the others 4."""
    [varuna], [gpipe] = (
        simulate_step_seconds(name, [([SLOTS] * 4, 64, 0.0)]) for name in ("varuna", "gpipe")
    )
    assert 4 * 64 < varuna < gpipe


# Percent of wasted time with 2 to 10 times as many micro-batches as stages, read from the curves of the authors'
# figure, tools/bubbles.pdf of microsoft/varuna.
WASTED = {
    5: (22.0, 13.2, 11.2, 10.0, 7.0, 6.7, 6.5, 4.8, 4.8),
    10: (24.0, 16.8, 14.1, 11.2, 9.1, 8.5, 7.3, 6.3, 6.1),
    15: (24.7, 17.9, 14.0, 11.5, 9.8, 8.5, 7.5, 6.8, 6.1),
    20: (26.0, 18.4, 14.7, 12.3, 10.1, 9.0, 8.1, 7.0, 6.4),
    25: (26.0, 18.8, 15.1, 12.3, 10.3, 9.2, 8.1, 7.1, 5.2),
    30: (26.0, 19.0, 14.9, 12.3, 10.5, 9.1, 8.0, 7.2, 6.5),
}


def test_stages_wait_as_long_as_the_authors_drew() -> None:
    """By the fixed order, with messages of a hundredth of a pass: 53 of 54 points. The last one breaks the curve that
    all others keep: 25 stages would waste less than 20 and 30."""
    shapes = [(stages, factor * stages) for stages in WASTED for factor in range(2, 11)]
    pipelines = [([SLOTS] * stages, number, 0.01) for stages, number in shapes]
    steps = simulate_step_seconds("varuna", pipelines, is_opportunistic=False)
    wasted = [100 * (1 - 4 * number / seconds) for (_, number), seconds in zip(shapes, steps, strict=True)]
    drawn = [point for curve in WASTED.values() for point in curve]
    far = [
        shape for shape, share, point in zip(shapes, wasted, drawn, strict=True) if abs(share - point) > 0.3
    ]
    assert far == [(25, 250)]


def test_a_message_under_way_delays_what_waits_for_it() -> None:
    """One micro-batch through two stages: F up, and B down, each after a message of 5 s."""
    # F, message, F and B above, message, B below: R is done while the message is under way.
    assert simulate_step_seconds("varuna", [([SLOTS] * 2, 1, 5.0)]) == [1 + 5 + 3 + 5 + 2]


def test_an_unknown_schedule_is_named() -> None:
    with pytest.raises(ValueError, match="expected varuna or 1f1b or gpipe, got 'zero'"):
        orders("zero", 2, 2)
