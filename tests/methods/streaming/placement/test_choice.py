"""What fits in any placement is found, and what is advised fits: against every placement there is, by its bytes."""

from __future__ import annotations

import functools
import itertools
import random
import re
from dataclasses import replace

import pytest

from harness.core.job import Budget, Job, Room, Workload
from harness.core.method import create, names
from harness.core.rates import Rates
from harness.plan.fit import resolve
from methods.streaming.placement.placed_layers import PlacedLayers
from methods.streaming.placement.placement import CLIPPINGS, HOMES
from methods.streaming.placement.planner import KINDS, arrange_kinds
from tests.support.operations import num_lines
from tests.support.training import tiny

NUM_BUDGETS = 200
MOST_LAYERS = 6
VARIANTS = [{"dtype": dtype, "clip_norm": norm} for dtype in ("fp32", "bf16") for norm in (0.0, 1.0)]
RATES = Rates(
    1e9, inbound_bytes_per_second=1e9, outbound_bytes_per_second=1e9, host_adam_params_per_second=1e8
)


@functools.cache
def every_need(workload: Workload, has_disk: bool) -> list[tuple[int, int, int]]:
    """Bytes of device, host and disk of every mixture of kinds, in every window, with every clipping, and ends and
    boundaries on either side."""
    needs = set()
    kinds = [kind for kind in KINDS if kind != "Q" and (has_disk or kind != "D")]
    for mixture in itertools.combinations_with_replacement(kinds, workload.num_layers):
        placement = arrange_kinds({kind: mixture.count(kind) for kind in kinds})
        clippings = CLIPPINGS if workload.waits_for_norm else (None,)
        homes = itertools.product(([], workload.anatomy.end_parts), HOMES)
        for window, clipping, (ends, kept) in itertools.product((1, 2, 3), clippings, homes):
            if clipping != "speculate" or "D" not in mixture:
                slots = min(window, workload.num_layers)
                plan = PlacedLayers(
                    workload, placement, slots, clipping, activations=kept, hosted_ends=ends
                ).plan()
                needs.add((plan.device_bytes, plan.host_bytes, plan.disk_bytes))
    return sorted(needs)


def any_fits(workload: Workload, budget: Budget, has_disk: bool) -> bool:
    def within(device: int, host: int, disk: int) -> bool:
        assert budget.host_bytes is not None and budget.disk_bytes is not None
        if budget.device_bytes is None:
            return device + host <= budget.host_bytes and disk <= budget.disk_bytes
        return device <= budget.device_bytes and host <= budget.host_bytes and disk <= budget.disk_bytes

    return any(within(*needs) for needs in every_need(workload, has_disk))


def random_case(number: int, is_one_pool: bool) -> tuple[Workload, Budget, bool]:
    """A workload, a budget around its needs, and whether layers may lie on the disk."""
    rng = random.Random(number)
    workload = tiny(**rng.choice(VARIANTS), num_layers=rng.randint(1, MOST_LAYERS), hidden_size=36)
    has_disk = rng.random() < 0.5
    needs = every_need(workload, has_disk)
    device, host, disk = rng.choice(needs)
    sizes = [int(size * rng.choice((0.97, 1.0, 1.03))) + 1 for size in (device, host, disk)]
    if is_one_pool:
        least = min(device + host for device, host, _ in needs)
        return workload, Budget(None, int(least * rng.uniform(0.95, 1.2)), sizes[2]), has_disk
    return workload, Budget(sizes[0], sizes[1], sizes[2]), has_disk


@pytest.mark.parametrize("is_one_pool", [False, True], ids=["device-and-host", "one-pool"])
def test_what_fits_in_any_placement_is_found(is_one_pool: bool, tmp_path) -> None:
    verdicts = set()
    for number in range(NUM_BUDGETS):
        workload, budget, has_disk = random_case(number, is_one_pool)
        budget = replace(budget, rates=RATES if number % 25 == 0 else None)  # which make a plan slow
        trained = create("stronghold", {"disk": str(tmp_path)} if has_disk else {})
        plan = trained.plan(workload, budget.room)
        fits = plan.shortfall(budget.room) is None
        assert fits == any_fits(workload, budget, has_disk), (number, workload, budget, plan.options)
        verdicts.add(fits)
    assert verdicts == {True, False}


@pytest.mark.parametrize("is_one_pool", [False, True], ids=["device-and-host", "one-pool"])
def test_the_depth_that_is_advised_is_the_largest_that_fits(is_one_pool: bool) -> None:
    """Of every method, by its own plan; of STRONGHOLD, which has placements, by all of these."""
    advised = 0
    for number, name in itertools.product(range(0, NUM_BUDGETS, 10), names()):
        workload, budget, _ = random_case(number, is_one_pool)
        try:
            job = Job(name, workload, budget=budget, device="cpu" if is_one_pool else "sim")
            _, _, shortfall = resolve(job, room=budget.room)
        except ValueError:  # this method does not train this workload
            continue
        if shortfall is None:
            continue
        depth = re.search(r"has -l (\d+)", shortfall)
        assert depth or "no depth fits" in shortfall
        largest = int(depth[1]) if depth else 0
        trained = create(name, {})
        for layers in range(1, largest + 2):
            load = workload.at_depth(layers)
            fits = trained.plan(load, budget.room).shortfall(budget.room) is None
            assert fits == (layers <= largest), (name, layers, shortfall)
            assert name != "stronghold" or fits == any_fits(load, budget, has_disk=False)
        advised += largest > 0
    assert advised > 10


def test_a_plan_of_the_most_layers_is_no_more_work_than_one_of_fewer() -> None:
    """A search for the largest depth asks for twenty of them."""
    stronghold, room = create("stronghold", {}), Room(2**35, 2**39, rates=RATES)
    layers = Workload(2, hidden_size=32, num_heads=2, seq_len=16, batch_size=2, vocab_size=64)
    stronghold.plan(layers, room)  # what only a first plan does
    few, many = (num_lines(lambda: stronghold.plan(layers.at_depth(2**n), room)) for n in (15, 20))  # noqa: B023
    assert many < 2 * few
