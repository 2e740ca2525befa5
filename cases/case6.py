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
from typing import Any

from cases import _optimum
from cases._optimum import INSTANCES, WHOLE
from harness.core import method
from harness.core.job import Job
from harness.core.record import Record
from harness.devices import cuda_budget
from methods.sharding.scheduler import simulate_policy
from papers.figures import plot, points
from papers.figures.case import Case
from papers.figures.point import FigureRow, interval, row_of
from papers.figures.profile import PLANNED_SHARE, CaseProfile

BASELINES = ("resident", "zero-infinity", "stronghold")
HYDRA = "hydra"
METRIC = "samples_per_second"
NUM_LEARNING_RATES = {"demo": 2, "quick": 6, "paper": 6, "fit": 6}  # number of learning rates, by profile
NUM_BATCH_SIZES = 2  # number of batch sizes for each learning rate: the profile's and half of it
HOST_PER_DEVICE_MEMORY = 16  # host memory divided by device memory
DEMO_DEPTH = 3  # layers per model, too many for the device
DEMO_HOST_FACTOR = 2  # multiplies the host memory of the profile demo
DEVICE_COUNTS = (1, 2, 4, 8, 16, 32, 100, 316, 1000)
MANY_MODELS = 4000  # number of models, enough to keep a thousand devices busy
SIMULATED_ROW = FigureRow(
    "speed_up", HYDRA, 0, 0, None, None, valid=True, origin="simulated", clock="virtual"
)
FIGURE_INCHES = (7.6, 6.0)
ONE_SLOT = "one slot"
UNIT_COLORS = {"forward": "#A9D3BA", "loss": "#E3B23C", "backward": "#2E8B57", "update": "#54689A"}
RULE_LOOKS = {
    "lrtf": ("longest remaining first", "#2E8B57", "o"),
    WHOLE: ("models placed whole", "#8C5A3C", "s"),
    "random": ("random", "#8A8A8A", "v"),
    "fifo": ("first come", "#54689A", "^"),
    "srtf": ("shortest first", "#B0413E", "D"),
}
SMALL_PRINT = (
    "one after another: the models' steps added up, each batch size timed alone, starting a model left out;"
    " by turns: all models trained at once by Hydra, a round is the same samples for each\n"
    "simulated: schedules under a virtual clock, nothing was run; devices are alike, moving a shard costs what it cost"
    " as measured; makespan: a mark is the mean, its line reaches the largest"
)


class ModelSelection(Case):
    metric = METRIC
    methods = (*BASELINES, HYDRA)
    mixes_metrics = True

    def profiles(self, case_profile: CaseProfile) -> tuple[CaseProfile, ...]:
        return _profiles_of(case_profile)

    def jobs(self, case_profile: CaseProfile, depth_by_method: dict[str, int]) -> list[Job]:
        return [
            *(job for name in BASELINES for job in _jobs_alone(case_profile, name)),
            *_jobs_together(case_profile),
        ]

    def table(self, records: Sequence[Record], case_profile: CaseProfile) -> list[FigureRow]:
        """Return, for each method, a row with the speed of all models together in samples per second. Then return rows
        with the turns of shards in the last step of Hydra's last run.
        """
        speeds = [
            speed
            for name in BASELINES
            for speed in _rows_one_after_another(_jobs_alone(case_profile, name), records)
        ]
        for job, series in zip(_jobs_together(case_profile), ("", ONE_SLOT), strict=True):
            speeds += [replace(speed, series=series) for speed in points.rows_of_jobs(METRIC, records, [job])]
        # reasons of baselines without a value
        shortfalls = {name: _shortfall(case_profile, name) for name in BASELINES if speeds}
        refused_rows = [
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
            for name, reason in shortfalls.items()
            if reason
        ]
        speeds = [
            replace(speed, group=f"{_hydra_options(case_profile)['num_models']} models")
            for speed in (*refused_rows, *speeds)
        ]
        hydra_runs = points.repeats_of(_jobs_together(case_profile)[0], records)
        has_trained = bool(hydra_runs) and hydra_runs[-1].status == "ok"
        return speeds + (_turn_rows(hydra_runs[-1]) if has_trained else [])

    def simulated(self, rows: Sequence[FigureRow]) -> list[FigureRow]:
        """Return simulated rows: the ratio of each rule to the proved optimum and, if `rows` have measured turns of
        shards, the speed-up of these turns on one to a thousand devices.
        """
        chains: dict[str, list[float]] = {}
        for turn in rows:
            if turn.metric == "turn_seconds" and turn.value:
                chains.setdefault(turn.group, []).append(turn.value)
        return [*_ratio_rows(), *(_speed_up_rows(list(chains.values())) if chains else [])]

    def figure(self, rows: Sequence[FigureRow], note: str) -> plot.Figure:
        return _draw_model_selection(rows, note, self.methods)


