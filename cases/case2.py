"""Figure 7a: how fast is STRONGHOLD at the largest size of each baseline?

The sizes are those that case 1 finds. A baseline that fails the gate shows its size alone: STRONGHOLD is not run there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.core.job import Job
from harness.core.record import Record
from harness.figures import case, plot
from harness.figures.point import FigureRow, row_of
from harness.figures.profile import Profile

METRIC = "samples_per_second"
BASELINES = ("megatron-lm", "l2l", "zero-offload", "zero-infinity")  # in the figure's order
OURS = "stronghold"
METHODS = (*BASELINES, OURS)
SEARCHES = BASELINES
RUNS: dict[str, tuple[int, ...]] = {}  # sizes are found, in every profile
LOOK = {"series": {"Baselines": BASELINES[0], "": OURS}}


def jobs(used: Profile, sizes: dict[str, int]) -> list[Job]:
    found = {name: sizes[name] for name in BASELINES if name in sizes}
    baselines = [used.job(name, depth) for name, depth in found.items()]
    depths = sorted(set(found.values()))
    return baselines + [used.job(OURS, depth, window_size=used.window_at(depth)) for depth in depths]


def table(records: Sequence[Record], used: Profile) -> list[FigureRow]:
    """The baselines, then STRONGHOLD at their depths."""
    rows = case.rows(METRIC, jobs(used, case.sizes(SEARCHES, records)), records)
    for name in BASELINES:
        largest, _ = case.largest(name, records)
        if largest and not any(row.method == name for row in rows):  # its gate did not pass
            rows.append(row_of(METRIC, largest))
    still_searched = {name for name in BASELINES if not case.is_searched(name, records)}
    rows = [replace(row, is_final=row.method not in still_searched) for row in rows]
    return sorted(rows, key=lambda row: METHODS.index(row.method))


def draw(axes: plot.Axes, rows: list[FigureRow]) -> None:
    groups = []
    for name in BASELINES:
        own = [row for row in rows if row.method == name]
        depths = {row.num_layers for row in own}
        ours = [row for row in rows if row.method == OURS and row.num_layers in depths]
        groups.append((case.label(name), [own, ours]))
    plot.bars(axes, groups)
    plot.tilt(axes)


def pick(rows: Sequence[FigureRow]) -> list[FigureRow]:
    """Each baseline at its largest depth that trained, passing the gate if it did anywhere, and STRONGHOLD there."""
    found = []
    for name in BASELINES:
        trained = [row for row in rows if row.method == name and plot.succeeded(row)]
        found += sorted(trained, key=lambda row: (row.valid, row.num_layers))[-1:]
    depths = {row.num_layers for row in found}
    return found + [row for row in rows if row.method == OURS and row.num_layers in depths]
