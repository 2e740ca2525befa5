"""Stages of the published GPT: their bytes against those that their ranks need."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.core import hub_config
from harness.core.job import Room, Workload
from harness.core.method import create
from harness.core.rates import Rates
from methods.pipeline.config.partition import PipelineShape, gpt_stages, passes_of, stage_bytes
from methods.pipeline.config.simulate import simulate_step
from tests.support.configured import config_of
from tests.support.ranks import on_ranks
from tests.support.training import small_bytes

SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "seq_len": 64, "batch_size": 8}
# Stages, replicas, schedule, samples of a micro-batch, words, dtype; of a model by its config.json its family.
JOBS: list[tuple[Any, ...]] = [
    (1, 1, "varuna", 2, 4000, "bf16"),
    (1, 2, "varuna", 1, 250, "fp32"),
    (2, 1, "varuna", 1, 4000, "fp32"),
    (2, 2, "varuna", 2, 250, "fp32"),
    (4, 1, "varuna", 1, 250, "bf16"),
    (4, 1, "varuna", 2, 4000, "fp32"),
    (2, 1, "1f1b", 1, 4000, "bf16"),
    (2, 2, "1f1b", 1, 250, "fp32"),
    (4, 1, "1f1b", 1, 4000, "fp32"),
    (2, 1, "gpipe", 1, 4000, "fp32"),
    (2, 2, "gpipe", 2, 4000, "bf16"),
    (4, 1, "gpipe", 1, 250, "fp32"),
    (2, 1, "varuna", 1, 4000, "fp32", "llama"),
    (1, 1, "varuna", 2, 4000, "bf16", "qwen2"),
    (2, 1, "1f1b", 1, 4000, "bf16", "qwen2"),
]


@pytest.fixture(scope="module")
def peaks() -> dict[Any, list[int]]:
    """By job, every rank's."""
    jobs = [
        {
            "kind": "peak",
            "ranks": pipeline_job[0] * pipeline_job[1],
            "workload": dataclasses.asdict(workload_of(pipeline_job)),
            "options": {
                "num_stages": pipeline_job[0],
                "schedule": pipeline_job[2],
                "chunk_size": pipeline_job[3],
            },
        }
        for pipeline_job in JOBS
    ]
    results = on_ranks(4, "tests.methods.pipeline.trainings:on_this_rank", jobs)
    return {pipeline_job: [ranks[number] for ranks in results] for number, pipeline_job in enumerate(JOBS)}


def workload_of(pipeline_job: Any) -> Workload:
    if len(pipeline_job) == 6:
        return Workload(**SIZES, vocab_size=pipeline_job[4], dtype=pipeline_job[5])
    config = config_of(
        pipeline_job[6],
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        vocab_size=pipeline_job[4],
        max_position_embeddings=64,
    )
    sizes = {**hub_config.sizes_of(config), "seq_len": 64, "batch_size": 8, "dtype": pipeline_job[5]}
    return Workload(**sizes, model=pipeline_job[6], config=hub_config.text_of(config))


@pytest.mark.heavy
@pytest.mark.parametrize("pipeline_job", JOBS, ids=str)
def test_the_plan_of_each_stage_is_its_peak_and_at_most_a_quarter_more(pipeline_job: Any, peaks: Any) -> None:
    """GPipe's last stage included, which keeps a gradient of the head for each micro-batch."""
    num_stages, num_replicas, schedule, chunk_size, *_ = pipeline_job
    workload = workload_of(pipeline_job)
    shape = PipelineShape(num_stages, num_replicas, chunk_size, schedule)
    for number, stage in enumerate(gpt_stages(workload, num_stages)):
        planned = sum(stage_bytes(workload, stage, number, shape).values())
        peak = peaks[pipeline_job][number]
        assert peak - small_bytes(workload) <= planned <= 1.25 * peak, (str(stage), planned / peak)


# ---- The choice by rates

CHOSEN = Workload(num_layers=8, hidden_size=256, num_heads=4, seq_len=64, batch_size=16, vocab_size=3000)
FLOPS_PER_SECOND = 1e10