def _profiles_of(case_profile: CaseProfile) -> tuple[CaseProfile, ...]:
    """Return three profiles: one model with the whole batch, one model with half the batch, and all models at once."""
    load, budget = case_profile.workload, case_profile.budget
    assert budget.device_bytes and budget.host_bytes  # every profile has both budgets
    host_bytes = budget.host_bytes
    if case_profile.kind == "demo":
        host_bytes *= DEMO_HOST_FACTOR
    else:
        device_bytes = host_bytes // HOST_PER_DEVICE_MEMORY
        if case_profile.device == "cuda":
            device_bytes = cuda_budget.budget_bytes(device_bytes)
        budget = replace(budget, device_bytes=min(budget.device_bytes, device_bytes))
    whole_batch = replace(case_profile, budget=budget)
    half_load = replace(load, batch_size=load.batch_size // 2)
    steps, warmup = 2 * case_profile.steps, 2 * case_profile.warmup
    half_batch = replace(whole_batch, workload=half_load, steps=steps, warmup=warmup)
    profile_of_all_models = replace(whole_batch, budget=replace(budget, host_bytes=host_bytes))
    return whole_batch, half_batch, profile_of_all_models


def _jobs_alone(case_profile: CaseProfile, name: str) -> list[Job]:
    """Return one job per batch size; each trains one model. Return no job if the plan for the whole batch does not
    fit."""
    profiles = () if _shortfall(case_profile, name) else _profiles_of(case_profile)[:NUM_BATCH_SIZES]
    return [profile.job(name, _model_depth(case_profile)) for profile in profiles]


def _shortfall(case_profile: CaseProfile, name: str) -> str | None:
    """Return, as text, which memory one model with the whole batch lacks by its plan, and how much; None if the model
    fits."""
    whole_batch = _profiles_of(case_profile)[0]
    job = whole_batch.job(name, _model_depth(case_profile))
    plan = method.create(name, job.options).plan(job.workload, whole_batch.room)
    return plan.shortfall(whole_batch.room)


def _jobs_together(case_profile: CaseProfile) -> list[Job]:
    """Return two jobs that train all models together with the same shards: with a double buffer, and without."""
    profile_of_all_models = _profiles_of(case_profile)[-1]
    job = profile_of_all_models.job(HYDRA, _model_depth(case_profile), **_hydra_options(case_profile))
    return [job, replace(job, options={**job.options, "double_buffer": False})]


def _hydra_options(case_profile: CaseProfile) -> dict[str, int]:
    return {
        "num_models": NUM_BATCH_SIZES * NUM_LEARNING_RATES[case_profile.kind],
        "num_batch_sizes": NUM_BATCH_SIZES,
    }


def _model_depth(case_profile: CaseProfile) -> int:
    """Return the largest number of layers per model with which all models fit the host's memory."""
    if case_profile.kind == "demo":
        return DEMO_DEPTH
    hydra, room = method.create(HYDRA, _hydra_options(case_profile)), _profiles_of(case_profile)[-1].room
    assert room.host_bytes
    room = replace(room, host_bytes=int(PLANNED_SHARE * room.host_bytes))

    def fits(num_layers: int) -> bool:
        return hydra.plan(case_profile.workload.at_depth(num_layers), room).shortfall(room) is None

    return max(1, method.largest_depth(fits))


def _rows_one_after_another(jobs: list[Job], records: Sequence[Record]) -> list[FigureRow]:
    """Return, in a list, the row of a method that trains the models one after another; an empty list if a batch size
    has no record. If a run failed, the row states the reason.
    """
    measured = [points.repeats_of(job, records) for job in jobs]
    if not measured or not all(measured):
        return []
    rows = [row_of(METRIC, repeats) for repeats in measured]
    worst_row = next((row for row in rows if not row.valid), rows[0])
    speeds = [_speed_one_after_another(repeats) for repeats in zip(*measured, strict=False)]
    values = [speed for speed in speeds if speed is not None]
    low, high = interval(values)
    scatters = [row.scatter for row in rows if row.scatter is not None]
    return [
        replace(
            worst_row,
            value=statistics.median(values) if values else None,
            low=low,
            high=high,
            num_runs=len(values),
            values=tuple(values),
            scatter=max(scatters, default=None),
            keys=tuple(key for row in rows for key in row.keys),
            steps=(),
            num_steps=min(row.num_steps or 0 for row in rows),
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


def _turn_rows(record: Record) -> list[FigureRow]:
    """Return a row for each turn of a shard in the last step, sorted by model and start. In a row, `series` is the kind
    of the turn, such as forward; `x` is its start and `value` its duration, both in seconds.
    """
    turns = record.schedule.get("turns", [])
    if not turns:
        return []
    loads = [model.job.workload for model in record.models()]
    names = [f"lr {load.learning_rate:.1e}, batch {load.batch_size}" for load in loads]
    step_start = max(turn[-1] for turn in turns) - record.step_seconds[-1]
    step_turns = [turn for turn in turns if (turn[-2] + turn[-1]) / 2 >= step_start]
    first_start = min(turn[-2] for turn in step_turns)
    record_row = replace(row_of(METRIC, [record]), steps=(), num_steps=None)
    return [
        replace(
            record_row,
            metric="turn_seconds",
            value=end - start,
            x=start - first_start,
            group=names[model],
            series=kind,
        )
        for model, _, kind, _, start, end in sorted(step_turns, key=lambda turn: (turn[0], turn[-2]))
    ]


def _ratio_rows() -> Iterator[FigureRow]:
    """Yield the mean and the largest ratio of each scheduling rule to the optimum, by number of devices and models."""
    for devices, models in _optimum.SIZES:
        for rule, ratios in _optimum.ratios_to_optimum(devices, models).items():
            row = replace(SIMULATED_ROW, series=rule, group=f"{devices}, {models}", num_runs=len(ratios))
            yield replace(row, metric="mean_ratio", value=statistics.mean(ratios))
            yield replace(row, metric="largest_ratio", value=max(ratios))


def _speed_up_rows(chains: list[list[float]]) -> list[FigureRow]:
    """Return rows with the speed-up of several devices over one device, for these models and for MANY such models.
    `chains`: the seconds of each model's units."""
    rows = []
    for num_models in (len(chains), MANY_MODELS):
        model_chains = [chains[index % len(chains)] for index in range(num_models)]
        one_device_seconds = sum(map(sum, model_chains))
        for num_devices in DEVICE_COUNTS:
            is_shown = num_models < MANY_MODELS or num_devices == 1 or num_devices >= 32
            if num_devices > 2 * num_models or not is_shown:
                continue
            speed_up = 1.0
            if num_devices > 1:
                speed_up = one_device_seconds / simulate_policy(model_chains, num_devices).makespan
            row = replace(SIMULATED_ROW, value=speed_up, series=f"{num_models:,} models")
            rows.append(replace(row, x=float(num_devices)))
    return rows


def _draw_model_selection(rows: Sequence[FigureRow], note: str, methods: Sequence[str]) -> plot.Figure:
    """Draw four panels: the methods' speeds, makespans compared with the optimum, the shards' turns in one step, and
    the speed-up on many devices.
    """
    speeds = [row for row in rows if row.metric == "samples_per_second"]
    with plot.empty(*FIGURE_INCHES) as drawing:
        above = drawing.add_gridspec(1, 2, wspace=0.17, left=0.075, right=0.985, top=0.925, bottom=0.63)
        below = drawing.add_gridspec(
            1, 2, width_ratios=(1.55, 1), wspace=0.2, left=0.145, right=0.985, top=0.475, bottom=0.16
        )
        speeds_axes, ratios_axes = drawing.add_subplot(above[0, 0]), drawing.add_subplot(above[0, 1])
        turns_axes, speed_ups_axes = drawing.add_subplot(below[0, 0]), drawing.add_subplot(below[0, 1])
        _draw_speeds(speeds_axes, speeds, note, methods)
        _draw_ratios(ratios_axes, [row for row in rows if row.metric.endswith("_ratio")])
        plot.title(turns_axes, "measured: a round of Hydra")
        plot.title(speed_ups_axes, "simulated (virtual clock), units as measured")
        speed_ups_axes.set_ylabel("Speed-up over one device")
        turns = [row for row in rows if row.metric == "turn_seconds"]
        if turns:
            _draw_turns(turns_axes, turns)
            _draw_speed_ups(speed_ups_axes, [row for row in rows if row.metric == "speed_up"])
        for axes in () if turns else (turns_axes, speed_ups_axes):
            plot.write_instead(axes, "No run of Hydra here.")
        plot.legend(drawing, speeds, {})
        plot.small_print(drawing, f"{plot.caption(speeds, [], note)}\n{SMALL_PRINT}")
    return drawing


def _draw_speeds(axes: plot.Axes, rows: Sequence[FigureRow], note: str, methods: Sequence[str]) -> None:
    *alone, hydra = methods
    groups = []
    for name, series in (*((name, "") for name in alone), (hydra, ONE_SLOT), (hydra, "")):
        bar_rows = [row for row in rows if (row.method, row.series) == (name, series)]
        groups.append((", ".join(filter(None, (method.load(name).label, series))), [bar_rows]))
    plot.bars(axes, groups)
    plot.tilt(axes)
    axes.axvline(len(alone) - 0.5, color=plot.EDGE, linewidth=0.5, linestyle=":")
    for x, side, text in (
        (len(alone) - 0.58, "right", "one after another"),
        (len(alone) - 0.42, "left", "by turns"),
    ):
        axes.text(
            x,
            0.99,
            text,
            transform=axes.get_xaxis_transform(),
            ha=side,
            va="top",
            fontsize=6,
            color=plot.EDGE,
        )
    axes.set(ylim=(0, 1.08 * axes.get_ylim()[1]), ylabel=plot.LABELS["samples_per_second"])
    plot.title(axes, ", ".join(["measured", note, *dict.fromkeys(row.group for row in rows)]))


def _draw_ratios(axes: plot.Axes, rows: Sequence[FigureRow]) -> None:
    """Draw each scheduling rule as a mark at the mean of its ratios makespan / optimum, with a line up to the largest
    ratio."""
    plot.title(axes, f"simulated (virtual clock), {INSTANCES} random instances each")
    axes.set_ylabel("Makespan / proved optimum")
    groups = list(dict.fromkeys(row.group for row in rows))
    values = {(row.metric, row.group, row.series): row.value or 0.0 for row in rows}
    for rule_index, (rule, (name, color, mark)) in enumerate(RULE_LOOKS.items()):
        offset = 0.14 * (rule_index - (len(RULE_LOOKS) - 1) / 2)
        x_values = [index + offset for index in range(len(groups))]
        means = [values["mean_ratio", group, rule] for group in groups]
        largest = [values["largest_ratio", group, rule] for group in groups]
        axes.vlines(x_values, means, largest, color=color, linewidth=1)
        axes.plot(x_values, means, mark, color=color, markersize=4, linestyle="", label=name)
    axes.axhline(1, color=plot.EDGE, linewidth=0.6)
    axes.set_xticks(range(len(groups)), [group.replace(", ", " devices,\n") + " models" for group in groups])
    axes.set_ylim(0.97, 1.02 * max(values.values(), default=1.0) + 0.16)
    axes.legend(loc="upper left", ncols=3, columnspacing=1, handletextpad=0.2, borderaxespad=0.1)


def _draw_turns(axes: plot.Axes, rows: Sequence[FigureRow]) -> None:
    """Draw one row per model. A box in the row spans the time in which one of the model's shards computes."""
    from matplotlib.patches import Patch

    models = list(dict.fromkeys(row.group for row in rows))
    for height, model in enumerate(models):
        for kind, color in UNIT_COLORS.items():
            boxes = [
                (row.x or 0.0, row.value or 0.0) for row in rows if (row.group, row.series) == (model, kind)
            ]
            axes.broken_barh(boxes, (height - 0.38, 0.76), facecolors=color, linewidth=0)
    axes.set_yticks(range(len(models)), models, fontsize=5.8)
    last_end = max((row.x or 0.0) + (row.value or 0.0) for row in rows)
    axes.set(xlim=(0, last_end), ylim=(len(models) - 0.4, -0.6), xlabel="Seconds")
    kinds = {row.series for row in rows}
    axes.legend(
        handles=[Patch(facecolor=color, label=kind) for kind, color in UNIT_COLORS.items() if kind in kinds],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=4,
        columnspacing=0.9,
        handlelength=0.9,
        handletextpad=0.4,
        borderaxespad=0,
    )


def _draw_speed_ups(axes: plot.Axes, rows: Sequence[FigureRow]) -> None:
    most_devices = max(row.x or 1.0 for row in rows)
    axes.plot(
        [1, most_devices],
        [1, most_devices],
        ":",
        color=plot.EDGE,
        linewidth=0.8,
        label="as many times as devices",
    )
    for series, mark in zip(dict.fromkeys(row.series for row in rows), ("s--", "o-"), strict=False):
        points = [(row.x or 1.0, row.value or 1.0) for row in rows if row.series == series]
        axes.plot(*zip(*points, strict=True), mark, color=UNIT_COLORS["backward"], label=series)
        text = f"{points[-1][1]:.3g}" if points[-1][1] < 100 else f"{points[-1][1]:,.0f}"
        look: Any = {"textcoords": "offset points", "fontsize": 5.8, "color": plot.EDGE}
        axes.annotate(text, points[-1], xytext=(2, -8), **look)
    axes.set(xscale="log", yscale="log", xlabel="Devices", xlim=(0.7, 3 * most_devices))
    axes.legend(loc="upper left")
