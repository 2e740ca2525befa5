"""Draws how far copies and updates overlap with compute in one step: a timeline of this machine, and timelines under a
virtual clock.

A timeline shows the device's compute, the copies in and out, and the host's updates. Bars beside each timeline show in
which share of the step copies and updates are hidden (they run while the device computes), and in which share they are
exposed (the device waits). The first timeline is a trace of a real run; the virtual timelines run the same code on
simulated machines (harness/simulation) and measure nothing. This figure is in no paper, and `case all` leaves it out.
make_timelines() runs the jobs, writes the table and draws; reports call the same functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.base.child_process import ask
from harness.base.console import counted
from harness.base.json_object import JsonObject
from harness.core import method
from harness.core.record import Record, records_of
from harness.jobs.sweep import Sweep
from harness.plan.fit import resolve
from harness.run.timeline import KINDS, TRACKS, Share, Span, Timeline, read_timeline, share
from papers.figures import case_files, plot
from papers.figures.point import machine_of
from papers.figures.profile import CaseProfile, profile_command

if TYPE_CHECKING:
    from pandas import DataFrame

NAME = "overlap"
METHODS = ("stronghold",)
PUBLISHED_DEPTH = 92  # depth of the measured run
# number of layers under the virtual clock, by kind of profile
NUM_LAYERS_OF_PROFILE = {"demo": 48, "quick": 78, "paper": 78, "fit": 78}
MACHINES = ("v100-vm", "h200", "rtx4090")
CLIPPING = "deferred"
SPAN_COLORS = {
    "forward": "#8FB8DE",
    "backward": "#2F6DB0",
    "loss": "#6E6E6E",
    "norm": "#B0B0B0",
    "update": "#8E5BD0",
    "update ahead": "#C3A6EC",
    "weights": "#57A773",
    "state": "#1E6B45",
    "gradient": "#E39A4C",
    "read": "#B58B6A",
    "write": "#7A4E2D",
}
WORK_COLORS = {"compute": "#2F6DB0", "copies": "#57A773", "updates": "#8E5BD0", "disk": "#B58B6A"}
EXPOSED_LOOK: Any = {"facecolor": "white", "edgecolor": plot.CROSS, "hatch": "////"}
LANE_NAMES = {
    "inbound": "copies in",
    "outbound": "copies out",
    "update": "host update",
}  # others keep their name
WIDTH_INCHES, ROW_INCHES = 7.6, 1.3
TOP_INCHES, BOTTOM_INCHES = 0.45, 0.8
GAP_INCHES = 0.42  # gap between rows, for a title and an axis


class StepTimeline(NamedTuple):
    """A timeline; the figure shows one of its steps. `record`: the run's record; None if the timeline is virtual."""

    timeline: Timeline
    record: Record | None

    @property
    def step(self) -> Span:
        """Return the last step but one. The work of the steps before and after it may reach into this step, and is in
        the trace."""
        return self.timeline.steps[-2]

    @property
    def title(self) -> str:
        if self.record is None:
            return str(self.timeline.about["title"])
        job = self.record.job
        options = f"{job.options['placement']}, clipping {job.options['clipping']}"
        return f"{job.method}, {counted(job.workload.num_layers, 'layer')}, {options}"

    @property
    def share(self) -> Share:
        return share(self.timeline.spans, self.step)


def run_jobs(case_profile: CaseProfile, results: Path, report: Callable[[JsonObject], None]) -> list[Record]:
    """Run the traced job, unless it has a record, and return the records. Make the virtual timelines that are missing
    or were made by older code."""
    folder = results / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    planned = resolve(case_profile.job(METHODS[0], case_profile.depth(PUBLISHED_DEPTH)))
    trace = str((folder / f"overlap_{case_profile.name}.json").resolve())
    planned = planned._replace(job=dataclasses.replace(planned.job, trace=trace))
    finished = Sweep(results, report=report).run([planned])
    missing = [name for name in MACHINES if not _is_current(_virtual_path(folder, case_profile.name, name))]
    if missing:
        report(
            {
                "event": "build",
                "text": f"virtual time: {', '.join(missing)}, {NUM_LAYERS_OF_PROFILE[case_profile.kind]} layers",
            }
        )
        arguments = {
            "machines": missing,
            "num_layers": NUM_LAYERS_OF_PROFILE[case_profile.kind],
            "clipping": CLIPPING,
            "folder": str(folder),
        }
        try:
            ask("methods.streaming.placement.virtual_schedule", arguments)
        except ValueError as error:
            report({"event": "warning", "text": f"no virtual timelines: {error}"})
    return finished


