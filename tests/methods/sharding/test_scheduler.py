"""Hydra's rules against the proved optimum, Graham's bound and schedules worked out by hand."""

from __future__ import annotations

import random
import statistics

import pytest

from cases._optimum import optimum
from methods.sharding.scheduler import POLICIES, lower_bound, simulate_policy, whole_models
from tests.support.operations import num_lines

# The optimum of instance(1000 * devices + seed, models) for seeds 0 to 19, each proved by CP-SAT.
OPTIMA = {
    (2, 3): [
        288,
        132,
        170,
        203,
        251,
        134,
        236,
        252,
        153,
        156,
        197,
        189,
        152,
        396,
        198,
        219,
        216,
        276,
        201,
        207,
    ],
    (3, 5): [
        298,
        235,
        189,
        216,
        245,
        234,
        266,
        270,
        179,
        176,
        360,
        324,
        281,
        224,
        189,
        288,
        182,
        240,
        101,
        269,
    ],
    (4, 6): [
        276,
        216,
        171,
        276,
        228,
        264,
        348,
        162,
        180,
        162,
        264,
        288,
        300,
        252,
        143,
        348,
        288,
        264,
        243,
        276,
    ],
    (8, 12): [
        300,
        288,
        324,
        234,
        240,
        300,
        288,
        234,
        252,
        252,
        168,
        216,
        252,
        243,
        240,
        204,
        204,
        228,
        300,
        288,
    ],
}
SIZES = pytest.mark.parametrize(("num_devices", "num_models"), OPTIMA)


def instance(seed: int, num_models: int) -> list[list[int]]:
    """Models of 2 to 4 unlike shards and 2 to 4 minibatches; a backward unit takes twice its forward's time."""
    rng, chains = random.Random(seed), []
    for _ in range(num_models):
        forward = [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]
        minibatch = forward[:-1] + [3 * forward[-1]] + [2 * seconds for seconds in reversed(forward[:-1])]
        chains.append(minibatch * rng.randint(2, 4))
    return chains


def instances(num_devices: int, num_models: int) -> list[list[list[int]]]:
    return [instance(1000 * num_devices + seed, num_models) for seed in range(20)]


def ratios(num_devices: int, num_models: int, policy: str, whole: bool = False) -> list[float]:
    """Makespan over optimum of the twenty instances of a size."""
    found = []
    for chains, best in zip(instances(num_devices, num_models), OPTIMA[num_devices, num_models], strict=True):
        placed = whole_models(chains) if whole else chains
        found.append(simulate_policy(placed, num_devices, policy).makespan / best)
    return found


@SIZES
def test_lrtf_is_within_two_percent_of_the_optimum_on_the_mean_and_ten_at_most(
    num_devices: int, num_models: int
) -> None:
    found = ratios(num_devices, num_models, "lrtf")
    assert statistics.mean(found) <= 1.02 and min(found) >= 1 and max(found) <= 1.10


@SIZES
def test_lrtf_beats_the_other_rules_and_whole_models_on_the_mean(num_devices: int, num_models: int) -> None:
    ours = statistics.mean(ratios(num_devices, num_models, "lrtf"))
    others = {rule: ratios(num_devices, num_models, rule) for rule in POLICIES if rule != "lrtf"}
    others["whole models"] = ratios(num_devices, num_models, "lrtf", whole=True)
    assert all(ours < statistics.mean(found) for found in others.values())


@SIZES
def test_the_optima_are_proved_anew_for_some(num_devices: int, num_models: int) -> None:
    for chains, best in list(
        zip(instances(num_devices, num_models), OPTIMA[num_devices, num_models], strict=True)
    )[:3]:
        assert optimum(chains, num_devices) == best


