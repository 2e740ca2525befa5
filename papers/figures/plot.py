"""Draws figures in the papers' look: a panel of our numbers, a panel of the published numbers if there are any, and a
caption with machine, clock and intervals.

A filled mark is a run that passed the gate, a hollow mark a run that did not. A cross is a size that failed, a dot is a
timed step. Bars hatched in one direction are published numbers. Bars hatched crosswise are doubtful times; the text
under the bar tells the reason, few timed steps or busy cores. Both panels have the same scale if our widths and clock
are the published ones. The same rows always give files of the same bytes.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.whole_file import write_whole
from harness.core import method
from papers.figures.point import MIN_TIMED_STEPS, FigureRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURE_INCHES = (7.6, 2.9)
BAR_WIDTH = 0.4
TICK_DEGREES = 20
EDGE, CROSS = "#4A4A4A", "#B00020"
FAILED_SIZES_ID = "failed"  # id of the crosses for failed sizes, which are at the foot of a panel with lines
DARK_RGB_SUM = 510  # text on a color is white if the color's red, green and blue sum to less than this
NOTE_COLUMNS = 190
CONTINUED = "\n    "  # a line break within one note of the small print
# id of the text at the foot of a figure; the page prints this text below the figure
SMALL_PRINT = "small print"
PUBLISHED_HATCH, DOUBT_HATCH = "////", "xxxx"
FOOT_POINTS = 4.1
STEP_DOTS_ID = "timed steps"  # id of the dots, and their name in the legend
STYLE = Path(__file__).with_name("paper.mplstyle")
CLOCKS = {"sim": "sim (a CPU whose device memory and link are simulated)"}
SCALES = {
    "params": ((1e9, "billions"), (1e6, "millions")),
    "step_seconds": ((1e-3, "ms"),),
    "samples_per_second": ((1.0, ""),),
    "tokens_per_second": ((1.0, ""),),
}
LABELS = {
    "params": "Parameters",
    "step_seconds": "Step time",
    "samples_per_second": "Throughput (samples/s)",
    "tokens_per_second": "Throughput (tokens/s)",
}


def figure(
    rows: Sequence[FigureRow],
    metric: str,
    draw: Callable[[Axes, list[FigureRow]], None],
    note: str,
    series: dict[str, str] | None = None,
    is_line: bool = False,
) -> Figure:
    """Return a figure of our rows and, if there are any, the published rows beside them. `draw` draws rows into one
    panel.

    `series`: by label in the legend, the name of a method; for the label "", the legend has the method's own label.
    """
    measured = [row for row in rows if row.origin != "published"]
    published = [row for row in rows if row.origin == "published"]
    panel_rows = [(measured, f"measured, {note}")]
    panel_rows += [(published, "published")] if published else []
    with empty(*FIGURE_INCHES) as drawing:
        panels = drawing.subplots(1, len(panel_rows), squeeze=False)[0]
        for axes, (rows_of_panel, text) in zip(panels, panel_rows, strict=True):
            axes.set_ylabel(axis_text(LABELS[metric], rows_of_panel))
            draw(axes, rows_of_panel)
            title(axes, text)
        widths_and_clocks = [
            {(row.hidden_size, row.clock) for row in rows_of_side} for rows_of_side in (measured, published)
        ]
        if measured and widths_and_clocks[0] == widths_and_clocks[1]:
            top = max(axes.get_ylim()[1] for axes in panels)
            for axes in panels:
                axes.set_ylim(0, top)
        legend(drawing, rows, series or {}, is_line)
        small_print(drawing, caption(measured, published, note))
        lines = 0 if is_line else max((len(foot(row)) for row in rows), default=0)
        drawing.subplots_adjust(left=0.085, right=0.99, top=0.84, bottom=0.31 + 0.024 * lines, wspace=0.2)
    return drawing


@contextmanager
def empty(width: float, height: float) -> Iterator[Figure]:
    """Make an empty figure of this size, in inches. Everything that is drawn inside the context has the papers'
    look."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rc_file(STYLE)
        yield Figure(figsize=(width, height))


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=7, loc="left", color=EDGE)


