"""Stages and micro-batches chosen by a written profile, against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from harness.core.job import Room, Workload
from harness.core.method import create
from harness.core.rates import Rates
from methods.pipeline.config.auto_config import AutoConfig, ConfigRow, predict_steps
from methods.pipeline.config.partition import gpt_stages, group_sections
from methods.pipeline.config.profile import (
    PROFILE_FILE,
    GptCosts,
    Message,
    Profile,
    Section,
    SectionCost,
    Sum,
    read_profile,
)
from methods.pipeline.schedule import simulate_step_seconds

MANY = 1000.0  # seconds


def cost(size: int, unit: float = 1.0, **more: Any) -> SectionCost:
    """Forward pass and recompute take one unit for each sample, a backward pass two."""
    known = {
        "forward_seconds": size * unit,
        "recompute_seconds": size * unit,
        "backward_seconds": 2 * size * unit,
        "copy_seconds": 0.0,
        "saved_bytes": 0,
        "peak_bytes": 0,
        "activation_bytes": 0,
    }
    return SectionCost(size, **{**known, **more})


def profile(
    *sections: list[SectionCost], sum_seconds: float = 0.0, update_seconds: float = 0.0, **more: Any
) -> Profile:
    sums = [Sum(2, 80, sum_seconds), Sum(2, 800, sum_seconds)]
    sections_of_costs = [Section(10, update_seconds, costs) for costs in sections]
    return Profile(
        **{
            "fp16": False,
            "device_bytes": None,
            "sections": sections_of_costs,
            "messages": [],
            "sums": sums,
            **more,
        }
    )


def configured(
    folder: Path, written: Profile, gpus: int, batch: int, capacity: int | None = None
) -> AutoConfig:
    written.write(folder)
    return AutoConfig(gpus, gpus, batch, folder, capacity)


@pytest.mark.parametrize(
    ("sum_seconds", "expected"),
    [
        # Two replicas: two micro-batches of two sections, each 1 and 2 s, then the sum.
        (1.0, (1, 1, 2 * 2 * 3 + 1.0)),
        # Two stages: the lower one F0 F1 F2, then F3 before R0, as B0's gradient is late; it is never idle.
        (MANY, (2, 1, 4 + 4 * 3.0)),
    ],
)
def test_the_best_of_two_devices_depends_on_the_sum(
    tmp_path: Path, sum_seconds: float, expected: tuple
) -> None:
    assert (
        configured(tmp_path, profile([cost(1)], [cost(1)], sum_seconds=sum_seconds), 2, 4).get_min()
        == expected
    )


def test_stages_are_cut_by_time(tmp_path: Path) -> None:
    """Below 4 s a unit, in the last stage 3: 12 and 15 s are the least; by count it would be 8 and 18."""
    written = profile([cost(1)], [cost(1)], [cost(1)], [cost(1, 5.0)])
    two = next(row for row in configured(tmp_path, written, 2, 2).table() if row.num_stages == 2)
    assert two.cuts == (2,)
    assert two.passes == ({"F": 3.0, "R": 3.0, "B": 6.0}, {"F": 5.0, "R": 0.0, "B": 10.0})


def test_grouping_is_the_best_of_all() -> None:
    draws = random.Random(0)
    for _ in range(30):
        below, last = ([draws.randint(1, 9) for _ in range(6)] for _ in range(2))
        weighs = [draws.random() > 0.3 for _ in below]
        for number, best in enumerate(group_sections(below, last, weighs), start=1):
            longest = {}
            for cuts in itertools.combinations(range(5), number - 1):
                ends = [0, *(index + 1 for index in cuts), 6]
                stages = [slice(*pair) for pair in itertools.pairwise(ends)]
                if all(any(weighs[stage]) for stage in stages):
                    longest[cuts] = max(
                        *(sum(below[stage]) for stage in stages[:-1]), sum(last[stages[-1]]), 0
                    )
            assert (best is None) == (not longest)
            assert best is None or longest[tuple(best)] == min(longest.values())


# ---- A GPT by a machine's rates


def test_a_gpts_bytes_are_those_of_the_plan_and_its_cuts_are_between_layers() -> None:
    workload = Workload(num_layers=6, hidden_size=64, num_heads=4, seq_len=32, batch_size=8, vocab_size=200)
    rows = AutoConfig(4, 4, 8, GptCosts(workload, Rates(1e9), [1, 2, 4])).table()
    assert {row.num_stages for row in rows} == {1, 2, 3, 4}
    for row in rows:
        ends = [stage.layers.stop - 1 for stage in gpt_stages(workload, row.num_stages)]
        assert list(row.cuts) == ends[:-1]
        if row.num_ranks == 4:
            options = {"world_size": 4, "num_stages": row.num_stages, "chunk_size": row.chunk_size}
            plan = create("varuna", options).plan(workload, Room(rates=Rates(1e9)))
            assert (row.device_bytes, row.step_seconds) == (plan.device_bytes, plan.step_seconds)


def test_without_rates_the_most_stages_are_chosen_with_the_smallest_micro_batches() -> None:
    workload = Workload(num_layers=6, hidden_size=64, num_heads=4, seq_len=32, batch_size=8, vocab_size=200)
    row = AutoConfig(4, 4, 8, GptCosts(workload, None, [1, 2, 4])).best()
    assert (row.num_stages, row.chunk_size) == (4, 1)


# ---- Memory


def fat(size: int) -> SectionCost:
    """A larger micro-batch takes no longer."""
    return cost(size, 1 / size, saved_bytes=50 * size, peak_bytes=100 * size)


@pytest.mark.parametrize(("capacity", "chunk"), [(None, 2), (620, 2), (619, 1), (470, 1)])
def test_a_limit_of_memory_excludes_larger_micro_batches(
    tmp_path: Path, capacity: int | None, chunk: int
) -> None:
    """One device, two sections: 16 bytes for each of 20 parameters, what the first section keeps, the second's peak."""
    config = configured(tmp_path, profile([fat(1), fat(2)], [fat(1), fat(2)]), 1, 4, capacity)
    assert config.get_min()[:2] == (1, chunk)
    assert {row.chunk_size: row.device_bytes for row in config.table()} == {
        2: 320 + 100 + 200,
        1: 320 + 50 + 100,
    }


