"""Draws the figure of case 6: two panels are measured, two are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cases._optimum import INSTANCES, WHOLE
from harness.core import method
from papers.figures import plot
from papers.figures.point import FigureRow

SIZE_INCHES = (7.6, 6.0)
ONE_SLOT = "one slot"
UNIT_COLORS = {"forward": "#A9D3BA", "loss": "#E3B23C", "backward": "#2E8B57", "update": "#54689A"}
RULES = {
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


def figure(rows: Sequence[FigureRow], note: str, methods: Sequence[str]) -> plot.Figure:
    """Draw four panels: the methods' speeds, makespans compared with the optimum, the shards' turns in one step, and
    the speed-up on many devices.
    """
    speeds = [row for row in rows if row.metric == "samples_per_second"]
    with plot.empty(*SIZE_INCHES) as drawing:
        above = drawing.add_gridspec(1, 2, wspace=0.17, left=0.075, right=0.985, top=0.925, bottom=0.63)
        below = drawing.add_gridspec(
            1, 2, width_ratios=(1.55, 1), wspace=0.2, left=0.145, right=0.985, top=0.475, bottom=0.16
        )
        first, second, third, fourth = (
            drawing.add_subplot(grid[0, side]) for grid in (above, below) for side in (0, 1)
        )
        _speeds(first, speeds, note, methods)
        _ratios(second, [row for row in rows if row.metric.endswith("_ratio")])
        plot.title(third, "measured: a round of Hydra")
        plot.title(fourth, "simulated (virtual clock), units as measured")
        fourth.set_ylabel("Speed-up over one device")
        turns = [row for row in rows if row.metric == "turn_seconds"]
        if turns:
            _turns(third, turns)
            _speed_ups(fourth, [row for row in rows if row.metric == "speed_up"])
        for axes in () if turns else (third, fourth):
            axes.set(xticks=[], yticks=[])
            look: Any = {
                "transform": axes.transAxes,
                "ha": "center",
                "va": "center",
                "fontsize": 7,
                "color": plot.EDGE,
            }
            axes.text(0.5, 0.5, "No run of Hydra here.", **look)
        plot.legend(drawing, speeds, {})
        plot.small_print(drawing, f"{plot.caption(speeds, [], note)}\n{SMALL_PRINT}")
    return drawing


def _speeds(axes: plot.Axes, rows: Sequence[FigureRow], note: str, methods: Sequence[str]) -> None:
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


def _ratios(axes: plot.Axes, rows: Sequence[FigureRow]) -> None:
    """Draw each scheduling rule as a mark at the mean of its ratios makespan / optimum, with a line up to the largest
    ratio."""
    plot.title(axes, f"simulated (virtual clock), {INSTANCES} random instances each")
    axes.set_ylabel("Makespan / proved optimum")
    groups = list(dict.fromkeys(row.group for row in rows))
    values = {(row.metric, row.group, row.series): row.value or 0.0 for row in rows}
    for place, (rule, (name, color, mark)) in enumerate(RULES.items()):
        at = [index + 0.14 * (place - (len(RULES) - 1) / 2) for index in range(len(groups))]
        means, largest = (
            [values[f"{of}_ratio", group, rule] for group in groups] for of in ("mean", "largest")
        )
        axes.vlines(at, means, largest, color=color, linewidth=1)
        axes.plot(at, means, mark, color=color, markersize=4, linestyle="", label=name)
    axes.axhline(1, color=plot.EDGE, linewidth=0.6)
    axes.set_xticks(range(len(groups)), [group.replace(", ", " devices,\n") + " models" for group in groups])
    axes.set_ylim(0.97, 1.02 * max(values.values(), default=1.0) + 0.16)
    axes.legend(loc="upper left", ncols=3, columnspacing=1, handletextpad=0.2, borderaxespad=0.1)


def _turns(axes: plot.Axes, rows: Sequence[FigureRow]) -> None:
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
    last = max((row.x or 0.0) + (row.value or 0.0) for row in rows)
    axes.set(xlim=(0, last), ylim=(len(models) - 0.4, -0.6), xlabel="Seconds")
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


def _speed_ups(axes: plot.Axes, rows: Sequence[FigureRow]) -> None:
    most = max(row.x or 1.0 for row in rows)
    axes.plot([1, most], [1, most], ":", color=plot.EDGE, linewidth=0.8, label="as many times as devices")
    for series, mark in zip(dict.fromkeys(row.series for row in rows), ("s--", "o-"), strict=False):
        points = [(row.x or 1.0, row.value or 1.0) for row in rows if row.series == series]
        axes.plot(*zip(*points, strict=True), mark, color=UNIT_COLORS["backward"], label=series)
        text = f"{points[-1][1]:.3g}" if points[-1][1] < 100 else f"{points[-1][1]:,.0f}"
        look: Any = {"textcoords": "offset points", "fontsize": 5.8, "color": plot.EDGE}
        axes.annotate(text, points[-1], xytext=(2, -8), **look)
    axes.set(xscale="log", yscale="log", xlabel="Devices", xlim=(0.7, 3 * most))
    axes.legend(loc="upper left")
