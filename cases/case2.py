"""Figure 7a: how fast is STRONGHOLD at the largest size of each of the others?

The sizes are those that case 1 finds. Where a baseline's own training is not the reference's, its size is shown, and
STRONGHOLD is not run at it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cases import _published
from harness.core.job import Job
from harness.core.record import Record
from harness.figures import case, plot
from harness.figures.point import Row, row
from harness.figures.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINES = ("megatron-lm", "l2l", "zero-offload", "zero-infinity")  # in the figure's order
OURS = "stronghold"
METHODS = (*BASELINES, OURS)
SEARCHES = BASELINES
RUNS: dict[str, tuple[int, ...]] = {}  # none of their own: the sizes are found, in every profile
PUBLISHED = _published.rows("samples_per_second", 2)


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    """`sizes`: layers of the largest model that each baseline trained, where its gate passed."""
    found = {name: sizes[name] for name in BASELINES if name in sizes}
    baselines = [used.job(name, depth) for name, depth in found.items()]
    depths = sorted(set(found.values()))
    return baselines + [used.job(OURS, depth, window_size=used.window_at(depth)) for depth in depths]


def table(records: Sequence[Record], used: Profile) -> list[Row]:
    """The baselines, then STRONGHOLD at their depths."""
    rows = case.rows("samples_per_second", jobs(used, case.sizes(SEARCHES, records)), records)
    for name in BASELINES:
        largest, _ = case.largest(name, records)
        if largest and not any(row.method == name for row in rows):  # its gate did not pass
            rows.append(row("samples_per_second", largest))
    still_searched = {name for name in BASELINES if not case.is_searched(name, records)}
    rows = [replace(row, is_final=row.method not in still_searched) for row in rows]
    return sorted(rows, key=lambda row: METHODS.index(row.method))


def figure(rows: Sequence[Row], note: str) -> Figure:
    return plot.figure(rows, _draw, note, series={"Baselines": BASELINES[0], case.label(OURS): OURS})


def _draw(axes: Axes, rows: list[Row]) -> None:
    groups = []
    for name in BASELINES:
        own = [row for row in rows if row.method == name]
        depths = {row.num_layers for row in own}
        groups.append(
            (case.label(name), [own, [row for row in rows if row.method == OURS and row.num_layers in depths]])
        )
    plot.bars(axes, groups)
    plot.tilt(axes)
    axes.set_ylabel("Throughput (samples/s)")
