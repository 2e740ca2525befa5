"""Draws simulated steps of pipelines: a row for each stage, a box for each pass."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from harness.simulation.event_core import KINDS
from methods.pipeline.config.simulate import PipelineRun
from papers.figures import plot

PASS_COLORS = {"F": "#A9D3BA", "R": "#E3B23C", "B": "#2E8B57"}
PASS_NAMES = {"F": "forward", "R": "recompute", "B": "backward"}
# most stages x micro-batches of a panel: more boxes could not be told apart, and take long to draw
MOST_BOXES = 20_000


def timeline(runs: Mapping[str, PipelineRun], note: str) -> plot.Figure:
    """Draw one panel for each run, all on one scale of time. `runs`: the runs by the names of their schedules. `note`:
    small print below the panels. Raises ValueError if a run has more than MOST_BOXES stages x micro-batches."""
    from matplotlib.patches import Patch

    with plot.empty(7.6, 0.6 + 1.5 * len(runs)) as figure:
        panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, run) in zip(panels, runs.items(), strict=True):
            assert run.starts is not None and run.ends is not None
            if run.starts.size > MOST_BOXES * len(KINDS):
                raise ValueError(
                    f"--out: expected at most {MOST_BOXES} stages x micro-batches to draw, got more"
                )
            for kind, starts, ends in zip(KINDS, run.starts, run.ends, strict=True):
                for stage, spans in enumerate(np.stack((starts, ends - starts), axis=-1)):
                    boxes = [tuple(span) for span in spans[~np.isnan(spans[:, 0])]]
                    axes.broken_barh(boxes, (stage - 0.42, 0.84), facecolors=PASS_COLORS[kind], linewidth=0)
            plot.title(axes, f"{name}: {run.step_seconds:.4g} s, bubble {run.bubble:.1%}")
            axes.locator_params(axis="y", integer=True)
            axes.set(ylabel="stage", ylim=(len(run.starts[0]) - 0.5, -0.5))
        panels[-1].set(
            xlabel="seconds (virtual clock)", xlim=(0, max(run.step_seconds for run in runs.values()))
        )
        handles = [Patch(facecolor=PASS_COLORS[kind], label=PASS_NAMES[kind]) for kind in KINDS]
        figure.legend(handles=handles, loc="upper right", ncols=3, bbox_to_anchor=(0.99, 1.0))
        plot.small_print(figure, note)
        figure.subplots_adjust(
            left=0.06,
            right=0.99,
            top=1 - 0.3 / figure.get_figheight(),
            bottom=0.6 / figure.get_figheight(),
            hspace=0.3,
        )
    return figure