def seconds_by_hand(num_stages: int, chunk_size: int, schedule: str) -> float:
    """Of a step of four ranks: 24 T D^2 + 2 T^2 D FLOPs a layer and sample, 6 T V D the head."""
    tokens, size = CHOSEN.seq_len, CHOSEN.hidden_size
    layer = chunk_size * (24 * tokens * size**2 + 2 * tokens**2 * size) / FLOPS_PER_SECOND
    head = chunk_size * 6 * tokens * CHOSEN.vocab_size * size / FLOPS_PER_SECOND
    passes = []
    for stage in gpt_stages(CHOSEN, num_stages):
        count = stage.num_layers
        passes.append({"F": count * layer + head * stage.is_last, "R": count * layer, "B": 2 * count * layer})
    num_micro_batches = CHOSEN.batch_size * num_stages // 4 // chunk_size
    return simulate_step(schedule, passes, num_micro_batches).step_seconds


@pytest.mark.parametrize(("num_stages", "is_host"), [(1, False), (4, False), (4, True)])
def test_a_step_ends_with_the_update_of_the_largest_stage(num_stages: int, is_host: bool) -> None:
    """Of 28 bytes a parameter; ranks of a host share its memory, as they share its cores."""
    rates = Rates(FLOPS_PER_SECOND, device_bytes_per_second=1e9, is_host=is_host)
    options = {"world_size": 4, "num_stages": num_stages, "chunk_size": 1}
    plan = create("varuna", options).plan(CHOSEN, Room(rates=rates))
    num_params = max(stage.num_params(CHOSEN) for stage in gpt_stages(CHOSEN, num_stages))
    seconds = seconds_by_hand(num_stages, 1, "varuna") + 28 * num_params / 1e9
    assert plan.step_seconds == pytest.approx(seconds * (4 if is_host else 1))


@pytest.mark.parametrize("schedule", ["varuna", "1f1b", "gpipe"])
@pytest.mark.parametrize("room", [1.0, 0.6, 0.45])
def test_the_plan_chooses_the_fastest_stages_and_micro_batches_that_fit(schedule: str, room: float) -> None:
    """Of all, with room for a part of what one stage takes."""
    rates = Rates(FLOPS_PER_SECOND)
    sizes = [
        (stages, chunk)
        for stages in (1, 2, 4)
        for chunk in (1, 2, 4, 8, 16)
        if chunk <= 4 * stages and (schedule != "1f1b" or 4 * stages // chunk >= stages)
    ]
    plans = {
        (stages, chunk): create(
            "varuna", {"world_size": 4, "num_stages": stages, "chunk_size": chunk, "schedule": schedule}
        ).plan(CHOSEN, Room(rates=rates))
        for stages, chunk in sizes
    }
    for (stages, chunk), plan in plans.items():
        assert plan.step_seconds == pytest.approx(seconds_by_hand(stages, chunk, schedule)), (stages, chunk)
    device_bytes = int(room * plans[1, 4].device_bytes)
    fastest = min(
        (size for size in sizes if plans[size].device_bytes <= device_bytes),
        key=lambda size: (round(seconds_by_hand(size[0], size[1], schedule), 9), -size[1]),
    )
    chosen = create("varuna", {"world_size": 4, "schedule": schedule}).plan(
        CHOSEN, Room(device_bytes, rates=rates)
    )
    assert (chosen.options["num_stages"], chosen.options["chunk_size"]) == fastest
    assert (fastest[0] == 1) == (room == 1.0)


def test_the_head_s_passes_take_the_head_s_own_rate() -> None:
    """By hand: four samples' FLOPs of the layers at one rate, those of the head at another."""
    load = Workload(num_layers=2, hidden_size=64, num_heads=4, seq_len=32, vocab_size=512)
    one = dataclasses.replace(load, batch_size=1)
    rates = Rates(
        1e9,
        inbound_bytes_per_second=1e9,
        outbound_bytes_per_second=1e9,
        host_adam_params_per_second=1e8,
        head_flops_per_second=1e8,
    )
    (stage,) = gpt_stages(load, 1)
    seconds = passes_of(load, stage, 4, rates)
    assert seconds["F"] == pytest.approx(4 * (2 * one.layer_flops / 1e9 + one.head_flops_per_step / 1e8))
    assert seconds["R"] == pytest.approx(4 * 2 * one.layer_flops / 1e9) and seconds["B"] == pytest.approx(
        2 * seconds["R"]
    )