def _virtual_path(folder: Path, profile: str, name: str) -> Path:
    return folder / f"virtual_{name}_{NUM_LAYERS_OF_PROFILE[profile.split('_')[0]]}_{CLIPPING}.json"


def _is_current(path: Path) -> bool:
    try:
        return read_timeline(path).about["source"] == method.source_hash(METHODS[0])
    except ValueError:
        return False


def traced_profiles(records: Sequence[Record]) -> list[str]:
    """Return the names of the profiles whose records have traces."""
    names: dict[str, None] = {}
    for record in records:
        match = re.fullmatch(r"overlap_(.+)\.json", Path(record.job.trace or "").name)
        if match and match[1].split("_")[0] in NUM_LAYERS_OF_PROFILE:
            names[match[1]] = None
    return list(names)


def timelines_shown(profile: str, results: Path, records: Sequence[Record]) -> list[StepTimeline]:
    """Return the measured timeline, then the virtual timelines. Raises ValueError if there is no measured timeline."""
    trace_path = results / "traces" / f"overlap_{profile}.json"
    runs = [
        record
        for record in records
        if Path(record.job.trace or "").name == trace_path.name and record.status == "ok"
    ]
    if not runs or not trace_path.exists():
        raise ValueError(
            f"expected a trace of profile {profile} in {results}, got none; try {profile_command(NAME, profile)}"
        )
    paths = [_virtual_path(results / "traces", profile, name) for name in MACHINES]
    simulated = [StepTimeline(read_timeline(path), None) for path in paths if path.exists()]
    return [StepTimeline(read_timeline(trace_path), runs[-1]), *simulated]


def timeline_table(timelines: Sequence[StepTimeline]) -> DataFrame:
    """Return a table with a row for each timeline: the seconds of one step, and of each kind of work in it, as text."""
    import pandas

    frame = pandas.DataFrame(
        [
            {
                "clock": step_timeline.timeline.about["clock"],
                "title": step_timeline.timeline.about["title"],
                "step": step_timeline.step.work,
            }
            for step_timeline in timelines
        ]
    )
    for name in ("step", "compute"):
        frame[f"{name}_seconds"] = [
            f"{getattr(step_timeline.share, name):.9f}" for step_timeline in timelines
        ]
    for kind, name in itertools.product(KINDS, ("hidden", "exposed")):
        frame[f"{kind}_{name}_seconds"] = [
            f"{getattr(step_timeline.share, name)[kind]:.9f}" for step_timeline in timelines
        ]
    return frame


def write_timeline_table(timelines: Sequence[StepTimeline], profile: str, out: Path) -> Path:
    path = out / f"overlap_{profile}.csv"
    out.mkdir(parents=True, exist_ok=True)
    case_files.write_table(timeline_table(timelines), path)
    return path


def draw_timelines(timelines: Sequence[StepTimeline], profile: str, out: Path) -> list[Path]:
    return plot.save(timeline_figure(timelines, f"profile {profile}"), out / f"overlap_{profile}")


def timeline_figure(timelines: Sequence[StepTimeline], note: str) -> plot.Figure:
    """Draw one row per timeline: one step on the left, and on the right bars for the shares of the step."""
    from matplotlib.patches import Patch

    height = TOP_INCHES + len(timelines) * ROW_INCHES - GAP_INCHES + BOTTOM_INCHES
    with plot.empty(WIDTH_INCHES, height) as drawing:
        rows = drawing.subplots(len(timelines), 2, squeeze=False, gridspec_kw={"width_ratios": (3.4, 1)})
        works: set[str] = set()
        for step_timeline, (left, right) in zip(timelines, rows, strict=True):
            works |= _draw_lanes(left, step_timeline)
            _draw_shares(right, step_timeline.share)
        rows[-1][0].set_xlabel("milliseconds since the start of the step")
        rows[-1][1].set_xlabel("% of the step")
        keys = [Patch(color=color, label=work) for work, color in SPAN_COLORS.items() if work in works]
        keys.append(Patch(label="exposed", **EXPOSED_LOOK))
        drawing.legend(
            handles=keys, loc="upper right", ncols=len(keys), bbox_to_anchor=(0.995, 1.0), columnspacing=1.2
        )
        plot.small_print(drawing, _caption(timelines, note))
        drawing.subplots_adjust(
            left=0.1,
            right=0.99,
            top=1 - TOP_INCHES / height,
            bottom=BOTTOM_INCHES / height,
            wspace=0.2,
            hspace=GAP_INCHES / (ROW_INCHES - GAP_INCHES),
        )
    return drawing