def write_instead(axes: Axes, text: str) -> None:
    """Write a text into the middle of a panel that has no data."""
    look: Any = {"transform": axes.transAxes, "ha": "center", "va": "center", "fontsize": 7, "color": EDGE}
    axes.set(xticks=[], yticks=[])
    axes.text(0.5, 0.5, text, **look)


def small_print(drawing: Figure, text: str) -> None:
    drawing.text(
        0.012, 0.0435 / drawing.get_figheight(), text, fontsize=5.4, color=EDGE, va="bottom", gid=SMALL_PRINT
    )


def notes(drawing: Figure) -> list[str]:
    """Return the notes of a figure's small print, each as one line of text."""
    texts = [text.get_text() for text in drawing.texts if text.get_gid() == SMALL_PRINT]
    lines = "\n".join(texts).replace(CONTINUED, " ").split("\n")
    return [line for line in lines if line]


def foot(row: FigureRow) -> list[str]:
    """Return the lines of text under a row's bar: its placement, its clipping, and why its time is doubtful."""
    return [text for text in (row.placement, row.clipping, *row.doubts) if text]


def by_method(axes: Axes, rows: Sequence[FigureRow], names: Sequence[str]) -> None:
    """Draw a bar for each method. A size at which the method failed is a cross on its bar."""
    bars(axes, [(method.load(name).label, [[row for row in rows if row.method == name]]) for name in names])
    tilt(axes)


def bars(axes: Axes, groups: Sequence[tuple[str, Sequence[Sequence[FigureRow]]]]) -> None:
    """Draw named groups of bars. A group consists of places side by side; all rows of a place are drawn over one
    another."""
    rows = [row for _, group in groups for place in group for row in place]
    scale = scale_of(rows)[0]
    top = max((_highest_value(row) for row in rows), default=0.0) / scale or 1.0
    for index, (_, group) in enumerate(groups):
        for place, stack in enumerate(group):
            _draw_stack(axes, index + BAR_WIDTH * (place - (len(group) - 1) / 2), stack, scale, top)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups])
    axes.tick_params(axis="x", pad=2 + 1.25 * FOOT_POINTS * max((len(foot(row)) for row in rows), default=0))
    axes.set(xlim=(-0.6, len(groups) - 0.4), ylim=(0, 1.16 * top))


def succeeded(row: FigureRow) -> bool:
    return row.status == "ok" and row.value is not None


def _highest_value(row: FigureRow) -> float:
    return max(row.high or row.value or 0.0, *row.steps, 0.0)


def _draw_stack(axes: Axes, x: float, stack: Sequence[FigureRow], scale: float, top: float) -> None:
    """Draw a bar for each row that succeeded, and a cross for each size that failed. The bar's number stands above the
    bar or, if there is a cross, inside or beside it."""
    failed_rows = [row for row in stack if not succeeded(row)]
    bar_rows = [row for row in stack if succeeded(row)]
    for row in failed_rows:
        height = row.value / scale if row.value else 0.03 * top
        axes.plot([x], [height], "x", color=CROSS, markeredgewidth=1.3)
        if row.value and not bar_rows:
            _write_label(axes, x, height + 0.04 * top, number(height), color=CROSS)
    for row in bar_rows:
        height, rgb = (row.value or 0.0) / scale, bytes.fromhex(method.load(row.method).color[1:])
        _draw_bar(axes, x, height, row)
        _draw_error_bar(axes, x, row, scale)
        _draw_step_dots(axes, x, row, scale)
        under: Any = {
            "transform": axes.get_xaxis_transform(),
            "fontsize": FOOT_POINTS,
            "va": "top",
            "linespacing": 1.05,
        }
        if foot_lines := foot(row):
            _write_label(axes, x, -0.02, "\n".join(foot_lines), **under)
        # the search has not ended, and may find a larger size
        is_least = row.metric == "params" and not row.is_final
        text = f"\N{GREATER-THAN OR EQUAL TO} {number(height)}" if is_least else number(height)
        if not failed_rows:
            _write_label(axes, x, _highest_value(row) / scale + 0.02 * top, text)
        elif height > 0.16 * top:
            ink = "white" if row.valid and sum(rgb) < DARK_RGB_SUM else "black"
            _write_label(axes, x, height - 0.04 * top, text, va="top", fontsize=5, color=ink)
        else:  # the bar is too short for its number, which stands beside it
            _write_label(axes, x - BAR_WIDTH / 2, height / 2, text, ha="right", va="center", fontsize=5.4)