def test_where_nothing_fits_it_says_by_how_much(tmp_path: Path) -> None:
    config = configured(tmp_path, profile([fat(1), fat(2)], [fat(1), fat(2)]), 1, 4, 400)
    with pytest.raises(ValueError) as error:
        config.get_min()
    assert str(error.value).startswith(
        "nothing fits: in 1 stage of micro-batches of 1 a device needs 470 bytes of memory, 70 bytes more than the 400"
    )
    assert "\n" not in str(error.value) and not any(row.fits for row in config.table())


def test_a_size_that_one_section_lacked_memory_for_is_left_out(tmp_path: Path) -> None:
    config = configured(tmp_path, profile([fat(1), fat(2)], [fat(1)]), 1, 4)
    assert [row.chunk_size for row in config.table()] == [1]


def test_a_profile_without_sizes_for_the_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="at most 4, the batch size, got 8; try to profile smaller micro-batches"
    ):
        configured(tmp_path, profile([fat(8)]), 1, 4)
    with pytest.raises(ValueError, match="the batch size, got none;"):
        configured(tmp_path, profile([]), 1, 4)


# ---- All numbers of stages


def test_stages_need_not_divide_the_devices(tmp_path: Path) -> None:
    """Three stages of four devices: two would need 320 bytes of weights alone."""
    config = configured(tmp_path, profile([cost(1)], [cost(1)], [cost(1)]), 4, 4, 319)
    assert config.get_min()[:2] == (3, 1)
    assert {row.num_stages: row.num_replicas for row in config.table()} == {1: 4, 2: 2, 3: 1}
    assert config.table()[0].stage_to_rank_map == "0;1;2;"


def test_replicas_share_the_batch_evenly(tmp_path: Path) -> None:
    [row] = configured(tmp_path, profile([cost(1)]), 3, 4).table()
    assert (row.num_replicas, row.num_micro_batches) == (2, 2)


def test_the_slowest_stages_update_ends_a_step(tmp_path: Path) -> None:
    """Two sections of 3 s, each with an update of 5 s: with one stage both."""
    rows = configured(tmp_path, profile([cost(1)], [cost(1)], update_seconds=5.0), 2, 4).table()
    assert {row.num_stages: row.update_seconds for row in rows} == {1: 10.0, 2: 5.0}
    assert next(row for row in rows if row.num_stages == 1).step_seconds == 2 * 2 * 3 + 10.0


def test_a_section_for_each_device_may_be_a_stage(tmp_path: Path) -> None:
    """The 8.3 B GPT's 72 layers and its head, with messages 16 times as fast as a pass."""
    draws = random.Random(0)
    sections = [[cost(1, (1 + draws.random() / 5) / 50, activation_bytes=1)] for _ in range(73)]
    written = profile(*sections, messages=[Message(False, 1, 0.006)])
    rows = configured(tmp_path, written, 73, 73).table()
    assert {row.num_stages for row in rows} == {*range(1, 74)}


# ---- The prediction


@pytest.mark.parametrize("send_seconds", [0.0, 0.3, 1.5])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 200), (4, 200), (9, 256), (16, 300)])
def test_many_micro_batches_are_predicted_as_the_rules_have_it(
    num_stages: int, num_micro_batches: int, send_seconds: float
) -> None:
    passes = [{"F": 1.0, "R": float(stage < num_stages - 1), "B": 2.0} for stage in range(num_stages)]
    row = ConfigRow(num_stages, 1, 1, num_micro_batches, 0, True, (), tuple(passes), send_seconds, 0.0, 0.0)
    [exact] = simulate_step_seconds("varuna", [(passes, num_micro_batches, send_seconds)])
    assert predict_steps([row]) == pytest.approx([exact], rel=0.015)
    assert row.least_seconds <= exact + 1e-9