def _draw_lanes(axes: plot.Axes, step_timeline: StepTimeline) -> set[str]:
    """Draw the step with a lane for each stream and thread; return the kinds of work that were drawn."""
    step, spans = step_timeline.step, step_timeline.timeline.spans
    inside = [span for span in spans if span.end > step.start and span.start < step.end]
    lanes = sorted(
        {span.track for span in inside}, key=lambda track: (TRACKS.index(track.split(" ")[0]), track)
    )
    for height, lane in enumerate(reversed(lanes)):
        for span in (span for span in inside if span.track == lane):
            start, end = max(span.start, step.start), min(span.end, step.end)
            interval = (1000 * (start - step.start), 1000 * (end - start))
            axes.broken_barh([interval], (height - 0.4, 0.8), facecolor=SPAN_COLORS.get(span.work, plot.EDGE))
    names = (lane.partition(" ") for lane in reversed(lanes))
    axes.set_yticks(
        range(len(lanes)), [f"{LANE_NAMES.get(kind, kind)} {number}".strip() for kind, _, number in names]
    )
    milliseconds = 1000 * (step.end - step.start)
    axes.set(xlim=(0, milliseconds), ylim=(-0.6, len(lanes) - 0.4))
    source = "virtual, nothing measured" if step_timeline.timeline.about["clock"] == "virtual" else "measured"
    gate = "" if step_timeline.record is None or step_timeline.record.gate.passed else ", gate not passed"
    title = f"{source}{gate}: {step_timeline.title}; {step.work}, {plot.number(milliseconds)} ms"
    axes.set_title(title, fontsize=6.3, loc="left", color=plot.EDGE)
    return {span.work for span in inside}


def _draw_shares(axes: plot.Axes, shares: Share) -> None:
    """Draw bars in percent of the step's time: one bar for compute, and one bar for each other kind of work, which
    shows the work's hidden and exposed parts."""
    names = [*(kind for kind in reversed(KINDS) if shares.hidden[kind] + shares.exposed[kind] > 0), "compute"]
    for height, name in enumerate(names):
        hidden = 100 * shares.hidden.get(name, shares.compute) / shares.step
        exposed = 100 * shares.exposed.get(name, 0.0) / shares.step
        axes.barh(height, hidden, 0.62, color=WORK_COLORS[name])
        if exposed >= 0.5:
            axes.barh(height, exposed, 0.62, left=hidden, linewidth=0.6, **EXPOSED_LOOK)
        text = f"{hidden:.0f}" if name == "compute" else f"{hidden:.0f} + {exposed:.0f}"
        axes.text(hidden + exposed + 2, height, text, fontsize=5.8, va="center", color=plot.EDGE)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, 125), ylim=(-0.6, len(names) - 0.4), xticks=[0, 50, 100])
    axes.set_title("busy; hidden + exposed", fontsize=6.5, loc="left", color=plot.EDGE)


def _caption(timelines: Sequence[StepTimeline], note: str) -> str:
    texts = [
        "exposed: while the device does not compute; copies and updates exposed at once count in both bars"
    ]
    for record in (step_timeline.record for step_timeline in timelines if step_timeline.record):
        clock = plot.CLOCKS.get(record.clock, record.clock)
        where = f"{machine_of(record)}; clock {clock}; one step of one run"
        texts.append(f"measured: {note}; {where}; gate: {record.gate.verdict}")
    if len(timelines) > 1:
        texts.append(
            "virtual: the method's own code under a virtual clock, by the rates of machines.yaml, published"
            " shape; no number of it was measured"
        )
    return plot.wrapped(texts)


def make_timelines(
    case_profile: CaseProfile,
    results: Path,
    out: Path,
    only: str | None,
    report: Callable[[JsonObject], None],
) -> list[Record]:
    """Run the jobs, write the table and draw the figure; return the records. If `only` is "extract", write and print
    the table alone. If `only` is "draw", write the table and draw. In both cases no job runs; None: do all."""
    finished = [] if only else run_jobs(case_profile, results, report)
    timelines = timelines_shown(case_profile.name, results, records_of(results))
    path = write_timeline_table(timelines, case_profile.name, out)
    if only == "extract":
        print(path.read_text(), end="")
        return finished
    figures = draw_timelines(timelines, case_profile.name, out)
    print(f"case overlap: {', '.join(map(str, [path, *figures]))}")
    return finished
