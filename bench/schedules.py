"""How good Sharded-LRTF is, by simulation alone: ratios to the proved optimum, and the speed-up on up to 1,000 devices.

    PYTHONPATH=. .venv/bin/python -m bench.schedules

The clock is virtual; no model is trained. Models are of the published size: 12 of them, half with batch 16 (13 shards),
half with batch 8 (8 shards), 20 minibatches.
"""

from __future__ import annotations

import random
import statistics

from cases._optimum import optimum
from methods._scheduler import POLICIES, lower_bound, simulate, whole_models

SIZES = ((2, 3), (3, 5), (4, 6), (8, 12))  # devices, models
DEVICES = (1, 2, 4, 8, 16, 100, 1000)
INSTANCES = 20


def chain(shards: list[float], minibatches: int) -> list[float]:
    """A backward unit recomputes: it takes twice the forward's time and a half more where they are fused."""
    *below, last = shards
    return (below + [3 * last] + [2 * seconds for seconds in reversed(below)]) * minibatches


def instance(seed: int, num_models: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [chain([rng.randint(1, 9) for _ in range(rng.randint(2, 4))], rng.randint(2, 4)) for _ in range(num_models)]


def ratios() -> None:
    print("ratio to the proved optimum, mean / largest of 20 instances")
    print(f"{'devices, models':18}" + "".join(f"{name:>16}" for name in (*POLICIES, "whole models")))
    for num_devices, num_models in SIZES:
        found: dict[str, list[float]] = {}
        for seed in range(INSTANCES):
            chains = instance(1000 * num_devices + seed, num_models)
            best = optimum([[int(unit) for unit in each] for each in chains], num_devices)
            if best is None:
                continue
            for name in POLICIES:
                found.setdefault(name, []).append(simulate(chains, num_devices, name).makespan / best)
            found.setdefault("whole models", []).append(simulate(whole_models(chains), num_devices).makespan / best)
        cells = (f"{statistics.mean(each):.3f} / {max(each):.3f}" for each in found.values())
        print(f"{f'{num_devices}, {num_models}':18}" + "".join(f"{cell:>16}" for cell in cells))


def speed_up() -> None:
    print("speed-up over one device: makespan over the lower bound in parentheses")
    twelve = [chain([1.0] * (13 if number % 2 else 8), 20) for number in range(12)]
    rng = random.Random(0)
    many = [chain([rng.uniform(0.5, 2)] * rng.randint(2, 6), 5) for _ in range(10_000)]
    for name, chains in (("12 models", twelve), ("10,000 models", many)):
        alone = sum(map(sum, chains))
        for num_devices in DEVICES:
            makespan = simulate(chains, num_devices).makespan
            ratio = makespan / lower_bound(chains, num_devices)
            print(f"{name:14} {num_devices:5} devices: {alone / makespan:8.2f} ({ratio:.3f})")


if __name__ == "__main__":
    ratios()
    speed_up()