def _draw_bar(axes: Axes, x: float, height: float, row: FigureRow) -> None:
    color, hatch = method.load(row.method).color, DOUBT_HATCH if row.doubts else None
    rgb, edge = bytes.fromhex(color[1:]), bytes.fromhex(EDGE[1:])
    mixed = "#" + "".join(f"{sum(pair) // 2:02X}" for pair in zip(rgb, edge, strict=True))
    axes.bar(
        x,
        height,
        BAR_WIDTH * 0.9,
        linewidth=0.8,
        linestyle="-" if row.valid else "--",
        edgecolor=EDGE if row.valid else mixed,
        facecolor=color if row.valid else "none",
        hatch=PUBLISHED_HATCH if row.origin == "published" else hatch,
    )


def _write_label(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    axes.text(x, y, text, **{"ha": "center", "va": "bottom", "fontsize": 5.8, "color": EDGE, **look})


def line(axes: Axes, points: Sequence[tuple[float, FigureRow]], label: str) -> None:
    """Add a line through the points that have a number. A failed point is a cross at the foot of the panel, labeled
    with the line's name."""
    if not points:
        return
    good = [(x, row) for x, row in points if succeeded(row)]
    scale = _scale_of_panel(axes, [row for _, row in points])
    published, color = points[0][1].origin == "published", method.load(points[0][1].method).color
    last_x = max(x for x, _ in points)
    values = [row.value / scale for _, row in good if row.value is not None]
    if good:
        axes.plot([x for x, _ in good], values, "--" if published else "-", color=color, label=label)
        for (x, row), value in zip(good, values, strict=True):
            face, edge = (color, color) if row.valid else ("white", EDGE)
            axes.plot([x], [value], "s" if published else "o", markerfacecolor=face, markeredgecolor=edge)
            _draw_error_bar(axes, x, row, scale)
            _draw_step_dots(axes, x, row, scale)
            if foot_lines := foot(row):
                look: Any = {"textcoords": "offset points", "va": "top", "fontsize": FOOT_POINTS}
                look |= {"color": EDGE, "ha": "right" if x == last_x else "left"}
                axes.annotate("\n".join(foot_lines), (x, value), xytext=(1, -4), **look)
    for x, row in points:
        if not succeeded(row):
            # the last label ends at its cross, so that it stays inside the figure
            _draw_cross_at_foot(axes, x, color, label, "right" if x == last_x else "center")
    _fit_axes(axes)


def _draw_cross_at_foot(axes: Axes, x: float, color: str, label: str, side: str) -> None:
    """Draw a cross for a failed size at the panel's foot, above the crosses that other lines have at the same x.
    `side`: where the label's text is anchored to the cross, as matplotlib's horizontal alignment."""
    lines: list[Any] = list(axes.lines)
    crosses = [mark for mark in lines if mark.get_gid() == FAILED_SIZES_ID and mark.get_xdata()[0] == x]
    height = 0.1 * len(crosses)
    at_foot: Any = {"transform": axes.get_xaxis_transform(), "clip_on": False}
    axes.plot([x], [height], "x", color=color, markeredgewidth=1.3, gid=FAILED_SIZES_ID, **at_foot)
    _write_label(axes, x, height + 0.025, label, fontsize=5.4, ha=side, **at_foot)


def _fit_axes(axes: Axes) -> None:
    """Put ticks at all points, and leave room for the legend above the highest point."""
    lines: list[Any] = list(axes.lines)
    ticks = sorted({float(mark.get_xdata()[0]) for mark in lines if mark.get_marker() in ("o", "s", "x")})
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        highest = max(max(mark.get_ydata()) for mark in lines if mark.get_gid() != FAILED_SIZES_ID)
        num_rows = (len(labels) + 1) // 2
        axes.set_ylim(0, float(highest) * (1.08 + 0.13 * num_rows) or 1.0)
        axes.legend(loc="upper left", ncols=min(2, len(labels)), borderaxespad=0.1)


def _scale_of_panel(axes: Axes, rows: Sequence[FigureRow]) -> float:
    """Return the number by which all values of this panel are divided, so that they have the unit of its axis."""
    label = axes.get_ylabel()
    scales = [scale for scale, unit in SCALES[rows[0].metric] if label.endswith(f"({unit})")]
    return scales[0] if scales else scale_of(rows)[0]


def tilt(axes: Axes) -> None:
    """Turn the tick labels by the angle that they have in the published figures."""
    for label in axes.get_xticklabels():
        label.set(rotation=TICK_DEGREES, horizontalalignment="right", rotation_mode="anchor")


def scale_of(rows: Sequence[FigureRow]) -> tuple[float, str]:
    """Return a divisor that makes these rows' values easy to read, and the name of the unit that the quotients have."""
    if not rows:
        return 1.0, ""
    scales = SCALES[rows[0].metric]
    largest = max(row.value or 0.0 for row in rows)
    return next((scale for scale in scales if largest >= 0.1 * scale[0]), scales[-1])


def axis_text(name: str, rows: Sequence[FigureRow]) -> str:
    unit = scale_of(rows)[1]
    return f"{name} ({unit})" if unit else name


def number(value: float) -> str:
    """Return a number as text with three significant digits; from 1000 on, as an integer."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def caption(measured: Sequence[FigureRow], published: Sequence[FigureRow], note: str) -> str:
    """Return the caption: machine, clock, profile, window, number of runs and intervals, doubtful times, failed gates,
    and the source of the published numbers."""
    rows = [row for row in measured if row.metric in SCALES]
    texts = _measured_texts(rows, note) if rows else []
    if published:
        texts.append(
            f"published: {published[0].machine}; clock {published[0].clock}{_windows_text(published)};"
            " one process a point, from the artifact's logs, judged by their losses"
        )
    return wrapped(texts)


def _measured_texts(rows: Sequence[FigureRow], note: str) -> list[str]:
    """Return the caption's texts on measured rows."""
    drawn = [row for row in rows if succeeded(row)]
    runs = sorted({row.num_runs for row in drawn})
    single = [row for row in drawn if row.metric != "params" and row.low is None]
    scatters = [row.scatter for row in single if row.scatter is not None]
    clock = CLOCKS.get(rows[0].clock, rows[0].clock)
    texts = [
        f"measured: {note}; {rows[0].machine}; clock {clock}{_windows_text(rows)};"
        f" median of {' or '.join(map(str, runs)) or 'no'} process{'' if runs == [1] else 'es'} a point; "
        + (
            "error bars: 95 % interval of the mean over processes"
            if any(row.low is not None for row in rows)
            else "no intervals below 3 processes"
        )
        + (f"; steps scatter up to {max(scatters):.0%}" if scatters else "")
    ]
    if any(row.doubts for row in drawn):
        texts.append(
            "doubtful time (hatched crosswise, or told at the point): fewer than"
            f" {MIN_TIMED_STEPS} timed steps, or a load average above the number of cores as the run began"
        )
    unfinished = dict.fromkeys(method.load(row.method).label for row in rows if not row.is_final)
    if unfinished:
        texts.append(f"{', '.join(unfinished)}: search not finished")
    reason_of_untrained = {method.load(row.method).label: row.reason for row in drawn if not row.valid}
    untrained = [
        f"gate not passed: {name}: {reason}"[: NOTE_COLUMNS - 1]
        for name, reason in reason_of_untrained.items()
    ]
    return texts + untrained[:2]


def wrapped(texts: Sequence[str]) -> str:
    """Return the small print: the texts, each wrapped into lines of at most NOTE_COLUMNS characters."""
    return "\n".join(CONTINUED.join(textwrap.wrap(text, NOTE_COLUMNS - len(CONTINUED))) for text in texts)


def _windows_text(rows: Sequence[FigureRow]) -> str:
    windows = sorted({row.window_size for row in rows if row.window_size and succeeded(row)})
    return f"; window {', '.join(map(str, windows))}" if windows else ""


def save(drawing: Figure, stem: Path) -> list[Path]:
    """Save the figure as PDF and PNG, without a date or a version in the files. Return the files' paths."""
    import matplotlib

    looks: dict[str, Any] = {
        "pdf": {"metadata": {"CreationDate": None, "Producer": None, "Creator": None}},
        "png": {"metadata": {"Software": None}, "dpi": 200},
    }
    paths = [Path(f"{stem}.{kind}") for kind in looks]
    # savefig() reads this setting; journals refuse the default, fonts of type 3
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        for path, (kind, look) in zip(paths, looks.items(), strict=True):
            buffer = io.BytesIO()
            drawing.savefig(buffer, format=kind, **look)
            write_whole(path, buffer.getvalue())
    return paths


def svg(drawing: Figure) -> str:
    """Return the figure as SVG, without the small print, which the page prints below the figure."""
    import matplotlib

    buffer = io.StringIO()
    small_print_texts = [text for text in drawing.texts if text.get_gid() == SMALL_PRINT]
    for text in small_print_texts:
        text.set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "harness"}):
        # makes the ids of SVG elements the same in every call
        drawing.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None},
            bbox_inches="tight",
            pad_inches=0.06,
        )
    for text in small_print_texts:
        text.set_visible(True)
    return buffer.getvalue()


