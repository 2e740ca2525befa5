"""Model selection: trains many models by turns, and compares their speed with training one after another.

The models differ in learning rate and batch size. All models together fit the host's memory. The device has a sixteenth
of this memory, so no whole model fits the device. The time of training one after another is computed from one timed
model per batch size, because the learning rate does not change the time. The starts of the models do not count. Two
panels are simulated under a virtual clock, from the measured times of shards.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cases import _case6_figure, _optimum
from harness.core import method
from harness.core.job import Job
from harness.core.record import Record
from harness.devices import cuda_budget
from methods.sharding.scheduler import simulate_policy
from papers.figures import plot, points
from papers.figures.case import Case
from papers.figures.point import FigureRow, interval, row_of
from papers.figures.profile import ROOM, CaseProfile

BASELINES = ("resident", "zero-infinity", "stronghold")
OURS = "hydra"
METRIC = "samples_per_second"
RUNS = {"demo": 2, "quick": 6, "paper": 6, "fit": 6}  # number of learning rates, by profile
NUM_BATCH_SIZES = 2  # number of batch sizes for each learning rate: the profile's and half of it
DEVICE_SHARE = 16  # host memory divided by device memory
# depth: layers per model, too many for the device; host: multiplies host memory
IN_DEMO = {"depth": 3, "host": 2}
DEVICES = (1, 2, 4, 8, 16, 32, 100, 316, 1000)
MANY = 4000  # number of models, enough to keep a thousand devices busy
SIMULATED = FigureRow("speed_up", OURS, 0, 0, None, None, valid=True, origin="simulated", clock="virtual")


class ModelSelection(Case):
    metric = METRIC
    methods = (*BASELINES, OURS)
    mixes_metrics = True

    def profiles(self, case_profile: CaseProfile) -> tuple[CaseProfile, ...]:
        return _profiles(case_profile)

    def jobs(self, case_profile: CaseProfile, sizes: dict[str, int]) -> list[Job]:
        return [*(job for name in BASELINES for job in _alone(case_profile, name)), *_together(case_profile)]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return, for each method, a row with the speed of all models together in samples per second. Then return rows
        with the turns of shards in the last step of Hydra's last run.
        """
        speeds = [
            speed for name in BASELINES for speed in _one_after_another(_alone(case_profile, name), records)
        ]
        for job, series in zip(_together(case_profile), ("", _case6_figure.ONE_SLOT), strict=True):
            speeds += [replace(speed, series=series) for speed in points.points(METRIC, records, [job])]
        # reasons of baselines without a value
        lacking = {name: _shortfall(case_profile, name) for name in BASELINES if speeds}
        refused = [
            FigureRow(
                METRIC,
                name,
                speeds[0].num_layers,
                speeds[0].hidden_size,
                None,
                None,
                num_runs=0,
                status="does-not-fit",
                reason=reason,
                machine=speeds[0].machine,
                clock=speeds[0].clock,
            )
            for name, reason in lacking.items()
            if reason
        ]
        speeds = [
            replace(speed, group=f"{_options(case_profile)['num_models']} models")
            for speed in (*refused, *speeds)
        ]
        both = points.repeats(_together(case_profile)[0], records)
        return speeds + (_turns(both[-1]) if both and both[-1].status == "ok" else [])

    def simulated(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        """Return simulated rows: the ratio of each rule to the proved optimum and, if `rows` have measured turns of
        shards, the speed-up of these turns on one to a thousand devices.
        """
        chains: dict[str, list[float]] = {}
        for turn in rows:
            if turn.metric == "turn_seconds" and turn.value:
                chains.setdefault(turn.group, []).append(turn.value)
        return [*_quality(), *(_speed_up(list(chains.values())) if chains else [])]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        return _case6_figure.figure(rows, note, self.methods)


def _profiles(case_profile: CaseProfile) -> tuple[CaseProfile, ...]:
    """Return three profiles: one model with the whole batch, one model with half the batch, and all models at once."""
    load, budget = case_profile.workload, case_profile.budget
    assert budget.device_bytes and budget.host_bytes  # every profile has both budgets
    host_bytes = budget.host_bytes
    if case_profile.kind == "demo":
        host_bytes *= IN_DEMO["host"]
    else:
        device_bytes = host_bytes // DEVICE_SHARE
        if case_profile.device == "cuda":
            device_bytes = cuda_budget.budget_bytes(device_bytes)
        budget = replace(budget, device_bytes=min(budget.device_bytes, device_bytes))
    alone = replace(case_profile, budget=budget)
    half = replace(load, batch_size=load.batch_size // 2)
    halved = replace(alone, workload=half, steps=2 * case_profile.steps, warmup=2 * case_profile.warmup)
    return alone, halved, replace(alone, budget=replace(budget, host_bytes=host_bytes))


def _alone(case_profile: CaseProfile, name: str) -> list[Job]:
    """Return one job per batch size; each trains one model. Return no job if the plan for the whole batch does not
    fit."""
    profiles = () if _shortfall(case_profile, name) else _profiles(case_profile)[:NUM_BATCH_SIZES]
    return [profile.job(name, _depth(case_profile)) for profile in profiles]


def _shortfall(case_profile: CaseProfile, name: str) -> str | None:
    """Return, as text, which memory one model with the whole batch lacks by its plan, and how much; None if the model
    fits."""
    alone = _profiles(case_profile)[0]
    job = alone.job(name, _depth(case_profile))
    return method.create(name, job.options).plan(job.workload, alone.room).shortfall(alone.room)


def _together(case_profile: CaseProfile) -> list[Job]:
    """Return two jobs that train all models together with the same shards: with a double buffer, and without."""
    both = _profiles(case_profile)[-1].job(OURS, _depth(case_profile), **_options(case_profile))
    return [both, replace(both, options={**both.options, "double_buffer": False})]


def _options(case_profile: CaseProfile) -> dict[str, int]:
    return {"num_models": NUM_BATCH_SIZES * RUNS[case_profile.kind], "num_batch_sizes": NUM_BATCH_SIZES}


def _depth(case_profile: CaseProfile) -> int:
    """Return the largest number of layers per model with which all models fit the host's memory."""
    if case_profile.kind == "demo":
        return IN_DEMO["depth"]
    trained, room = method.create(OURS, _options(case_profile)), _profiles(case_profile)[-1].room
    assert room.host_bytes
    room = replace(room, host_bytes=int(ROOM * room.host_bytes))
    return max(
        1,
        method.largest_depth(
            lambda n: trained.plan(case_profile.workload.at_depth(n), room).shortfall(room) is None
        ),
    )


def _one_after_another(alone: list[Job], records: Sequence[Record]) -> list[FigureRow]:
    """Return, in a list, the row of a method that trains the models one after another; an empty list if a batch size
    has no record. If a run failed, the row states the reason.
    """
    measured = [points.repeats(job, records) for job in alone]
    if not measured or not all(measured):
        return []
    rows = [row_of(METRIC, repeats) for repeats in measured]
    worst = next((one for one in rows if not one.valid), rows[0])
    values = [
        speed
        for repeats in zip(*measured, strict=False)
        if (speed := _speed_one_after_another(repeats)) is not None
    ]
    low, high = interval(values)
    scatters = [one.scatter for one in rows if one.scatter is not None]
    return [
        replace(
            worst,
            value=statistics.median(values) if values else None,
            low=low,
            high=high,
            num_runs=len(values),
            values=tuple(values),
            scatter=max(scatters, default=None),
            keys=tuple(key for one in rows for key in one.keys),
            steps=(),
            num_steps=min(one.num_steps or 0 for one in rows),
        )
    ]


def _speed_one_after_another(records: Sequence[Record]) -> float | None:
    """Return the samples per second of models that train one after another on equally many samples, each with its own
    batch size; None if a record has no step time.
    """
    if not all(record.median_step_seconds for record in records):
        return None
    return len(records) / sum(
        (record.median_step_seconds or 0) / record.samples_per_step for record in records
    )


def _turns(record: Record) -> list[FigureRow]:
    """Return a row for each turn of a shard in the last step, sorted by model and start. In a row, `series` is the kind
    of the turn, such as forward; `x` is its start and `value` its duration, both in seconds.
    """
    turns = record.schedule.get("turns", [])
    if not turns:
        return []
    loads = [model.job.workload for model in record.models()]
    names = [f"lr {load.learning_rate:.1e}, batch {load.batch_size}" for load in loads]
    began = max(turn[-1] for turn in turns) - record.step_seconds[-1]
    last = [turn for turn in turns if (turn[-2] + turn[-1]) / 2 >= began]
    first, whose = min(turn[-2] for turn in last), replace(row_of(METRIC, [record]), steps=(), num_steps=None)
    return [
        replace(
            whose, metric="turn_seconds", value=end - start, x=start - first, group=names[model], series=kind
        )
        for model, _, kind, _, start, end in sorted(last, key=lambda turn: (turn[0], turn[-2]))
    ]


def _quality() -> Iterator[FigureRow]:
    """Yield the mean and the largest ratio of each scheduling rule to the optimum, by number of devices and models."""
    for devices, models in _optimum.SIZES:
        for rule, ratios in _optimum.ratios(devices, models).items():
            row = replace(SIMULATED, series=rule, group=f"{devices}, {models}", num_runs=len(ratios))
            yield replace(row, metric="mean_ratio", value=statistics.mean(ratios))
            yield replace(row, metric="largest_ratio", value=max(ratios))


def _speed_up(chains: list[list[float]]) -> list[FigureRow]:
    """Return rows with the speed-up of several devices over one device, for these models and for MANY such models.
    `chains`: the seconds of each model's units."""
    rows = []
    for number in (len(chains), MANY):
        several = [chains[index % len(chains)] for index in range(number)]
        alone = sum(map(sum, several))
        for count in DEVICES:
            if count <= 2 * number and (number < MANY or count == 1 or count >= 32):
                speed_up = alone / simulate_policy(several, count).makespan if count > 1 else 1.0
                rows.append(replace(SIMULATED, value=speed_up, series=f"{number:,} models", x=float(count)))
    return rows
