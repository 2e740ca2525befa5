"""Draws the figure of case 8: one panel per method, with measured and predicted throughput over the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.core import method
from papers.figures import plot
from papers.figures.point import FigureRow

LOOKS = {"strong": ("#2F6690", "o", "one batch, split"), "weak": ("#C9A227", "s", "one sample a rank")}
SMALL_PRINT = (
    "strong scaling: the profile's batch, split over the ranks; weak: one sample a rank. White: the gate was not"
    " passed; cross: no run.\nforetold: by the machine's rates, split over the ranks; what ranks exchange is left out,"
    " but for Varuna's pipelines"
)
NO_FORECAST = "no forecast: the machine's rates are not known (./run.sh doctor --calibrate)"


def figure(rows: Sequence[FigureRow], names: Sequence[str], note: str) -> plot.Figure:
    measured = [row for row in rows if row.origin == "run"]
    foretold = [row for row in rows if row.origin == "simulated"]
    with plot.empty(7.6, 4.2) as drawing:
        panels = drawing.subplots(2, -(-len(names) // 2), squeeze=False)
        for number, (axes, name) in enumerate(zip(panels.flat, names, strict=False)):
            _panel(axes, _of(name, measured), _of(name, foretold), has_forecasts=bool(foretold))
            plot.title(axes, method.load(name).label)
            if number % panels.shape[1] == 0:
                axes.set_ylabel("Samples/s")
            if number >= panels.shape[1]:
                axes.set_xlabel("ranks")
        handles = {
            label: handle
            for axes in panels.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        drawing.legend(
            handles.values(), handles.keys(), ncols=4, loc="upper right", bbox_to_anchor=(0.995, 1.0)
        )
        explanation = SMALL_PRINT if foretold else f"{SMALL_PRINT.partition(chr(10))[0]}\n{NO_FORECAST}"
        plot.small_print(drawing, f"{plot.caption(measured, [], note)}\n{explanation}")
        drawing.subplots_adjust(left=0.07, right=0.99, top=0.88, bottom=0.27, wspace=0.35, hspace=0.4)
    return drawing


def _of(name: str, rows: Sequence[FigureRow]) -> list[FigureRow]:
    return [row for row in rows if row.method == name]


def _panel(
    axes: plot.Axes, measured: Sequence[FigureRow], foretold: Sequence[FigureRow], has_forecasts: bool
) -> None:
    for series, (color, mark, text) in LOOKS.items():
        series_rows = [row for row in measured if row.series == series]
        points = [(row.x or 0.0, row.value or 0.0) for row in series_rows if plot.succeeded(row)]
        if points:
            axes.plot(*zip(*points, strict=True), "-", color=color)
        for row in series_rows:
            x, look = [row.x or 0.0], dict[str, Any](color=color, markersize=4)
            if plot.succeeded(row):
                look |= (
                    {"markerfacecolor": color, "label": text} if row.valid else {"markerfacecolor": "white"}
                )
                axes.plot(x, [row.value or 0.0], mark, **look)
            else:
                axes.plot(x, [0.0], "x", clip_on=False, **look)
        beside = [(row.x or 0.0, row.value or 0.0) for row in foretold if row.series == series]
        if beside:
            axes.plot(*zip(*beside, strict=True), ":", color=color, linewidth=1.0, label=f"{text}: foretold")
    if has_forecasts and measured and not foretold:
        _tell(axes, "no forecast")
    if not measured:
        _tell(axes, "not measured")
    axes.set_xticks([1, 2, 4])
    axes.set(xlim=(0.6, 4.4), ylim=(0, None))


def _tell(axes: plot.Axes, text: str) -> None:
    look: Any = {
        "transform": axes.transAxes,
        "ha": "center",
        "va": "center",
        "fontsize": 6,
        "color": plot.EDGE,
    }
    axes.text(0.5, 0.5, text, **look)
