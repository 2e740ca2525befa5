"""Model selection: many models trained by turns, beside the same models one after another.

Models differ in learning rate and batch size. Their depth lets all of them into the host's memory at once; the device
has a sixteenth of that memory, so no model fits it whole. One after another they take the steps of one model of each
batch size, timed alone (a learning rate changes no time); starting each model is left out. Two panels are simulated
under a virtual clock, from the units as measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cases import _case6_figure, _optimum
from harness.core import method
from harness.core.job import Job
from harness.core.record import Record
from harness.figures import case
from harness.figures.point import Row, interval, row
from harness.figures.profile import ROOM, Profile
from methods.sharding.scheduler import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINES = ("resident", "zero-infinity", "stronghold")
OURS = "hydra"
METHODS = (*BASELINES, OURS)
METRIC = "samples_per_second"
SEARCHES = ()
RUNS = {"demo": 2, "quick": 6, "paper": 6, "fit": 6}  # learning rates
NUM_BATCH_SIZES = 2  # of each, the profile's and half of it
DEVICE_SHARE = 16  # of the host's memory the part that the device may have
IN_DEMO = {"depth": 3, "host": 2}  # the first that does not fit the device; twice the profile's host for four models
DEVICES = (1, 2, 4, 8, 16, 32, 100, 316, 1000)
MANY = 4000  # models, for a thousand devices
Chains = list[list[float]]


def profiles(used: Profile) -> tuple[Profile, ...]:
    """One model at a time; the same samples in half the batch; all models at once."""
    load, budget = used.workload, used.budget
    assert budget.device_bytes and budget.host_bytes  # every profile has both
    host_bytes = budget.host_bytes
    if used.kind == "demo":
        host_bytes *= IN_DEMO["host"]
    else:
        budget = replace(budget, device_bytes=min(budget.device_bytes, host_bytes // DEVICE_SHARE))
    alone = replace(used, budget=budget)
    half = replace(load, batch_size=load.batch_size // 2)
    return (
        alone,
        replace(alone, workload=half, steps=2 * used.steps, warmup=2 * used.warmup),
        replace(alone, budget=replace(budget, host_bytes=host_bytes)),
    )


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    return [*(job for name in BASELINES for job in _alone(used, name)), *_together(used)]


def _alone(used: Profile, name: str) -> list[Job]:
    """One model of each batch size; none where its plan does not fit."""
    if _shortfall(used, name):
        return []
    return [each.job(name, _depth(used)) for each in profiles(used)[:NUM_BATCH_SIZES]]


def _shortfall(used: Profile, name: str) -> str | None:
    """What a model with the whole batch lacks by plan."""
    job = profiles(used)[0].job(name, _depth(used))
    return method.create(name, job.options).plan(job.workload, job.budget).shortfall(job.budget)


def _together(used: Profile) -> list[Job]:
    """All models, with the second slot of the double buffer, and in the same shards without."""
    both = profiles(used)[-1].job(OURS, _depth(used), **_options(used))
    return [both, replace(both, options={**both.options, "double_buffer": False})]


def _options(used: Profile) -> dict[str, int]:
    return {"num_models": NUM_BATCH_SIZES * RUNS[used.kind], "num_batch_sizes": NUM_BATCH_SIZES}


def _depth(used: Profile) -> int:
    """Layers of each model: as many as let all models into the host's memory."""
    if used.kind == "demo":
        return IN_DEMO["depth"]
    trained, budget = method.create(OURS, _options(used)), profiles(used)[-1].budget
    assert budget.host_bytes
    room = replace(budget, host_bytes=int(ROOM * budget.host_bytes))
    return max(1, method.largest_depth(lambda n: trained.plan(used.workload.at_depth(n), room).shortfall(room) is None))


def table(records: Sequence[Record], used: Profile) -> list[Row]:
    """The speed of all models together by each method; then the turns of the last round of Hydra's last run."""
    found = [speed for name in BASELINES for speed in _one_after_another(_alone(used, name), records)]
    for job, series in zip(_together(used), ("", _case6_figure.ONE_SLOT), strict=True):
        found += [replace(speed, series=series) for speed in case.rows(METRIC, [job], records)]
    found = [*_too_large(used, found), *found]
    found = [replace(speed, group=f"{_options(used)['num_models']} models") for speed in found]
    both = case.repeats(_together(used)[0], records)
    return found + (_turns(both[-1]) if both and both[-1].status == "ok" else [])