def test_the_choice_is_the_best_of_the_table(tmp_path: Path) -> None:
    draws = random.Random(1)
    for _ in range(10):
        sections = [[cost(size, draws.random(), activation_bytes=size) for size in (1, 2)] for _ in range(5)]
        messages = [Message(True, 1, draws.random())]
        config = configured(
            tmp_path, profile(*sections, sum_seconds=draws.random() * 9, messages=messages), 8, 24
        )
        best = config.table()[0]
        assert config.get_min() == (best.num_stages, best.chunk_size, best.step_seconds)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, {1: "passes", 2: "passes"}),
        ({"sum_seconds": MANY}, {1: "replicas' sums", 2: "passes"}),
        ({"update_seconds": MANY}, {1: "updates", 2: "updates"}),
        ({"messages": [Message(True, 1, MANY)]}, {1: "passes", 2: "waits for other stages"}),
    ],
)
def test_a_row_names_what_takes_most_of_its_step(tmp_path: Path, seconds: dict, expected: dict) -> None:
    sections = [[cost(1, activation_bytes=1)]] * 2
    rows = configured(tmp_path, profile(*sections, **seconds), 2, 4).table()
    assert {row.num_stages: row.binds for row in rows} == expected


def test_messages_across_machines_count_where_there_are_several(tmp_path: Path) -> None:
    """Twice the bytes of the one measured, and the copy."""
    sections = [[cost(1, activation_bytes=200, copy_seconds=0.5)]] * 2
    messages = [Message(True, 100, 1.0), Message(False, 100, 10.0)]
    configured(tmp_path, profile(*sections, messages=messages), 2, 4)
    for gpus_per_vm, seconds in ((2, 2.5), (1, 20.5)):
        rows = AutoConfig(2, gpus_per_vm, 4, tmp_path).table()
        assert next(row for row in rows if row.num_stages == 2).send_seconds == seconds


def test_a_larger_ring_passes_on_more(tmp_path: Path) -> None:
    """Of ten parameters 40 bytes: half of the bytes each way with 2 ranks, three quarters with 4."""
    [row] = configured(tmp_path, profile([cost(1)], sum_seconds=2.0), 4, 4).table()
    assert row.sum_seconds == pytest.approx(3.0)


def test_ranks_that_share_a_core_take_the_sum_of_their_work(tmp_path: Path) -> None:
    """Two ranks on one core, two sections: replicas of 2 + 4 s each never wait; stages of 2 x 4 and 2 x 3 s wait 4 s of
    18 in a step of 9, in which the other one has the core. With a core each there is nothing to share."""
    written = profile([cost(1)], [cost(1)])
    for served, expected in ((1.0, {1: 12.0, 2: 14.0}), (2.0, {1: 6.0, 2: 9.0})):
        shared = dataclasses.replace(written, crowding=2.0 / served, num_ranks=2, num_served=served)
        rows = configured(tmp_path, shared, 2, 2).table()
        assert {row.num_stages: row.step_seconds for row in rows} == expected


# ---- Files and numbers that are none


def test_a_profile_is_read_as_written(tmp_path: Path) -> None:
    written = profile([fat(1)], messages=[Message(True, 1, 0.1)])
    written.write(tmp_path / "new")
    assert read_profile(tmp_path / "new") == written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sections": []}, "sections: expected at least one, got none"),
        (
            {"sums": [{"num_ranks": 2, "num_bytes": 1, "seconds": -1.0}]},
            "seconds: expected at least 0, got -1.0",
        ),
        (
            {"sections": [{"num_params": 1, "update_seconds": 0.0, "costs": [dataclasses.asdict(cost(0))]}]},
            "expected costs of ascending sizes from 1",
        ),
        ({"fp16": None}, "fp16: expected a valid boolean, got None"),
    ],
)
def test_what_is_no_profile_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = json.loads(profile([cost(1)]).write(tmp_path).read_text())
    (tmp_path / PROFILE_FILE).write_text(json.dumps({**data, **change}))
    with pytest.raises(ValueError) as error:
        read_profile(tmp_path)
    assert message in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_a_folder_without_a_profile_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"profile.json: no such file; try Profiler\(...\).profile_all"):
        read_profile(tmp_path)
    (tmp_path / PROFILE_FILE).write_text("{")
    with pytest.raises(ValueError, match="expected a profile: "):
        read_profile(tmp_path)


def test_numbers_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_gpus: expected at least 1, got 0"):
        configured(tmp_path, profile([cost(1)]), 0, 4)