def _draw_error_bar(axes: Axes, x: float, row: FigureRow, scale: float) -> None:
    if row.value is None or row.low is None or row.high is None:
        return
    # The interval is the mean's, but the drawn value is the median: draw the interval around the interval's middle.
    middle, half_width = (row.low + row.high) / 2, (row.high - row.low) / 2
    axes.errorbar(
        [x],
        [middle / scale],
        yerr=[half_width / scale],
        fmt="none",
        ecolor="black",
        elinewidth=0.8,
        capsize=2,
    )


def _draw_step_dots(axes: Axes, x: float, row: FigureRow, scale: float) -> None:
    """Draw a dot for each timed step of a row that succeeded."""
    if row.steps and succeeded(row):
        look: Any = {"color": "black", "alpha": 0.55, "s": 3.5, "linewidths": 0, "zorder": 3}
        axes.scatter([x] * len(row.steps), [value / scale for value in row.steps], gid=STEP_DOTS_ID, **look)


def legend(drawing: Figure, rows: Sequence[FigureRow], series: dict[str, str], is_line: bool = False) -> None:
    """Add a legend. The legend explains the colors of `series`, and those marks (filled, hollow, hatched, crosses,
    dots) that occur in these rows."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def key(label: str, face: str, shape: str = "o", **look: Any) -> Any:
        if is_line:
            style: Any = "--" if shape == "s" else ""
            return Line2D(
                [], [], color=EDGE, marker=shape, label=label, linestyle=style, markerfacecolor=face
            )
        return Patch(facecolor=face, edgecolor=EDGE, linewidth=0.7, label=label, **look)

    drawn = [row for row in rows if succeeded(row)]
    entries = [
        key(label or method.load(name).label, method.load(name).color) for label, name in series.items()
    ]
    if any(row.valid for row in drawn):
        entries.append(key("trained (gate passed)", "#C9C9C9"))
    if any(not row.valid for row in drawn):
        entries.append(key("gate not passed", "white", linestyle="--"))
    if len(drawn) < len(rows):
        entries.append(
            Line2D([], [], color=EDGE if is_line else CROSS, marker="x", linestyle="", label="size failed")
        )
    if any(row.origin == "published" for row in rows):
        entries.append(key("published", "white", shape="s", hatch=PUBLISHED_HATCH))
    if any(row.steps for row in drawn):
        entries.append(
            Line2D(
                [], [], color="black", alpha=0.55, marker=".", markersize=3, linestyle="", label=STEP_DOTS_ID
            )
        )
    if any(row.doubts for row in drawn) and not is_line:
        entries.append(key("doubtful time", "white", hatch=DOUBT_HATCH))
    place: Any = {"loc": "upper right", "bbox_to_anchor": (0.995, 1.0)}
    drawing.legend(handles=entries, ncols=len(entries), columnspacing=1.1, handlelength=1.6, **place)
