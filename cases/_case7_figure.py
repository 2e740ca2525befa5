"""Draws the figure of case 7: schedules under jitter, predicted and measured step times, morphs (a job changes its
number of ranks while it trains), and a trace of machines that come and go."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from papers.figures import plot
from papers.figures.point import FigureRow

NAMES = {"varuna": "Varuna", "1f1b": "1F1B", "gpipe": "GPipe"}
LOOKS = {"varuna": ("#B8860B", "o"), "1f1b": ("#B0413E", "s"), "gpipe": ("#54689A", "^")}
TRACE = {
    "morphs": ("morphs to the machines that are there", "#B8860B"),
    "restarts": ("restarts from its last hourly checkpoint", "#B0413E"),
}
SMALL_PRINT = (
    "schedules: 9 stages, 64 micro-batches, messages with a jitter of 0.3, mean of 3 seeds; foretold: by a profile"
    " of the same model\ntrace: synthetic, seeded; 355 M parameters on up to 12 machines of one V100, batch 256\n"
    "a change costs {} where the job morphs, else 300 s (assumed) and the work since the checkpoint"
)


def figure(rows: Sequence[FigureRow], note: str) -> plot.Figure:
    with plot.empty(7.6, 6.0) as drawing:
        panels = drawing.subplots(2, 2)
        (first, second), (third, fourth) = panels

        def of(metric: str) -> list[FigureRow]:
            return [row for row in rows if row.metric == metric]

        _schedules(first, of("schedule_seconds"))
        _foretold(second, of("foretold_seconds"), note)
        _morphs(third, of("loss"), of("workers"))
        _trace(fourth, of("trace_speed"), of("mean_speed"), of("machines"))
        measured = [row for row in rows if row.metric == "step_seconds" and row.origin == "run"]
        pauses = [row.value for row in of("pause_seconds") if row.value]
        pause = f"{statistics.median(pauses):.1f} s (measured, panel beside)" if pauses else "15 s (assumed)"
        plot.small_print(drawing, f"{plot.caption(measured, [], note)}\n{SMALL_PRINT.format(pause)}")
        drawing.subplots_adjust(left=0.085, right=0.93, top=0.95, bottom=0.175, wspace=0.34, hspace=0.35)
    return drawing


def _schedules(axes: plot.Axes, rows: Sequence[FigureRow]) -> None:
    plot.title(axes, "simulated (virtual clock)")
    base = {row.x: row.value or 1.0 for row in rows if row.series == "varuna"}
    for name, (color, mark) in LOOKS.items():
        points = [(row.x or 0.0, (row.value or 0.0) / base[row.x]) for row in rows if row.series == name]
        if points:
            axes.plot(*zip(*points, strict=True), mark + "-", color=color, markersize=4, label=NAMES[name])
    axes.axhline(1.26, color=plot.EDGE, linewidth=0.6, linestyle=":")
    axes.text(0, 1.262, "published: up to 26 %", fontsize=5.8, color=plot.EDGE, va="bottom")
    axes.set(xlabel="Seconds of a message (forward pass: 1 s)", ylabel="Step time over Varuna's")
    axes.legend(loc="center right", bbox_to_anchor=(1, 0.42))


def _foretold(axes: plot.Axes, rows: Sequence[FigureRow], note: str) -> None:
    plot.title(axes, f"measured, {note}; foretold by a profile")
    points = [(row.x or 0.0, row.value or 0.0, row.group) for row in rows]
    most = 1.15 * max((max(point[:2]) for point in points), default=1.0)
    axes.plot([0, most], [0, most], ":", color=plot.EDGE, linewidth=0.8)
    for x, y, text in points:
        axes.plot(x, y, "o", color=LOOKS["varuna"][0], markersize=4)
        look: Any = {"textcoords": "offset points", "fontsize": 5.8, "color": plot.EDGE}
        # Put the label above or below the point, away from the diagonal, and let the text run towards the panel's
        # middle.
        side = "left" if x < most / 2 else "right"
        axes.annotate(text, (x, y), xytext=(0, 5 if y >= x else -10), ha=side, **look)
    axes.set(xlim=(0, most), ylim=(0, most), xlabel="Measured step time (s)", ylabel="Foretold step time (s)")


def _morphs(axes: plot.Axes, losses: Sequence[FigureRow], workers: Sequence[FigureRow]) -> None:
    plot.title(axes, "measured: loss through morphs")
    if not losses:
        axes.set(xticks=[], yticks=[])
        look: Any = {
            "transform": axes.transAxes,
            "ha": "center",
            "va": "center",
            "fontsize": 7,
            "color": plot.EDGE,
        }
        axes.text(0.5, 0.5, "No morphed job here: ./run.sh case 7 makes one.", **look)
        return
    for name, line, width in (("undisturbed", "-", 2.4), ("morphed", "-", 0.8)):
        points = [(row.x or 0.0, row.value or 0.0) for row in losses if row.series == name]
        color = {"undisturbed": "#C9C9C9", "morphed": "#B8860B"}[name]
        axes.plot(*zip(*points, strict=True), line, color=color, linewidth=width, label=name)
    low, high = min(row.value or 0.0 for row in losses), max(row.value or 0.0 for row in losses)
    axes.set(xlabel="Step", ylabel="Loss", ylim=(low - 0.5 * (high - low), high + 0.05 * (high - low)))
    axes.legend(loc="upper right")
    _beneath(
        axes, [(row.x or 0.0, row.value or 0.0) for row in workers if row.series == "morphed"], "Workers", low
    )


def _trace(
    axes: plot.Axes, speeds: Sequence[FigureRow], means: Sequence[FigureRow], machines: Sequence[FigureRow]
) -> None:
    plot.title(axes, "simulated: synthetic trace of machines")
    mean = {row.series: row.value or 0.0 for row in means}
    for name, (text, color) in TRACE.items():
        points = [(row.x or 0.0, row.value or 0.0) for row in speeds if row.series == name]
        if points:
            axes.step(
                *zip(*points, strict=True), where="post", color=color, label=f"{text}, mean {mean[name]:.0f}"
            )
    top = max((row.value or 0.0 for row in speeds), default=1.0)
    axes.set(xlabel="Hours", ylabel=plot.LABELS["samples_per_second"], ylim=(-0.5 * top, 1.45 * top))
    axes.legend(loc="upper right", fontsize=5.6)
    _beneath(axes, [(row.x or 0.0, row.value or 0.0) for row in machines], "Machines", 0.0)


def _beneath(axes: plot.Axes, points: Sequence[tuple[float, float]], text: str, lowest: float) -> None:
    """Draw the points, pairs of x and a count, as steps on a second y axis in the panel's lowest quarter. `text`: label
    of this second axis. `lowest`: the first y axis gets no ticks below this value, where the counts are drawn.
    """
    axes.set_yticks([tick for tick in axes.get_yticks() if lowest <= tick <= axes.get_ylim()[1]])
    other = axes.twinx()
    other.step(*zip(*points, strict=True), where="post", color=plot.EDGE, linewidth=0.7)
    most = max(value for _, value in points)
    other.set(ylim=(0, 4.2 * most), yticks=(0, most))
    other.set_ylabel(text, loc="bottom")
