"""Simulates how good Hydra's scheduling rule Sharded-LRTF is. Prints the ratios makespan of the rule (time until all
models are trained) / proved optimum, and the rule's speed-up on up to 1,000 devices.

    .venv/bin/python -m bench.schedules

The clock is virtual; no model is trained. The speed-up is that of 12 models of the published size, each with 20
minibatches: 6 models have batch 16 and 13 shards, 6 models have batch 8 and 8 shards.
"""

from __future__ import annotations

import random
import statistics

from cases._optimum import INSTANCES, SIZES, WHOLE, chain, ratios_to_optimum
from methods.sharding.scheduler import POLICIES, lower_bound, simulate_policy

DEVICES = (1, 2, 4, 8, 16, 100, 1000)


def table() -> None:
    print(f"ratio to the proved optimum, mean / largest of {INSTANCES} instances")
    print(f"{'devices, models':18}" + "".join(f"{name:>16}" for name in (*POLICIES, WHOLE)))
    for size in SIZES:
        cells = (
            f"{statistics.mean(ratios):.3f} / {max(ratios):.3f}"
            for ratios in ratios_to_optimum(*size).values()
        )
        print(f"{'{}, {}'.format(*size):18}" + "".join(f"{cell:>16}" for cell in cells))


def speed_up() -> None:
    print("speed-up over one device: makespan over the lower bound in parentheses")
    twelve = [chain([1.0] * (13 if number % 2 else 8), 20) for number in range(12)]
    rng = random.Random(0)
    many = [chain([rng.uniform(0.5, 2)] * rng.randint(2, 6), 5) for _ in range(10_000)]
    for name, chains in (("12 models", twelve), ("10,000 models", many)):
        alone = sum(map(sum, chains))
        for num_devices in DEVICES:
            makespan = simulate_policy(chains, num_devices).makespan
            ratio = makespan / lower_bound(chains, num_devices)
            print(f"{name:14} {num_devices:5} devices: {alone / makespan:8.2f} ({ratio:.3f})")


if __name__ == "__main__":
    table()
    speed_up()