def graham_bound(chains: list[list[float]], num_devices: int) -> float:
    """No list schedule is longer: while the chain that ends last waits, all devices are busy."""
    times = [sum(chain) for chain in chains]
    return sum(times) / num_devices + (1 - 1 / num_devices) * max(times)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_schedule_is_beyond_grahams_bound_or_below_the_lower_one(policy: str) -> None:
    rng = random.Random(7)
    for seed in range(1000):
        chains = [[rng.uniform(0.1, 5) for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(1, 12))]
        num_devices = rng.randint(1, 9)
        makespan = simulate_policy(chains, num_devices, policy, seed).makespan
        assert lower_bound(chains, num_devices) <= makespan * (1 + 1e-9)
        assert makespan <= graham_bound(chains, num_devices) * (1 + 1e-9)


def test_equal_units_are_scheduled_as_well_as_can_be() -> None:
    """Hu's theorem for chains: the bound itself, rounded up to whole units."""
    rng = random.Random(11)
    for _ in range(200):
        chains = [[1] * rng.randint(1, 20) for _ in range(rng.randint(1, 12))]
        num_devices = rng.randint(1, 6)
        assert simulate_policy(chains, num_devices).makespan == -(-lower_bound(chains, num_devices) // 1)


def test_a_schedule_worked_out_by_hand() -> None:
    """Two devices: the longest model first, then by what remains; the units of a model never overlap."""
    found = simulate_policy([[3, 3], [2, 2], [1]], num_devices=2)
    assert found.makespan == 6  # 11 units of time on 2 devices, the longest model alone takes 6
    assert [unit[:3] for unit in found.units] == [
        (0, 0, 0),
        (1, 1, 0),
        (1, 1, 2),
        (0, 0, 3),
        (2, 1, 4),
    ]


def test_shortest_first_leaves_the_longest_model_to_the_end() -> None:
    assert simulate_policy([[3, 3], [2, 2], [1]], num_devices=2, policy="srtf").makespan == 7


def test_units_keep_their_order_and_a_device_takes_one_at_a_time() -> None:
    chains = instance(5, 12)
    found = simulate_policy(chains, num_devices=5, policy="random", seed=3)
    for column in (0, 1):  # models and devices
        ends: dict[int, float] = {}
        for unit in found.units:
            assert unit[2] >= ends.get(unit[column], 0)
            ends[unit[column]] = unit[3]
    assert sorted(model for model, *_ in found.units) == sorted(
        model for model, chain in enumerate(chains) for _ in chain
    )


def test_twelve_alike_models_use_eight_devices_wholly_where_whole_models_use_six() -> None:
    """Of the published size: 8 shards, 20 minibatches; 12 models do not divide among 8 devices, their units do."""
    chains = [([1.0] * 7 + [3.0] + [2.0] * 7) * 20 for _ in range(12)]
    alone = sum(map(sum, chains))
    assert alone / simulate_policy(chains, 8).makespan == pytest.approx(8.0, rel=0.01)
    assert alone / simulate_policy(whole_models(chains), 8).makespan == pytest.approx(6.0)


def test_twice_the_models_on_twice_the_devices_are_about_twice_the_work() -> None:
    rng = random.Random(0)
    chains = [[rng.uniform(0.5, 2) for _ in range(40)] for _ in range(400)]
    half, whole = (num_lines(lambda: simulate_policy(chains[:n], n // 10)) for n in (200, 400))  # noqa: B023
    assert whole < 2.5 * half
    assert simulate_policy(chains, 40).makespan <= 1.01 * lower_bound(chains, 40)


@pytest.mark.parametrize(
    ("chains", "num_devices", "policy", "text"),
    [
        ([], 1, "lrtf", "no tasks"),
        ([[1]], 0, "lrtf", "num_devices: expected at least 1, got 0"),
        ([[1, 0]], 1, "lrtf", "expected positive times of units, got 0"),
        ([[1]], 1, "longest", "policy: expected one of lrtf, srtf, fifo, random, got 'longest'"),
    ],
)
def test_nonsense_is_answered_in_one_line(
    chains: list[list[float]], num_devices: int, policy: str, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        simulate_policy(chains, num_devices, policy)