def _one_after_another(alone: list[Job], records: Sequence[Record]) -> list[Row]:
    """The row of a method; none where a batch size has no record. A run that failed gives the row its reason."""
    measured = [case.repeats(job, records) for job in alone]
    if not measured or not all(measured):
        return []
    each = [row(METRIC, found) for found in measured]
    worst = next((one for one in each if not one.valid), each[0])
    values = [speed for found in zip(*measured, strict=False) if (speed := _speed(found)) is not None]
    low, high = interval(values)
    scatters = [one.scatter for one in each if one.scatter is not None]
    return [replace(
        worst, value=statistics.median(values) if values else None, low=low, high=high, num_runs=len(values),
        values=tuple(values), scatter=max(scatters, default=None), keys=tuple(key for one in each for key in one.keys),
    )]  # fmt: skip


def _too_large(used: Profile, found: Sequence[Row]) -> list[Row]:
    """A row for each method whose plan does not fit, beside the measured ones."""
    names = [name for name in BASELINES if found and not _alone(used, name)]
    return [
        Row(
            METRIC, name, found[0].num_layers, found[0].hidden_size, None, None, num_runs=0,
            status="does-not-fit", reason=str(_shortfall(used, name)), machine=found[0].machine, clock=found[0].clock,
        )
        for name in names
    ]  # fmt: skip


def _speed(found: Sequence[Record]) -> float | None:
    """Samples per second of models that take the same number of samples in turn, each in batches of its own."""
    if not all(record.median_step_seconds for record in found):
        return None
    return len(found) / sum((record.median_step_seconds or 0) / record.samples_per_step for record in found)


def _turns(record: Record) -> list[Row]:
    """Each unit of the last round, model by model: its kind, when it began, and how long it took, in seconds."""
    turns = record.schedule.get("turns", [])
    if not turns:
        return []
    loads = [each.job.workload for each in record.models()]
    names = [f"lr {load.learning_rate:.1e}, batch {load.batch_size}" for load in loads]
    began = max(turn[-1] for turn in turns) - record.step_seconds[-1]
    last = [turn for turn in turns if (turn[-2] + turn[-1]) / 2 >= began]
    first, whose = min(turn[-2] for turn in last), row(METRIC, [record])
    return [
        replace(whose, metric="turn_seconds", value=end - start, x=start - first, group=names[model], series=kind)
        for model, _, kind, _, start, end in sorted(last, key=lambda turn: (turn[0], turn[-2]))
    ]


def simulated(rows: Sequence[Row]) -> list[Row]:
    """Each rule beside the proved optimum; the units of the round, measured on one device, on up to a thousand."""
    chains: dict[str, list[float]] = {}
    for turn in rows:
        if turn.metric == "turn_seconds" and turn.value:
            chains.setdefault(turn.group, []).append(turn.value)
    return [*_quality(), *(_speed_up(list(chains.values())) if chains else [])]


def _quality() -> list[Row]:
    return [
        _virtual(metric, of(each), rule, f"{num_devices}, {num_models}", len(each))
        for num_devices, num_models in _optimum.SIZES
        for rule, each in _optimum.ratios(num_devices, num_models).items()
        for metric, of in (("mean_ratio", statistics.mean), ("largest_ratio", max))
    ]


def _speed_up(chains: Chains) -> list[Row]:
    """Over one device, of these models and of many such models."""
    found = []
    for number in (len(chains), MANY):
        several = [chains[index % len(chains)] for index in range(number)]
        alone = sum(map(sum, several))
        for num_devices in DEVICES:
            if num_devices > 2 * number or (number == MANY and 1 < num_devices < 32):
                continue
            speed_up = alone / simulate(several, num_devices).makespan if num_devices > 1 else 1.0
            found.append(replace(_virtual("speed_up", speed_up, f"{number:,} models"), x=float(num_devices)))
    return found


def _virtual(metric: str, value: float, series: str, group: str = "", num_runs: int = 1) -> Row:
    return Row(
        metric, OURS, 0, 0, None, value, num_runs=num_runs, valid=True, origin="simulated", clock="virtual",
        series=series, group=group,
    )  # fmt: skip


def figure(rows: Sequence[Row], note: str) -> Figure:
    return _case6_figure.figure(rows, note, METHODS)
