"""What fits in any stages and micro-batches is found, and what is said to be needed is the least: against every
configuration there is, by the bytes of its stages."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

from harness.core.job import Budget, Job, Workload
from harness.core.method import create
from harness.core.rates import Rates
from harness.plan.fit import resolve
from methods.pipeline.config.partition import PipelineShape, gpt_stages, stage_bytes
from methods.pipeline.schedule import SCHEDULES
from tests.support.training import tiny

NUM_BUDGETS = 200
RATES = Rates(
    1e9, inbound_bytes_per_second=1e9, outbound_bytes_per_second=1e9, host_adam_params_per_second=1e8
)
Options = dict[str, Any]


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def every_need(workload: Workload, options: Options) -> list[int]:
    """Device bytes of the rank that needs most, of every division of the ranks and of the samples."""
    needs, ranks, schedule = [], options["world_size"], options["schedule"]
    for num_stages in [options["num_stages"]] if "num_stages" in options else divisors(ranks):
        num_replicas = ranks // num_stages
        if num_stages > workload.num_layers or workload.batch_size % num_replicas:
            continue
        stages = gpt_stages(workload, num_stages)
        for chunk_size in divisors(workload.batch_size // num_replicas):
            if schedule == "1f1b" and workload.batch_size // num_replicas // chunk_size < num_stages:
                continue
            shape = PipelineShape(num_stages, num_replicas, chunk_size, schedule)
            of_stages = [stage_bytes(workload, stage, number, shape) for number, stage in enumerate(stages)]
            needs.append(max(sum(need.values()) for need in of_stages))
    return needs


def random_case(number: int) -> tuple[Workload, Options, Budget]:
    """A workload, what of a configuration is given, and a budget around the needs of all there are, with a host that
    has room for all."""
    rng = random.Random(number)
    while True:
        sizes = {
            "batch_size": (1, 4, 6, 8),
            "vocab_size": (11, 101, 997),
            "seq_len": (16, 64),
            "num_layers": range(1, 10),
        }
        workload = tiny(
            dtype=rng.choice(("fp32", "bf16")),
            **{name: rng.choice(choices) for name, choices in sizes.items()},
        )
        options: Options = {"world_size": rng.choice((1, 2, 4, 6)), "schedule": rng.choice(tuple(SCHEDULES))}
        if rng.random() < 0.3:
            options["num_stages"] = rng.choice(divisors(options["world_size"]))
        if needs := every_need(workload, options):
            break
    device = int(rng.choice((min(needs), rng.choice(needs))) * rng.choice((0.97, 1.0, 1.03)))
    return workload, options, Budget(device, rates=rng.choice((None, RATES)))


def test_what_fits_in_any_configuration_is_found_and_else_the_smallest_need_is_told() -> None:
    verdicts = set()
    for number in range(NUM_BUDGETS):
        workload, options, budget = random_case(number)
        plan = create("varuna", options).plan(workload, budget.room)
        assert budget.device_bytes is not None
        least, fits = min(every_need(workload, options)), plan.shortfall(budget.room) is None
        assert fits == (least <= budget.device_bytes), (number, plan.options)
        assert fits or plan.device_bytes == least, (number, plan.options, least)
        verdicts.add(fits)
    assert verdicts == {True, False}


def test_a_refusal_names_the_least_memory_and_the_largest_depth() -> None:
    advised = 0
    for number in range(0, NUM_BUDGETS, 4):
        workload, options, budget = random_case(number)
        assert budget.device_bytes is not None
        _, _, shortfall = resolve(Job("varuna", workload, options, replace(budget, host_bytes=2**40)))
        if shortfall is None:
            continue
        needs = [
            min(every_need(workload.at_depth(layers), options), default=2**62) for layers in range(1, 40)
        ]
        named = re.search(r"needs --device-memory (\d+)KiB at least", shortfall)
        assert named and int(named[1]) == -(-needs[workload.num_layers - 1] // 1024)
        fitting = [layers for layers, need in enumerate(needs, start=1) if need <= budget.device_bytes]
        depth = re.search(r"has -l (\d+)", shortfall)
        assert depth or "no depth fits" in shortfall
        assert max(fitting, default=0) == (int(depth[1]) if depth else 0), (
            number,
            workload,
            options,
            shortfall,
        )
        advised += len(fitting) > 0
    assert advised > 10
